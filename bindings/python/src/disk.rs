//! An open disk.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use vdkit::{
    BackingChoice, DiskPlace, GuestOffset, Monitor, OpenOptions, RefPolicy, Result, Secret, jobs,
};

use crate::errors::{misuse, raise};
use crate::source::FileObject;

/// The options by which images are opened, as Python passes them.
#[derive(Debug, Default, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Opening {
    format: Option<String>,
    cache: Option<String>,
    snapshot: Option<String>,
    backing: Option<PathBuf>,
    alone: bool,
    keys: Vec<Vec<u8>>,
    folders: Option<Vec<PathBuf>>,
    lock: bool,
    pub(crate) writable: bool,
}

impl Opening {
    pub(crate) fn options(&self) -> Result<OpenOptions> {
        Ok(OpenOptions {
            format: self.format.clone(),
            writable: self.writable,
            cache: match &self.cache {
                Some(cache) => cache.parse()?,
                None => Default::default(),
            },
            refs: self.folders.clone().map_or(RefPolicy::OwnFolder, RefPolicy::Folders),
            lock: self.lock,
            backing: match &self.backing {
                _ if self.alone => BackingChoice::Ignore,
                Some(path) => BackingChoice::Override { path: path.clone(), format: None },
                None => BackingChoice::Follow,
            },
            snapshot: self.snapshot.clone(),
            keys: self.keys.iter().map(|key| Secret::new(key.clone())).collect(),
            ..OpenOptions::read_only()
        })
    }
}

/// An open disk; `vdkit.Disk` wraps it.
#[pyclass(frozen, module = "vdkit._vdkit")]
pub(crate) struct Disk(RwLock<Option<Arc<vdkit::Disk>>>);

impl Disk {
    /// The disk, if it is open. It is closed when the last call that has it returns.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<vdkit::Disk>> {
        let disk = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        disk.ok_or_else(|| misuse(py, "the disk is closed"))
    }

    /// Calls the engine without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&vdkit::Disk) -> Result<T> + Send,
    ) -> PyResult<T> {
        let disk = self.get(py)?;
        py.detach(|| act(&disk)).map_err(|error| raise(py, &error))
    }

    /// Takes the disk for a job or a server, if no other call uses it.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<vdkit::Disk> {
        let mut place = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let disk = place.take().ok_or_else(|| misuse(py, "the disk is closed"))?;
        Arc::try_unwrap(disk).map_err(|used| {
            *place = Some(used);
            misuse(py, "another thread uses the disk")
        })
    }
}

type ExtentRow = (u64, u64, u32, bool, bool, bool, Option<String>, Option<u64>);

#[pymethods]
impl Disk {
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, opening: Opening) -> PyResult<Self> {
        let opened =
            py.detach(|| vdkit::Disk::open(&vdkit::registry(), &path, &opening.options()?));
        let disk = opened.map_err(|error| raise(py, &error))?;
        Ok(Self(RwLock::new(Some(Arc::new(disk)))))
    }

    #[staticmethod]
    fn open_file(
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        name: String,
        opening: Opening,
    ) -> PyResult<Self> {
        let storage = Arc::new(FileObject::new(file, name)?);
        let opened = py
            .detach(|| vdkit::Disk::open_storage(&vdkit::registry(), storage, &opening.options()?));
        let disk = opened.map_err(|error| raise(py, &error))?;
        Ok(Self(RwLock::new(Some(Arc::new(disk)))))
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.guest_bytes())
    }

    #[getter]
    fn writable(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.get(py)?.writable())
    }

    #[getter]
    fn format(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(self.get(py)?.top().name())
    }

    fn read<'py>(&self, py: Python<'py>, offset: u64, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        let disk = self.get(py)?;
        PyBytes::new_with(py, len, |buf| {
            py.detach(|| disk.read_at(buf, GuestOffset(offset))).map_err(|error| raise(py, &error))
        })
    }

    fn write(&self, py: Python<'_>, offset: u64, data: PyBackedBytes) -> PyResult<()> {
        self.with(py, |disk| disk.write_at(&data, GuestOffset(offset)))
    }

    fn write_zeroes(&self, py: Python<'_>, offset: u64, len: u64, unmap: bool) -> PyResult<()> {
        self.with(py, |disk| disk.write_zeroes(GuestOffset(offset), len, unmap))
    }

    fn discard(&self, py: Python<'_>, offset: u64, len: u64) -> PyResult<()> {
        self.with(py, |disk| disk.discard(GuestOffset(offset), len))
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, vdkit::Disk::flush)
    }

    fn resize(&self, py: Python<'_>, size: u64, shrink: bool) -> PyResult<()> {
        let options = jobs::ResizeOptions { shrink, ..jobs::ResizeOptions::default() };
        self.with(py, |disk| jobs::resize(disk, size, &options, &Monitor::default()))
    }

    fn snapshot(&self, py: Python<'_>, action: &str, name: String) -> PyResult<()> {
        let action = match action {
            "create" => jobs::SnapshotAction::Create(name),
            "apply" => jobs::SnapshotAction::Apply(name),
            "delete" => jobs::SnapshotAction::Delete(name),
            other => return Err(misuse(py, format!("unknown action '{other}'"))),
        };
        self.with(py, |disk| jobs::snapshot(disk, &action, &Monitor::default()).map(|_| ()))
    }

    fn snapshots(&self, py: Python<'_>) -> PyResult<String> {
        let all = self.with(py, jobs::snapshots)?;
        Ok(crate::jobs::json_of(&all))
    }

    /// Extents of a range, at most `max` of them: offset, length, depth, zero, allocated, compressed,
    /// file, offset in the file.
    fn extents(
        &self,
        py: Python<'_>,
        offset: u64,
        len: u64,
        max: usize,
    ) -> PyResult<Vec<ExtentRow>> {
        self.with(py, |disk| {
            let rows = disk.extents(GuestOffset(offset), len)?.take(max).map(|extent| {
                let extent = extent?;
                let (zero, allocated, compressed, host) = match &extent.place {
                    DiskPlace::Data { storage, offset } => {
                        (false, true, false, Some((storage, *offset)))
                    }
                    DiskPlace::Compressed { storage, compressed } => {
                        (false, true, true, Some((storage, compressed.offset)))
                    }
                    DiskPlace::Zero { allocated } => (true, *allocated, false, None),
                    DiskPlace::Hole => (true, false, false, None),
                };
                let file = host.map(|(storage, _)| storage.name().to_owned());
                let depth = u32::try_from(extent.depth).unwrap_or(u32::MAX);
                let at = host.map(|(_, offset)| offset.0);
                Ok((extent.at.0, extent.len, depth, zero, allocated, compressed, file, at))
            });
            rows.collect()
        })
    }

    /// Flushes and closes; may be called again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let disk = self.0.write().unwrap_or_else(PoisonError::into_inner).take();
        match disk {
            Some(disk) => py.detach(|| disk.close()).map_err(|error| raise(py, &error)),
            None => Ok(()),
        }
    }
}
