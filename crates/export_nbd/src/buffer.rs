//! Memory for the bytes of one request, used again for the next.

use parking_lot::Mutex;
use vdkit_storage::AlignedBuf;

/// A page: the kernel copies faster from and to where its own pages begin and end, and direct I/O
/// needs no copy of its own.
const ALIGN: usize = 4096;
/// The least that is allocated.
const BYTES_MIN: usize = 64 << 10;
/// The most that is kept.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// A buffer that is zeroed when it is made and never again.
#[derive(Debug, Default)]
pub struct Buffer {
    memory: Option<AlignedBuf>,
    len: usize,
}

impl Buffer {
    /// Room for so many bytes, with arbitrary content.
    pub fn room(&mut self, len: usize) -> &mut [u8] {
        self.len = len;
        if self.memory.as_ref().is_some_and(|memory| memory.len() < len) {
            // Not two at once.
            self.memory = None;
        }
        let memory = self
            .memory
            .get_or_insert_with(|| AlignedBuf::new(len.next_power_of_two().max(BYTES_MIN), ALIGN));
        &mut memory[..len]
    }

    /// What was put into the last room.
    pub fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

/// The buffers of a connection. Whoever needs one gets that which was given back last, whose bytes
/// the processor is likeliest to have at hand: as many are in use as requests run at once, not as
/// there are threads.
#[derive(Debug, Default)]
pub struct Buffers {
    idle: Mutex<Vec<Buffer>>,
}

impl Buffers {
    /// One that is idle, or a new one.
    pub fn take(&self) -> Buffer {
        self.idle.lock().pop().unwrap_or_default()
    }

    /// Keeps it for the next, unless only a large request needed so much.
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
        // The last one first; nothing was zeroed or moved.
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
