//! Per-thread scratch buffers, so that a request allocates nothing in the steady state.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use vdkit_storage::AlignedBuf;

/// Alignment of every buffer; enough for O_DIRECT on any device.
const ALIGN: usize = 4096;

/// Buffer sizes are this, doubled as needed, so that a buffer fits later requests too.
const BYTES_MIN: usize = 64 << 10;

/// Maximum idle buffers per thread (a nested request needs two), and their maximum size.
const KEPT: usize = 2;
const KEPT_BYTES_MAX: usize = 2 << 20;

thread_local! {
    static IDLE: RefCell<Vec<AlignedBuf>> = const { RefCell::new(Vec::new()) };
}

/// A buffer for one request, with undefined content.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// `None` only while being dropped.
    buf: Option<AlignedBuf>,
    len: usize,
}

impl Scratch {
    /// A buffer of `len` bytes with undefined content.
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
        // Fails if the thread is ending.
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
