//! A storage that shares blocks, as on a file system with reflinks.

use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;
use vdkit_block::{CopyMethod, CopyOp, Error, IoAction, KernelCopy, Result, Storage};

/// What becomes of a request to share once as many as may succeed have done so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoShare {
    /// Nothing is shared, as where blocks do not fit.
    Refuse,
    /// The request fails with EIO.
    Fail,
}

/// See the module. Blocks are 4096 bytes; offsets and lengths that are not whole ones are refused,
/// as FICLONERANGE refuses them.
#[derive(Debug)]
pub struct SharingStorage {
    inner: Arc<dyn Storage>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests to share, as (offset here, bytes).
    requests: Vec<(u64, u64)>,
    limit: Option<(usize, NoShare)>,
}

const BLOCK: u64 = 4096;

impl SharingStorage {
    /// A storage that shares whatever it is asked to.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self { inner, state: Mutex::default() })
    }

    /// From the request of this number (from 0) on, sharing does not work.
    pub fn limit(&self, number: usize, then: NoShare) {
        self.state.lock().limit = Some((number, then));
    }

    /// All requests to share so far, as (offset here, bytes).
    pub fn requests(&self) -> Vec<(u64, u64)> {
        self.state.lock().requests.clone()
    }
}

impl vdkit_block::StorageLayer for SharingStorage {
    const INTERCEPTS: bool = false;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    vdkit_block::capabilities!(kernel_copy: KernelCopy);
}

impl KernelCopy for SharingStorage {
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        let CopyOp { to, source, from, len, method } = *op;
        let whole = [to.0, from.0, len].iter().all(|n| n.is_multiple_of(BLOCK));
        if method != CopyMethod::Reflink || !whole || from.0 + len > source.len()? {
            return Ok(0);
        }
        {
            let mut state = self.state.lock();
            let number = state.requests.len();
            state.requests.push((to.0, len));
            match state.limit {
                Some((limit, NoShare::Refuse)) if number >= limit => return Ok(0),
                Some((limit, NoShare::Fail)) if number >= limit => {
                    let (name, error) = (self.name(), Errno::IO.into());
                    return Err(Error::io(name, IoAction::Write, to.0, len, error));
                }
                _ => {}
            }
        }
        let mut done = 0;
        let mut block = vec![0; 1 << 20];
        while done < len {
            let part = &mut block[..(len - done).min(1 << 20) as usize];
            source.read_at(part, from + done)?;
            self.inner.write_at(part, to + done)?;
            done += part.len() as u64;
        }
        Ok(done)
    }
}
