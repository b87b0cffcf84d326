//! Reusable buffers for request data.

use parking_lot::Mutex;
use vdkit_storage::AlignedBuf;

/// Page alignment makes the kernel's copies faster and avoids a bounce buffer in direct I/O.
const ALIGN: usize = 4096;
/// Minimum allocation.
const BYTES_MIN: usize = 64 << 10;
/// Maximum size of an idle buffer.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// A buffer that is zeroed only when allocated.
#[derive(Debug, Default)]
pub struct Buffer {
    memory: Option<AlignedBuf>,
    len: usize,
}

impl Buffer {
    /// Space for `len` bytes, with undefined content.
    pub fn room(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        if self.memory.as_ref().is_some_and(|memory| memory.len() < len) {
            // Free the old one first, so that two never coexist.
            self.memory = None;
        }
        let memory = self
            .memory
            .get_or_insert_with(|| AlignedBuf::new(len.next_power_of_two().max(BYTES_MIN), ALIGN));
        &mut memory[..len]
    }

    /// The bytes of the last [`Buffer::room`].
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

/// The buffers of a connection, last in, first out: the last one returned is likeliest in the
/// processor's cache. There are as many as concurrent requests, not as threads.
#[derive(Debug, Default)]
pub struct Buffers {
    idle: Mutex<Vec<Buffer>>,
}

impl Buffers {
    /// An idle buffer, or a new one.
    pub fn take(&self) -> Buffer {
        self.idle.lock().pop().unwrap_or_default()
    }

    /// Returns a buffer, unless it grew for a large request.
    pub fn give_back(&self, buffer: Buffer) {
        if buffer.memory.as_ref().is_some_and(|memory| memory.len() <= KEPT_BYTES_MAX) {
            self.idle.lock().push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_as_it_was_left() {
        let buffers = Buffers::default();
        let mut first = buffers.take();
        first.room(100_000).fill(7);
        let address = first.bytes().as_ptr();
        assert_eq!(address.addr() % ALIGN, 0);
        let mut second = buffers.take();
        second.room(1);
        buffers.give_back(second);
        buffers.give_back(first);
        // Last in, first out; nothing was zeroed or moved.
        let mut again = buffers.take();
        assert_eq!(again.room(70_000), [7; 70_000]);
        assert_eq!((again.bytes().as_ptr(), again.bytes().len()), (address, 70_000));
        assert_eq!(again.room(KEPT_BYTES_MAX).len(), KEPT_BYTES_MAX);
        buffers.give_back(again);
        assert_eq!(buffers.idle.lock().len(), 2);
    }

    #[test]
    fn memory_of_a_large_request_is_given_back() {
        let buffers = Buffers::default();
        let mut buffer = buffers.take();
        assert_eq!(buffer.room(KEPT_BYTES_MAX + 1).len(), KEPT_BYTES_MAX + 1);
        buffers.give_back(buffer);
        buffers.give_back(Buffer::default());
        assert!(buffers.idle.lock().is_empty());
    }
}
