//! Images whose bytes come from a Python file object.

use std::fmt;
use std::io;
use std::thread::ThreadId;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use vdkit::{Error, HostOffset, IoAction, Result, Storage, StorageCaps};

/// What a file object raised: the cause of the error with which its read ends, so that the call that read
/// raises it, and no other. It has its text with it, since to print an exception takes the interpreter's lock.
#[derive(Debug)]
pub(crate) struct Raised {
    text: String,
    pub(crate) exception: PyErr,
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Raised {}

/// A seekable binary file object, read only. One call at a time uses its position.
pub(crate) struct FileObject {
    file: Mutex<Py<PyAny>>,
    /// The thread that is in the file object's own code.
    within: Mutex<Option<ThreadId>>,
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
        let end = file.call_method1("seek", (0, 2))?;
        // The seek of some, such as mmap before Python 3.13, returns nothing.
        let len = if end.is_none() { file.call_method0("tell")? } else { end }.extract()?;
        let (file, within) = (Mutex::new(file.clone().unbind()), Mutex::default());
        Ok(Self { file, within, name, len })
    }

    fn error(&self, offset: u64, len: u64, cause: io::Error) -> Error {
        Error::io(&self.name, IoAction::Read, offset, len, cause)
    }

    /// Whether the calling thread is in the file object's own code, or in a signal handler meanwhile.
    pub(crate) fn is_read_here(&self) -> bool {
        *self.within.lock() == Some(std::thread::current().id())
    }

    fn set_within(&self, thread: Option<ThreadId>) {
        *self.within.lock() = thread;
    }
}

/// Reads all of `buf`; returns how much there was, and whether the object gave more than asked for.
fn fill(py: Python<'_>, file: &Py<PyAny>, buf: &mut [u8], offset: u64) -> PyResult<(usize, bool)> {
    let mut done = 0;
    file.call_method1(py, "seek", (offset,))?;
    while done < buf.len() {
        let left = buf.len() - done;
        let bytes: PyBackedBytes = file.call_method1(py, "read", (left,))?.extract(py)?;
        if bytes.len() > left {
            return Ok((done, true));
        }
        if bytes.is_empty() {
            break;
        }
        buf[done..done + bytes.len()].copy_from_slice(&bytes);
        done += bytes.len();
    }
    Ok((done, false))
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
        let wanted = usize::try_from(self.len.saturating_sub(offset.0))
            .map_or(buf.len(), |left| left.min(buf.len()));
        // Taken before the interpreter's lock, which the holder of this one needs.
        let file = self.file.lock();
        self.set_within(Some(std::thread::current().id()));
        let read = Python::attach(|py| {
            fill(py, &file, &mut buf[..wanted], offset.0).map_err(|exception| {
                let text = format!("the file object says: {exception}");
                io::Error::other(Raised { text, exception })
            })
        });
        self.set_within(None);
        match read {
            Ok((done, false)) if done == wanted => Ok(done),
            Ok((done, more)) => {
                let how = if more { "gave more than it was asked for" } else { "ended" };
                let why = format!("the file object {how} after {done} of {wanted} bytes");
                Err(self.error(offset.0, wanted as u64, io::Error::other(why)))
            }
            Err(why) => Err(self.error(offset.0, wanted as u64, why)),
        }
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}
