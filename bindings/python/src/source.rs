//! Images whose bytes come from a Python file object.

use std::fmt;
use std::io;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use vdkit::{Error, HostOffset, IoAction, Result, Storage, StorageCaps};

/// A seekable binary file object, read only. One call at a time uses its position.
pub(crate) struct FileObject {
    file: Mutex<Py<PyAny>>,
    name: String,
    len: u64,
}

impl fmt::Debug for FileObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileObject").field("name", &self.name).finish_non_exhaustive()
    }
}

impl FileObject {
    pub(crate) fn new(file: &Bound<'_, PyAny>, name: String) -> PyResult<Self> {
        let len = file.call_method1("seek", (0, 2))?.extract()?;
        Ok(Self { file: Mutex::new(file.clone().unbind()), name, len })
    }

    fn error(&self, offset: u64, len: u64, found: &PyErr) -> Error {
        let source = io::Error::other(format!("the file object says: {found}"));
        Error::io(&self.name, IoAction::Read, offset, len, source)
    }
}

impl Storage for FileObject {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { remote: true, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        // Taken before the interpreter's lock, which the holder of this one needs.
        let file = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let read = Python::attach(|py| {
            let mut done = 0;
            file.call_method1(py, "seek", (offset.0,))?;
            while done < buf.len() {
                let bytes: PyBackedBytes =
                    file.call_method1(py, "read", (buf.len() - done,))?.extract(py)?;
                if bytes.is_empty() || bytes.len() > buf.len() - done {
                    break;
                }
                buf[done..done + bytes.len()].copy_from_slice(&bytes);
                done += bytes.len();
            }
            Ok::<_, PyErr>(done)
        });
        read.map_err(|found| self.error(offset.0, buf.len() as u64, &found))
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
