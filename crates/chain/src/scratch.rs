//! Buffers that a request needs for a moment, kept by each thread, so that a request allocates
//! nothing once a thread has warmed up.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use vdkit_storage::AlignedBuf;

/// Alignment of every buffer: what O_DIRECT asks on any device in use.
const ALIGN: usize = 4096;

/// Buffers are made in these sizes and doubles of them, so that they fit the next request too.
const BYTES_MIN: usize = 64 << 10;

/// A thread keeps at most so many idle buffers (a nested request needs two at once) of at most so
/// many bytes each.
const KEPT: usize = 2;
const KEPT_BYTES_MAX: usize = 2 << 20;

thread_local! {
    static IDLE: RefCell<Vec<AlignedBuf>> = const { RefCell::new(Vec::new()) };
}

/// A buffer with arbitrary content, for one request.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Nothing only while being dropped.
    buf: Option<AlignedBuf>,
    len: usize,
}

impl Scratch {
    /// A buffer of `len` bytes, whose content is left over from earlier requests.
    pub(crate) fn new(len: usize) -> Self {
        let idle = IDLE.with_borrow_mut(|idle| {
            let fit = idle.iter().position(|buf| buf.len() >= len)?;
            Some(idle.swap_remove(fit))
        });
        let buf =
            idle.unwrap_or_else(|| AlignedBuf::new(len.next_power_of_two().max(BYTES_MIN), ALIGN));
        Self { buf: Some(buf), len }
    }
}

impl Deref for Scratch {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buf.as_deref().map_or(&[], |buf| &buf[..self.len])
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.buf.as_deref_mut().map_or(&mut [], |buf| &mut buf[..len])
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let Some(buf) = self.buf.take() else { return };
        if buf.len() > KEPT_BYTES_MAX {
            return;
        }
        // A thread that is ending has no place for it any more.
        let _ = IDLE.try_with(|idle| {
            let mut idle = idle.borrow_mut();
            if idle.len() < KEPT {
                idle.push(buf);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_uses_its_buffers_again() {
        let first = Scratch::new(100_000);
        assert_eq!(first.len(), 100_000);
        let address = first.as_ptr();
        assert_eq!(address.addr() % ALIGN, 0);
        drop(first);
        let again = Scratch::new(70_000);
        assert_eq!(again.as_ptr(), address);
        let nested = Scratch::new(1);
        assert_ne!(nested.as_ptr(), address);
        drop((again, nested));
        drop(Scratch::new(KEPT_BYTES_MAX + 1));
        assert!(IDLE.with_borrow(|idle| idle.len() <= KEPT));
    }
}
