//! An open disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::RecursiveRwLock;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vdkit::{
    BackingChoice, DiskPlace, Error, GuestOffset, NewBitmap, OpenOptions, RefPolicy, Result,
    Secret, jobs,
};

use crate::errors::{misuse, raise};
use crate::jobs::{abandonable, run};
use crate::memory::{new_bytes, with_bytes, with_bytes_mut};
use crate::number::Number;
use crate::source::FileObject;

/// The options by which images are opened, as Python passes them.
#[derive(Default, FromPyObject)]
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
    /// Whether a server may be asked. A file of this computer is opened in less time than a thread starts.
    fn may_wait(&self, path: &Path) -> bool {
        let names = [Some(path), self.backing.as_deref()];
        names.into_iter().flatten().any(|name| name.as_os_str().as_encoded_bytes().contains(&b':'))
    }

    pub(crate) fn options(&self) -> Result<OpenOptions> {
        Ok(OpenOptions::read_only()
            .maybe_format(self.format.clone())
            .writable(self.writable)
            .cache(match &self.cache {
                Some(cache) => cache.parse()?,
                None => Default::default(),
            })
            .refs(self.folders.clone().map_or(RefPolicy::OwnFolder, RefPolicy::Folders))
            .lock(self.lock)
            .backing(match &self.backing {
                _ if self.alone => BackingChoice::Ignore,
                Some(path) => BackingChoice::Override { path: path.clone(), format: None },
                None => BackingChoice::Follow,
            })
            .snapshot(self.snapshot.clone())
            .keys(self.keys.iter().map(|key| Secret::new(key.clone())).collect()))
    }
}

/// An open disk; `vdkit.Disk` wraps it. Each call holds the lock for reading, so that closing waits for
/// it. The lock is only ever waited for without the interpreter's.
#[pyclass(frozen, module = "vdkit._vdkit")]
pub(crate) struct Disk {
    disk: RecursiveRwLock<Option<vdkit::Disk>>,
    /// What it stands on, if that is no file. Its code, and that of signal handlers, runs within calls.
    file: Option<Arc<FileObject>>,
}

impl Disk {
    fn new(disk: vdkit::Disk, file: Option<Arc<FileObject>>) -> Self {
        Self { disk: RecursiveRwLock::new(Some(disk)), file }
    }

    /// Calls the engine without the interpreter's lock.
    pub(crate) fn call<T>(&self, act: impl FnOnce(&vdkit::Disk) -> Result<T>) -> Result<T> {
        self.refuse_within("is not read or changed")?;
        self.look(act)?
    }

    /// As [`Disk::call`], for what reads nothing, so that it may also be asked within a call.
    fn look<T>(&self, act: impl FnOnce(&vdkit::Disk) -> T) -> Result<T> {
        // Recursive, since a call can be within another: a file object's own code, `compare(disk, disk)`.
        self.disk.read().as_ref().map(act).ok_or_else(closed)
    }

    /// Refuses what would wait for itself: this thread reads the file object.
    fn refuse_within(&self, what: &str) -> Result<()> {
        if self.file.as_ref().is_none_or(|file| !file.is_read_here()) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the disk {what} while the file object that it stands on is read by the same thread"
        )))
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&vdkit::Disk) -> Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| self.call(act)).map_err(|error| raise(py, &error))
    }

    fn seen<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&vdkit::Disk) -> T + Send,
    ) -> PyResult<T> {
        py.detach(|| self.look(act)).map_err(|error| raise(py, &error))
    }

    /// The disk, once no other call uses it; `None` if it is closed.
    fn taken(&self) -> Result<Option<vdkit::Disk>> {
        self.refuse_within("is not closed")?;
        Ok(self.disk.write().take())
    }

    /// Takes the disk for a job or a server, which closes it, once no other call uses it.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<vdkit::Disk> {
        let taken = py.detach(|| self.taken()?.ok_or_else(closed));
        taken.map_err(|error| raise(py, &error))
    }
}

/// An opened disk that is closed if nobody wants it any more.
struct Unwanted(Option<vdkit::Disk>);

impl Unwanted {
    fn new(disk: vdkit::Disk) -> Self {
        Self(Some(disk))
    }

    fn wanted(mut self) -> vdkit::Disk {
        self.0.take().expect("it is taken once")
    }
}

impl Drop for Unwanted {
    fn drop(&mut self) {
        if let Some(disk) = self.0.take() {
            // Nothing was written to it, and nobody is left to tell.
            let _ = disk.close();
        }
    }
}

fn closed() -> Error {
    Error::invalid("the disk is closed")
}

/// How many of `len` bytes at `offset` are on the disk.
fn left(disk: &vdkit::Disk, offset: u64, len: usize) -> usize {
    usize::try_from(disk.guest_bytes().saturating_sub(offset)).map_or(len, |left| left.min(len))
}

/// Memory of this size is taken without asking whether the range is on the disk.
const SMALL: usize = 1 << 20;

type ExtentRow = (u64, u64, u32, bool, bool, bool, Option<String>, Option<u64>);

#[pymethods]
impl Disk {
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, opening: Opening) -> PyResult<Self> {
        let remote = opening.may_wait(&path);
        let open = move || vdkit::Disk::open(&vdkit::registry(), &path, &opening.options()?);
        let opened = if remote {
            abandonable(py, move || open().map(Unwanted::new)).map(Unwanted::wanted)
        } else {
            py.detach(open).map_err(|error| raise(py, &error))
        };
        opened.map(|disk| Self::new(disk, None))
    }

    #[staticmethod]
    fn open_file(
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        name: String,
        opening: Opening,
    ) -> PyResult<Self> {
        let file = Arc::new(FileObject::new(file, name)?);
        let opened = py.detach(|| {
            vdkit::Disk::open_storage(&vdkit::registry(), file.clone(), &opening.options()?)
        });
        opened.map(|disk| Self::new(disk, Some(file))).map_err(|error| raise(py, &error))
    }

    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        self.seen(py, vdkit::Disk::guest_bytes)
    }

    #[getter]
    fn writable(&self, py: Python<'_>) -> PyResult<bool> {
        self.seen(py, vdkit::Disk::writable)
    }

    #[getter]
    fn format(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.seen(py, |disk| disk.top().name())
    }

    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: Number<u64>,
        len: Number<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (Number(offset), Number(len)) = (offset, len);
        // Before memory is taken for it.
        if len > SMALL {
            self.with(py, |disk| match left(disk, offset, len) {
                left if left == len => Ok(()),
                _ => {
                    let size = disk.guest_bytes();
                    let why = format!("{len} bytes at {offset} end beyond the disk's {size}");
                    Err(Error::invalid_for(&disk.name(), why))
                }
            })?;
        }
        new_bytes(py, len, |buf| self.with(py, |disk| disk.read_at(buf, GuestOffset(offset))))
    }

    /// Reads into an object's memory what the disk has from `offset` on, at most `most` bytes; returns how
    /// many.
    fn readinto(
        &self,
        py: Python<'_>,
        offset: Number<u64>,
        memory: &Bound<'_, PyAny>,
        most: usize,
    ) -> PyResult<usize> {
        let Number(offset) = offset;
        with_bytes_mut(memory, |buf| {
            self.with(py, |disk| {
                let len = left(disk, offset, buf.len().min(most));
                disk.read_at(&mut buf[..len], GuestOffset(offset.min(disk.guest_bytes())))?;
                Ok(len)
            })
        })?
    }

    fn write(&self, py: Python<'_>, offset: Number<u64>, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let write = |data: &[u8]| self.with(py, |disk| disk.write_at(data, GuestOffset(offset.0)));
        match with_bytes(data, write) {
            // Not one run of bytes, such as every second one of an array (NumPy raises ValueError).
            Err(error)
                if error.is_instance_of::<PyBufferError>(py)
                    || error.is_instance_of::<PyValueError>(py) =>
            {
                with_bytes(&py.get_type::<PyBytes>().call1((data,))?, write)?
            }
            written => written?,
        }
    }

    fn write_zeroes(
        &self,
        py: Python<'_>,
        offset: Number<u64>,
        len: Number<u64>,
        unmap: bool,
    ) -> PyResult<()> {
        self.with(py, |disk| disk.write_zeroes(GuestOffset(offset.0), len.0, unmap))
    }

    fn discard(&self, py: Python<'_>, offset: Number<u64>, len: Number<u64>) -> PyResult<()> {
        self.with(py, |disk| disk.discard(GuestOffset(offset.0), len.0))
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, vdkit::Disk::flush)
    }

    fn resize(
        &self,
        py: Python<'_>,
        size: Number<u64>,
        shrink: bool,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let mut options = jobs::ResizeOptions::default();
        options.shrink = shrink;
        run(py, progress, |monitor| self.call(|disk| jobs::resize(disk, size.0, &options, monitor)))
    }

    fn snapshot(
        &self,
        py: Python<'_>,
        action: &str,
        name: String,
        progress: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let action = match action {
            "create" => jobs::SnapshotAction::Create(name),
            "apply" => jobs::SnapshotAction::Apply(name),
            "delete" => jobs::SnapshotAction::Delete(name),
            other => return Err(misuse(py, format!("unknown action '{other}'"))),
        };
        run(py, progress, |monitor| {
            self.call(|disk| jobs::snapshot(disk, &action, monitor).map(|_| ()))
        })
    }

    fn snapshots(&self, py: Python<'_>) -> PyResult<String> {
        let all = self.with(py, jobs::snapshots)?;
        Ok(crate::jobs::json_of(&all))
    }

    /// What the headers of its images say, as JSON.
    fn describe(&self, py: Python<'_>) -> PyResult<String> {
        let images = self.with(py, |disk| jobs::describe_disk(&vdkit::registry(), disk))?;
        Ok(crate::jobs::json_of(&images.iter().map(jobs::Described::from).collect::<Vec<_>>()))
    }

    /// Extents of a range, at most `max` of them: offset, length, depth, zero, allocated, compressed,
    /// file, offset in the file.
    fn extents(
        &self,
        py: Python<'_>,
        offset: Number<u64>,
        len: Number<u64>,
        max: usize,
    ) -> PyResult<Vec<ExtentRow>> {
        self.with(py, |disk| {
            let rows = disk.extents(GuestOffset(offset.0), len.0)?.take(max).map(|extent| {
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

    /// Changes a dirty bitmap; durable on return.
    fn bitmap(
        &self,
        py: Python<'_>,
        action: &str,
        name: &str,
        granularity: Option<Number<u64>>,
    ) -> PyResult<()> {
        let granularity = granularity.map(|Number(bytes)| bytes);
        self.with(py, |disk| {
            let bitmaps = jobs::bitmaps(disk)?;
            match action {
                "add" => bitmaps.add(&NewBitmap { name, granularity, enabled: true }),
                "remove" => bitmaps.remove(name),
                "clear" => bitmaps.clear(name),
                "enable" => bitmaps.set_enabled(name, true),
                "disable" => bitmaps.set_enabled(name, false),
                other => Err(Error::invalid(format!("unknown action '{other}'"))),
            }
        })
    }

    /// What a dirty bitmap marks: offsets and lengths.
    fn bitmap_ranges(&self, py: Python<'_>, name: &str) -> PyResult<Vec<(u64, u64)>> {
        self.with(py, |disk| {
            let mut ranges = Vec::new();
            jobs::bitmaps(disk)?.for_each_dirty(name, &mut |range| {
                ranges.push((range.start, range.end - range.start));
                Ok(())
            })?;
            Ok(ranges)
        })
    }

    /// Whether it is not closed, or taken over by a job or a server.
    #[getter]
    fn is_open(&self, py: Python<'_>) -> bool {
        py.detach(|| self.look(|_| ()).is_ok())
    }

    /// Flushes and closes, once no other call uses it; may be called again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = py.detach(|| self.taken()?.map_or(Ok(()), |disk| disk.close()));
        closed.map_err(|error| raise(py, &error))
    }
}
