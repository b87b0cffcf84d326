//! Locks on byte ranges of a file.
//!
//! An unaligned direct write reads whole blocks, changes some bytes and writes the blocks back. A
//! second write to the same blocks in between would be undone. So each read-modify-write locks its
//! blocks exclusively, and every other change locks its blocks shared.

use std::ops::Range;

use parking_lot::{Condvar, Mutex};

#[derive(Debug)]
struct Held {
    ticket: u64,
    range: Range<u64>,
    alone: bool,
}

#[derive(Debug, Default)]
struct Table {
    next_ticket: u64,
    held: Vec<Held>,
    waiting: usize,
}

/// The locked ranges of one file. There are few at a time, so a plain list is searched.
#[derive(Debug, Default)]
pub struct RangeLocks {
    table: Mutex<Table>,
    released: Condvar,
}

impl RangeLocks {
    /// Locks `range`, shared or exclusively (`alone`). Waits for conflicting locks.
    pub fn hold(&self, range: Range<u64>, alone: bool) -> RangeGuard<'_> {
        let mut table = self.table.lock();
        while table.held.iter().any(|held| {
            (alone || held.alone) && held.range.start < range.end && range.start < held.range.end
        }) {
            table.waiting += 1;
            self.released.wait(&mut table);
            table.waiting -= 1;
        }
        let ticket = table.next_ticket;
        table.next_ticket += 1;
        table.held.push(Held { ticket, range, alone });
        RangeGuard { locks: self, ticket }
    }

    #[cfg(test)]
    fn waiting(&self) -> usize {
        self.table.lock().waiting
    }
}

/// Holds a range until dropped.
#[derive(Debug)]
#[must_use = "dropping it lets the range go"]
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    ticket: u64,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let mut table = self.locks.table.lock();
        if let Some(index) = table.held.iter().position(|held| held.ticket == self.ticket) {
            table.held.swap_remove(index);
        }
        if table.waiting > 0 {
            self.locks.released.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn shared_ranges_overlap_and_a_lone_one_waits() {
        let locks = RangeLocks::default();
        let first = locks.hold(0..4096, false);
        let second = locks.hold(512..1024, false);
        let beside = locks.hold(4096..8192, true);
        let entered = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _guard = locks.hold(512..513, true);
                entered.store(true, Ordering::SeqCst);
            });
            let settle = || {
                while locks.waiting() == 0 && !entered.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                assert!(!entered.load(Ordering::SeqCst));
            };
            settle();
            drop(beside);
            drop(first);
            settle();
            drop(second);
        });
        assert!(entered.load(Ordering::SeqCst));
        assert!(locks.table.lock().held.is_empty());
    }
}
