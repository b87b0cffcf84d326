//! Tracks changed regions of a disk while it is copied.
//!
//! A writer marks a range *after* changing it (also when that failed half-way). The copying job
//! clears marks *before* it reads. So the copy contains each change, or its mark remains. (If a
//! change were marked before it is made, the job could clear the mark and still read the old
//! bytes.)
//!
//! `tests/model` runs this file in every order of its steps.

use std::ops::Range;

use crate::sync::{AtomicI64, AtomicU64, Ordering, RwLock};

/// Minimum bytes per mark.
pub(crate) const REGION_BYTES_MIN: u64 = 64 << 10;
/// Maximum marks per map: 16 MiB of memory.
const REGIONS_MAX: u64 = 1 << 27;

/// One bit per region of the disk. Shared by threads.
#[derive(Debug)]
pub struct ChangeMap {
    /// Locked for writing only while the disk grows, when no request runs.
    marks: RwLock<Marks>,
    /// Number of set bits. Negative for a moment if a mark is cleared before it was counted.
    set: AtomicI64,
}

#[derive(Debug)]
struct Marks {
    words: Box<[AtomicU64]>,
    region_bits: u32,
    guest_bytes: u64,
}

impl ChangeMap {
    /// A map for this size, without marks.
    pub fn new(guest_bytes: u64) -> Self {
        Self { marks: RwLock::new(Marks::new(guest_bytes)), set: AtomicI64::new(0) }
    }

    /// Grows the map. The new part has no marks. (The region size doubles as needed to stay within
    /// the maximum number of marks.)
    pub fn grow(&self, guest_bytes: u64) {
        let mut marks = self.marks.write();
        let larger = Marks::new(guest_bytes);
        let mut set = 0;
        let mut at = Some(0);
        while let Some(region) = at.and_then(|from| marks.next_set(from)) {
            let start = region << marks.region_bits;
            let end = start.saturating_add(1 << marks.region_bits).min(marks.guest_bytes);
            set += larger.mark(start, end - start);
            at = region.checked_add(1);
        }
        self.set.store(set, Ordering::SeqCst);
        *marks = larger;
    }

    /// Bytes covered by marks, at most the disk size.
    pub fn marked_bytes(&self) -> u64 {
        let marks = self.marks.read();
        let set = self.set.load(Ordering::SeqCst).max(0) as u64;
        (set << marks.region_bits).min(marks.guest_bytes)
    }

    /// Marks a range, which may extend past the end of the disk.
    pub fn mark(&self, at: u64, len: u64) {
        let marks = self.marks.read();
        let new = marks.mark(at, len);
        self.set.fetch_add(new, Ordering::SeqCst);
    }

    /// Clears the first marked run that ends after `from`, at most `len` bytes (or one region) of
    /// it, and returns it.
    pub fn take(&self, from: u64, len: u64) -> Option<Range<u64>> {
        let marks = self.marks.read();
        let regions = (len >> marks.region_bits).max(1);
        let first = marks.next_set(from >> marks.region_bits)?;
        let mut end = first;
        while end < first + regions && self.clear(&marks, end) {
            end += 1;
        }
        let end_byte = (end << marks.region_bits).min(marks.guest_bytes);
        Some(first << marks.region_bits..end_byte)
    }

    /// Clears one mark; returns whether it was set.
    fn clear(&self, marks: &Marks, region: u64) -> bool {
        let Some(word) = marks.words.get((region / 64) as usize) else { return false };
        let bit = 1 << (region % 64);
        let was = word.fetch_and(!bit, Ordering::SeqCst) & bit != 0;
        if was {
            self.set.fetch_sub(1, Ordering::SeqCst);
        }
        was
    }
}

impl Marks {
    fn new(guest_bytes: u64) -> Self {
        let region = guest_bytes.div_ceil(REGIONS_MAX).max(REGION_BYTES_MIN).next_power_of_two();
        let words = guest_bytes.div_ceil(region).div_ceil(64);
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            region_bits: region.trailing_zeros(),
            guest_bytes,
        }
    }

    /// Marks a range; returns the number of new marks.
    fn mark(&self, at: u64, len: u64) -> i64 {
        let end = at.saturating_add(len).min(self.guest_bytes);
        if at >= end {
            return 0;
        }
        let mut new = 0;
        let (first, last) = (at >> self.region_bits, (end - 1) >> self.region_bits);
        for word in first / 64..=last / 64 {
            let from = first.max(word * 64) - word * 64;
            let to = last.min(word * 64 + 63) - word * 64;
            let bits = (u64::MAX >> (63 - (to - from))) << from;
            let word = &self.words[word as usize];
            // Most writes go to ranges that are already marked.
            if word.load(Ordering::SeqCst) & bits != bits {
                let before = word.fetch_or(bits, Ordering::SeqCst);
                new += i64::from((bits & !before).count_ones());
            }
        }
        new
    }

    fn next_set(&self, from: u64) -> Option<u64> {
        let mut word = from / 64;
        let mut mask = u64::MAX << (from % 64);
        while let Some(bits) = self.words.get(word as usize) {
            let bits = bits.load(Ordering::SeqCst) & mask;
            if bits != 0 {
                return Some(word * 64 + u64::from(bits.trailing_zeros()));
            }
            (word, mask) = (word + 1, u64::MAX);
        }
        None
    }
}
