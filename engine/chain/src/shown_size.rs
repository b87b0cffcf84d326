//! The size that a disk shows: the format's. While a thread resizes the disk, all others see the old
//! size.

use crate::sync::{AtomicU64, Ordering};

/// Hidden and shown again by one thread at a time, read by any.
#[derive(Debug, Default)]
pub(crate) struct ShownSize {
    /// Counts hiding and showing: odd while a part may be hidden.
    turn: AtomicU64,
    /// What is shown then.
    old: AtomicU64,
}

impl ShownSize {
    /// The size to show. `now` reads the format's size, with acquire ordering.
    pub(crate) fn get(&self, now: impl Fn() -> u64) -> u64 {
        loop {
            let turn = self.turn.load(Ordering::Acquire);
            let bytes = now();
            if !turn.is_multiple_of(2) {
                return bytes.min(self.old.load(Ordering::Acquire));
            }
            // Read again: a resize may have begun since, grown the format, and taken that back.
            if self.turn.load(Ordering::Acquire) == turn {
                return bytes;
            }
        }
    }

    /// Shows at most `old` bytes from now on.
    pub(crate) fn hide_beyond(&self, old: u64) {
        self.old.store(old, Ordering::Release);
        self.turn.fetch_or(1, Ordering::AcqRel);
    }

    /// Shows all.
    pub(crate) fn show(&self) {
        self.turn.fetch_add(1, Ordering::AcqRel);
    }
}
