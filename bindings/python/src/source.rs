//! Images whose bytes come from a Python file object.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, LazyLock, Weak};
use std::thread::ThreadId;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use vdkit::{Error, HostOffset, IoAction, Result, Storage, StorageCaps};

use crate::errors::raise;

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

/// The position of a Python object, which all disks over that object share.
#[derive(Default)]
struct Position {
    /// Held from a seek to the end of the reads there.
    used: Mutex<()>,
    /// The thread that is in the file object's own code.
    within: Mutex<Option<ThreadId>>,
}

impl Position {
    /// That of an object, which each caller keeps alive as long as its result, so that no other object
    /// gets its address.
    fn of(file: &Bound<'_, PyAny>) -> Arc<Self> {
        type Positions = HashMap<(u32, usize), Weak<Position>>;
        // Only used with the interpreter's lock, so that no other thread holds it during a fork. A child
        // of fork has positions of its own: a thread that it does not have may hold its parent's.
        static POSITIONS: LazyLock<Mutex<Positions>> = LazyLock::new(Mutex::default);
        let mut all = POSITIONS.lock();
        all.retain(|_, position| position.strong_count() > 0);
        let place = all.entry((std::process::id(), file.as_ptr().addr())).or_default();
        place.upgrade().unwrap_or_else(|| {
            let new = Arc::default();
            *place = Arc::downgrade(&new);
            new
        })
    }

    /// Whether the calling thread is in the file object's own code, or in a signal handler meanwhile.
    fn is_used_here(&self) -> bool {
        *self.within.lock() == Some(std::thread::current().id())
    }

    /// Runs code of the file object. Called without the interpreter's lock, for which the thread that uses
    /// the position may wait.
    fn alone<T>(&self, act: impl FnOnce(Python<'_>) -> T) -> T {
        let _used = self.used.lock();
        *self.within.lock() = Some(std::thread::current().id());
        let done = Python::attach(act);
        *self.within.lock() = None;
        done
    }
}

/// A seekable binary file object, read only. One call at a time uses its position, of all disks over it.
pub(crate) struct FileObject {
    file: Py<PyAny>,
    position: Arc<Position>,
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
        let (py, position) = (file.py(), Position::of(file));
        if position.is_used_here() {
            let what = "is not opened while it is read by the same thread";
            return Err(raise(py, &Error::invalid_for(&name, what)));
        }
        let file = file.clone().unbind();
        let len = py.detach(|| position.alone(|py| end_of(py, &file)))?;
        Ok(Self { file, position, name, len })
    }

    fn error(&self, offset: u64, len: u64, cause: io::Error) -> Error {
        Error::io(&self.name, IoAction::Read, offset, len, cause)
    }

    /// Whether the calling thread is in the file object's own code, or in a signal handler meanwhile.
    pub(crate) fn is_read_here(&self) -> bool {
        self.position.is_used_here()
    }
}

/// Where the object ends.
fn end_of(py: Python<'_>, file: &Py<PyAny>) -> PyResult<u64> {
    let end = file.call_method1(py, "seek", (0, 2))?;
    // The seek of some, such as mmap before Python 3.13, returns nothing.
    if end.is_none(py) { file.call_method0(py, "tell")? } else { end }.extract(py)
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
        let read = self.position.alone(|py| {
            fill(py, &self.file, &mut buf[..wanted], offset.0).map_err(|exception| {
                let text = format!("the file object says: {exception}");
                io::Error::other(Raised { text, exception })
            })
        });
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
