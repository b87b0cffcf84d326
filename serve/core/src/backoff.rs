//! Keeps writes off the non-blocking path while they wait there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A write on the non-blocking path that took longer than this per started [`PIECE_BYTES`] has
/// waited.
const SLOW_WRITE: Duration = Duration::from_millis(2);
const PIECE_BYTES: usize = 64 << 10;
/// Number of writes that then go to the blocking path.
const BACKOFF_WRITES: u32 = 32;

/// Whether writes avoid the non-blocking path, because a recent one waited.
#[derive(Debug, Default)]
pub struct SlowWriteBackoff(AtomicU32);

impl SlowWriteBackoff {
    /// Whether the next write avoids the non-blocking path. Counts that write.
    pub fn applies(&self) -> bool {
        let left = self.0.load(Ordering::Relaxed);
        if left > 0 {
            self.0.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// Records how long a write of `bytes` took on the non-blocking path.
    pub fn record(&self, took: Duration, bytes: usize) {
        if took > SLOW_WRITE * bytes.div_ceil(PIECE_BYTES).max(1) as u32 {
            self.0.store(BACKOFF_WRITES, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_write_sends_the_next_ones_to_the_blocking_path() {
        let backoff = SlowWriteBackoff::default();
        backoff.record(SLOW_WRITE, 4096);
        backoff.record(SLOW_WRITE * 16, 1 << 20);
        assert!(!backoff.applies());
        backoff.record(SLOW_WRITE * 2, 4096);
        assert_eq!((0..100).filter(|_| backoff.applies()).count(), BACKOFF_WRITES as usize);
    }
}
