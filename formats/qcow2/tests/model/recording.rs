//! The bits of a bitmap: what a write has marked is on disk once a flush has returned that was asked
//! for after the write.

use std::sync::Arc;

use vdkit_block::Result;

use crate::bits::{Page, Tracker, Words};
use crate::sync::{Mutex, check, thread};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// A flush copies a page before it marks it clean.
    CopiesFirst,
    /// Bits count as durable although they could not be written.
    SettlesFailed,
}

/// Bytes of the disk for each bit.
const BYTES: u64 = 512;

/// Data of the leader of flushes.
struct Leader {
    /// The bits on disk.
    disk: u64,
    /// Flushes that fail from now on.
    failures: usize,
}

struct Image {
    tracker: Tracker,
    leader: Mutex<Leader>,
    fault: Fault,
}

impl Image {
    fn new(fault: Fault, failures: usize) -> Arc<Self> {
        // One page with one word, in memory and dirty.
        let tracker = Tracker::new(1, true, BYTES.trailing_zeros(), 64, 8);
        tracker
            .mark(9 * BYTES..10 * BYTES, |_| Ok(Page::Bits(Arc::new(Words::from_disk(&[0; 8])))))
            .unwrap();
        Arc::new(Self { tracker, leader: Mutex::new(Leader { disk: 0, failures }), fault })
    }

    fn copy(&self) -> Vec<u64> {
        match self.tracker.loaded(0) {
            Some(Page::Bits(words)) => words.copy(),
            _ => unreachable!("loaded at the beginning"),
        }
    }

    /// As a flush by its leader. Returns whether it has succeeded.
    fn flush(&self) -> bool {
        let mut leader = self.leader.lock();
        let early = (self.fault == Fault::CopiesFirst).then(|| self.copy());
        if self.tracker.take_dirty().is_empty() {
            return true;
        }
        let copy = early.unwrap_or_else(|| self.copy());
        let fails = leader.failures > 0;
        if fails {
            leader.failures -= 1;
        } else {
            leader.disk |= copy[0];
        }
        if fails && self.fault != Fault::SettlesFailed {
            self.tracker.set_dirty(0);
        } else {
            self.tracker.settle(0, &copy);
        }
        !fails
    }

    /// Writes to the place of a bit, and flushes.
    fn write(&self, bit: u64) {
        let load = |_: usize| -> Result<Page> { unreachable!("loaded at the beginning") };
        self.tracker.mark(bit * BYTES..(bit + 1) * BYTES, load).unwrap();
        if self.flush() {
            assert!(self.leader.lock().disk >> bit & 1 == 1, "a bit is lost after its flush");
        }
    }
}

fn two_writes(bits: [u64; 2], fault: Fault, failures: usize) {
    check(3, move || {
        let image = Image::new(fault, failures);
        let other = image.clone();
        let thread = thread::spawn(move || other.write(bits[0]));
        image.write(bits[1]);
        thread.join().unwrap();
    });
}

#[test]
fn a_bit_is_on_disk_once_a_flush_has_returned() {
    for bits in [[0, 0], [0, 1]] {
        two_writes(bits, Fault::None, 0);
        two_writes(bits, Fault::None, 1);
    }
}

#[test]
#[should_panic(expected = "a bit is lost after its flush")]
fn a_page_must_be_clean_before_it_is_copied() {
    two_writes([0, 1], Fault::CopiesFirst, 0);
}

#[test]
#[should_panic(expected = "a bit is lost after its flush")]
fn what_could_not_be_written_is_not_settled() {
    two_writes([0, 0], Fault::SettlesFailed, 1);
}
