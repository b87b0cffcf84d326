//! Aligned memory for O_DIRECT, and a pool of it.

use std::ops::{Deref, DerefMut};

use parking_lot::Mutex;

/// Zeroed bytes at an aligned address.
///
/// ```
/// let buf = vdkit_storage::AlignedBuf::new(8192, 4096);
/// assert_eq!(buf.as_ptr() as usize % 4096, 0);
/// assert_eq!(buf.len(), 8192);
/// ```
#[derive(Debug)]
pub struct AlignedBuf {
    /// Over-allocated, since the heap guarantees only word alignment; the aligned part begins at
    /// `start`. A `Vec` that is never resized never moves its bytes.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
    align: usize,
}

impl AlignedBuf {
    /// `len` zero bytes at a multiple of `align`.
    ///
    /// # Panics
    /// If `align` is not a power of two.
    pub fn new(len: usize, align: usize) -> Self {
        assert!(align.is_power_of_two(), "alignment {align} is not a power of two");
        let bytes = vec![0; len + align - 1];
        let start = bytes.as_ptr().addr().wrapping_neg() & (align - 1);
        Self { bytes, start, len, align }
    }

    /// Resizes to `len` bytes. New bytes are zero; existing bytes stay. The address changes only if
    /// the buffer never was that long before.
    pub fn resize(&mut self, len: usize) {
        if len > self.bytes.len() - self.start {
            let mut longer = Self::new(len, self.align);
            longer[..self.len].copy_from_slice(self);
            *self = longer;
            return;
        }
        let gained = self.start + self.len.min(len)..self.start + len;
        self.bytes[gained].fill(0);
        self.len = len;
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Bytes of a small pooled buffer: most unaligned requests cover about one block of metadata.
const SMALL_BYTES: usize = 64 << 10;

/// Maximum piece of an unaligned request.
pub const BOUNCE_BYTES_MAX: usize = 1 << 20;

/// Maximum idle buffers, so that an idle storage holds at most 4 MiB + 4 MiB.
const SMALL_KEPT: usize = 64;
const LARGE_KEPT: usize = 4;

/// Buffers that are reused instead of being allocated for each request.
#[derive(Debug)]
pub struct BufferPool {
    align: usize,
    small: Mutex<Vec<AlignedBuf>>,
    large: Mutex<Vec<AlignedBuf>>,
}

impl BufferPool {
    pub fn new(align: usize) -> Self {
        Self { align, small: Mutex::default(), large: Mutex::default() }
    }

    /// A buffer of at least `len` bytes with undefined content; `len` is at most
    /// [`BOUNCE_BYTES_MAX`].
    pub fn take(&self, len: usize) -> PooledBuf<'_> {
        debug_assert!(len <= BOUNCE_BYTES_MAX);
        let (kept, bytes) = if len <= SMALL_BYTES {
            (&self.small, SMALL_BYTES)
        } else {
            (&self.large, BOUNCE_BYTES_MAX)
        };
        let idle = kept.lock().pop();
        let buf = idle.unwrap_or_else(|| AlignedBuf::new(bytes, self.align));
        PooledBuf { pool: self, buf: Some(buf) }
    }

    fn give_back(&self, buf: AlignedBuf) {
        let (kept, most) = if buf.len() <= SMALL_BYTES {
            (&self.small, SMALL_KEPT)
        } else {
            (&self.large, LARGE_KEPT)
        };
        let mut kept = kept.lock();
        if kept.len() < most {
            kept.push(buf);
        }
    }

    #[cfg(test)]
    pub fn idle(&self) -> usize {
        self.small.lock().len() + self.large.lock().len()
    }
}

/// A buffer that returns to its pool when dropped.
#[derive(Debug)]
pub struct PooledBuf<'a> {
    pool: &'a BufferPool,
    /// `None` only while being dropped.
    buf: Option<AlignedBuf>,
}

impl Deref for PooledBuf<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buf.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PooledBuf<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buf.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for PooledBuf<'_> {
    fn drop(&mut self) {
        if let Some(buf) = self.buf.take() {
            self.pool.give_back(buf);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_aligned() {
        for align in [1, 512, 4096, 1 << 16] {
            for len in [0, 1, 511, 4096, 100_000] {
                let buf = AlignedBuf::new(len, align);
                assert_eq!(buf.as_ptr().addr() % align, 0);
                assert_eq!(buf.len(), len);
                assert!(buf.iter().all(|b| *b == 0));
            }
        }
    }

    #[test]
    fn what_is_gained_is_zero_and_aligned() {
        let mut buf = AlignedBuf::new(0, 4096);
        for (len, kept) in [(5000, 0), (100, 100), (9000, 100), (9000, 9000), (4097, 4097)] {
            buf.resize(len);
            assert_eq!((buf.len(), buf.as_ptr().addr() % 4096), (len, 0));
            assert!(buf[..kept].iter().all(|b| *b == 7) && buf[kept..].iter().all(|b| *b == 0));
            buf.fill(7);
        }
    }

    #[test]
    fn the_pool_uses_buffers_again() {
        let pool = BufferPool::new(4096);
        let mut first = pool.take(4096);
        first[0] = 7;
        let address = first.as_ptr();
        drop(first);
        assert_eq!(pool.idle(), 1);
        assert_eq!(pool.take(512).as_ptr(), address);
        let many: Vec<_> = (0..100).map(|_| pool.take(1)).collect();
        drop(many);
        assert_eq!(pool.idle(), SMALL_KEPT);
    }
}
