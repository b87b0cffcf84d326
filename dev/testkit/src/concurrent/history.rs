//! What several threads did and saw, and whether one disk can have shown it.
//!
//! Each sector is judged by itself. A read must return what was written there, unless another write
//! began after that one had ended, and itself ended before the read began. A survivor of a power
//! cut must hold what was written there, unless a write began after that one had ended and was
//! acknowledged as durable before the cut.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{HostOffset, Storage, StorageExt, is_zero};
use vdkit_storage::MemoryStorage;

use crate::Rng;

/// Bytes of a sector.
pub const SECTOR: u64 = 512;

/// The content that a sector had at first.
pub const FIRST: u64 = 0;
/// Zeroes of any origin.
pub const ZERO: u64 = 1;
/// The numbers of writes begin here.
pub const WRITES: u64 = 2;

/// The size of the disk is judged as the content of this sector.
const SIZE: u64 = u64::MAX - 1;

/// Moments in one order for all threads.
#[derive(Debug, Default)]
pub struct Clock(AtomicU64);

impl Clock {
    /// A moment later than all before.
    pub fn now(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// What was done to sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The write of this number put [`stamp`]s there.
    Write(u64),
    /// They read as zero.
    Zero,
    /// The end of the disk passed here: cut off, or new, they read as zero.
    Passed,
    /// Zero or as before.
    Discard,
    /// The disk got so many bytes.
    Size(u64),
}

/// What the caller of a change was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is done; a later flush makes it durable.
    Done,
    /// It is done and durable.
    Durable,
    /// An error: each sector may be old or new.
    Failed,
}

/// One call that changed sectors.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// What it did.
    pub what: What,
    /// The first sector.
    pub first: u64,
    /// How many sectors.
    pub count: u64,
    /// When it began and when it had ended, on the threads' clock.
    pub begin: u64,
    /// See [`Change::begin`].
    pub end: u64,
    /// Changes of the storages before it began; 0 where they are not counted.
    pub ticks_before: usize,
    /// Changes of the storages when it had ended.
    pub ticks_after: usize,
    /// What the caller was told.
    pub answer: Answer,
}

impl Change {
    /// A change that was done, where nobody counts the changes of the storages.
    pub fn done(what: What, first: u64, count: u64, begin: u64, end: u64) -> Self {
        let (ticks_before, ticks_after) = (0, usize::MAX);
        Self { what, first, count, begin, end, ticks_before, ticks_after, answer: Answer::Done }
    }

    /// It certainly happened, so that it hides what was there before.
    fn hides(&self) -> bool {
        self.what != What::Discard && self.answer != Answer::Failed
    }

    fn makes(&self, content: u64) -> bool {
        match self.what {
            What::Write(number) | What::Size(number) => content == number,
            What::Zero | What::Passed | What::Discard => content == ZERO,
        }
    }
}

/// One sector that was seen.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Its number.
    pub sector: u64,
    /// The number of the write, [`ZERO`] or [`FIRST`].
    pub content: u64,
    /// When the read began and when it had ended.
    pub begin: u64,
    /// See [`Seen::begin`].
    pub end: u64,
}

/// A flush that returned.
#[derive(Clone, Copy, Debug)]
pub struct Flush {
    /// When it began: what had ended before is durable when it has returned.
    pub begin: u64,
    /// Changes of the storages when it had returned.
    pub ticks_after: usize,
}

/// What one thread did and saw.
#[derive(Clone, Debug, Default)]
pub struct Log {
    /// Calls that changed something.
    pub changes: Vec<Change>,
    /// What was read.
    pub seen: Vec<Seen>,
    /// Flushes that returned.
    pub flushes: Vec<Flush>,
}

/// The bytes that a write puts into a sector: easy to compress, and without a part that would look
/// the same for another write or place.
pub fn stamp(sector: u64, write: u64) -> [u8; SECTOR as usize] {
    let seed = sector.wrapping_mul(0xd6e8_feb8_6659_fd93) ^ write;
    let word = Rng::new(seed).next_u64() | 0x0101_0101_0101_0101;
    let mut bytes = [0; SECTOR as usize];
    for chunk in bytes.chunks_exact_mut(16) {
        chunk[..8].copy_from_slice(&write.to_le_bytes());
        chunk[8..].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// The stamps of a run of sectors.
pub fn stamps(first: u64, count: u64, write: u64) -> Vec<u8> {
    (first..first + count).flat_map(|sector| stamp(sector, write)).collect()
}

/// Which write a sector's bytes are from, or nothing where they are of none, or of several.
pub fn find_content(sector: u64, bytes: &[u8], first: &[u8]) -> Option<u64> {
    if is_zero(bytes) {
        return Some(ZERO);
    }
    if bytes == first {
        return Some(FIRST);
    }
    let write = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    (write >= WRITES && bytes == stamp(sector, write)).then_some(write)
}

/// As [`find_content`].
///
/// # Panics
/// If the bytes are of no write, or of several.
pub fn content_of(sector: u64, bytes: &[u8], first: &[u8]) -> u64 {
    find_content(sector, bytes, first).unwrap_or_else(|| {
        panic!("sector {sector} holds bytes that nobody wrote: {:02x?}..", &bytes[..32])
    })
}

/// The changes of all threads, by sector.
#[derive(Debug)]
pub struct History {
    changes: HashMap<u64, Vec<Change>>,
    flushes: Vec<Flush>,
    first: MemoryStorage,
}

impl History {
    /// Puts the logs of all threads together; `first` is what the disk held at first.
    pub fn new<'a>(logs: impl IntoIterator<Item = &'a Log>, first: &MemoryStorage) -> Self {
        let (changes, flushes) = (HashMap::new(), Vec::new());
        let mut history = Self { changes, flushes, first: first.clone() };
        for log in logs {
            for change in &log.changes {
                let sectors = match change.what {
                    What::Size(_) => SIZE..SIZE + 1,
                    _ => change.first..change.first + change.count,
                };
                for sector in sectors {
                    history.changes.entry(sector).or_default().push(*change);
                }
            }
            history.flushes.extend(&log.flushes);
        }
        history
    }

    /// Compares what was seen with what was done.
    ///
    /// # Errors
    /// What the disk cannot have shown.
    pub fn try_judge(&self, seen: &Seen) -> Result<(), String> {
        let began = |change: &Change| change.begin < seen.end;
        let settled = |change: &Change| change.end < seen.begin;
        if self.allows(seen.sector, seen.content, &began, &settled) {
            return Ok(());
        }
        Err(self.complaint(seen.sector, seen.content, &format!("{seen:?}")))
    }

    /// All changes of sectors; one that covers several comes several times.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|(sector, _)| **sector != SIZE).flat_map(|(_, all)| all)
    }

    /// How many changes of the storages there were when something was acknowledged as durable.
    pub fn acknowledgements(&self) -> impl Iterator<Item = usize> {
        let durable = self.changes().filter(|change| change.answer == Answer::Durable);
        let changes = durable.map(|change| change.ticks_after);
        changes.chain(self.flushes.iter().map(|flush| flush.ticks_after))
    }

    /// What a sector held at first.
    pub fn first(&self, sector: u64) -> [u8; SECTOR as usize] {
        let mut bytes = [0; SECTOR as usize];
        self.first.read_padded(&mut bytes, HostOffset(sector * SECTOR)).expect("memory");
        bytes
    }

    /// Whether a sector may hold this. `began` says which changes can have happened, `settled`
    /// which have happened for sure.
    fn allows(
        &self,
        sector: u64,
        content: u64,
        began: &dyn Fn(&Change) -> bool,
        settled: &dyn Fn(&Change) -> bool,
    ) -> bool {
        let changes = self.changes.get(&sector).map_or(&[][..], Vec::as_slice);
        // What had ended when one of these began is hidden by it.
        let hiding = changes.iter().filter(|c| c.hides() && settled(c)).map(|c| c.begin).max();
        let hidden = |end: u64| hiding.is_some_and(|begin| begin > end);
        let first = match content {
            FIRST => true,
            ZERO => is_zero(&self.first(sector)),
            bytes => sector == SIZE && bytes == self.first.len().expect("memory"),
        };
        (first && !hidden(0))
            || changes.iter().any(|c| c.makes(content) && began(c) && !hidden(c.end))
    }

    /// As [`History::try_judge`].
    ///
    /// # Panics
    /// If the disk cannot have shown it.
    pub fn judge(&self, seen: &Seen, what: &str) {
        self.try_judge(seen).unwrap_or_else(|error| panic!("{what}: {error}"));
    }

    /// What holds after a power cut that came after so many changes of the storages.
    pub fn at(&self, ticks: usize) -> Moment<'_> {
        let returned = self.flushes.iter().filter(|flush| flush.ticks_after <= ticks);
        let flushed = returned.map(|flush| flush.begin).max().unwrap_or(0);
        Moment { history: self, ticks, flushed }
    }

    fn complaint(&self, sector: u64, content: u64, what: &str) -> String {
        let mut changes = self.changes.get(&sector).cloned().unwrap_or_default();
        changes.sort_by_key(|c| c.begin);
        let from = changes.len().saturating_sub(40);
        let name = if sector == SIZE { "the size".to_owned() } else { format!("sector {sector}") };
        format!("{what}: {name} cannot hold {content} after {:#?}", &changes[from..])
    }
}

/// A power cut; see [`History::at`].
#[derive(Clone, Copy, Debug)]
pub struct Moment<'a> {
    history: &'a History,
    ticks: usize,
    /// When the last flush began that had returned.
    flushed: u64,
}

impl Moment<'_> {
    /// Changes of the storages before it.
    pub fn ticks(&self) -> usize {
        self.ticks
    }

    /// Whether a change was acknowledged, by itself or by a later flush.
    pub fn durable(&self, change: &Change) -> bool {
        match change.answer {
            Answer::Failed => false,
            Answer::Durable if change.ticks_after <= self.ticks => true,
            Answer::Durable | Answer::Done => change.end < self.flushed,
        }
    }

    /// Whether a survivor may hold this in a sector.
    pub fn allows(&self, sector: u64, content: u64) -> bool {
        let began = |change: &Change| change.ticks_before <= self.ticks;
        self.history.allows(sector, content, &began, &|change| self.durable(change))
    }

    /// Whether a sector may be new in a survivor by a resize that is not durable yet, so that in some
    /// formats it holds anything.
    pub fn is_new(&self, sector: u64) -> bool {
        let changes = self.history.changes.get(&sector).map_or(&[][..], Vec::as_slice);
        let hides = |begin: u64| changes.iter().any(|c| c.begin > begin && self.durable(c));
        changes.iter().any(|c| {
            let began = c.what == What::Passed && c.ticks_before <= self.ticks;
            began && !self.durable(c) && !hides(c.end)
        })
    }

    /// Compares a sector of a survivor with what was acknowledged.
    ///
    /// # Errors
    /// What is lost, with the changes of that sector.
    pub fn judge(&self, sector: u64, content: u64) -> Result<(), String> {
        if self.allows(sector, content) {
            return Ok(());
        }
        let what = format!("cut at {}, flushed up to {}", self.ticks, self.flushed);
        Err(self.history.complaint(sector, content, &what))
    }

    /// Compares the size of a survivor with the sizes that the disk had.
    ///
    /// # Errors
    /// The sizes that it may have.
    pub fn judge_size(&self, guest_bytes: u64) -> Result<(), String> {
        self.judge(SIZE, guest_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: usize = usize::MAX;

    fn change(what: What, begin: u64, end: u64) -> Change {
        Change::done(what, 3, 1, begin, end)
    }

    fn first() -> MemoryStorage {
        MemoryStorage::from_bytes("first", &[1; 8192])
    }

    #[test]
    fn a_history_tells_what_can_be_from_what_cannot() {
        let log = Log {
            changes: vec![
                change(What::Write(7), 1, 4),
                change(What::Write(8), 3, 6),
                change(What::Zero, 10, 12),
                change(What::Discard, 20, 21),
            ],
            ..Log::default()
        };
        let history = History::new([&log], &first());
        let sees = |content, begin, end| {
            let settled = |c: &Change| c.end < begin;
            history.allows(3, content, &|c| c.begin < end, &settled)
        };
        assert!(sees(FIRST, 1, 2) && !sees(FIRST, 5, 9), "what was there at first");
        assert!(sees(7, 8, 9) && sees(8, 8, 9), "either of two at once");
        assert!(!sees(8, 1, 2), "before it was written");
        assert!(sees(7, 11, 13) && !sees(7, 13, 14), "until it was zeroed");
        assert!(sees(ZERO, 13, 14) && !sees(ZERO, 8, 9));
        assert!(!sees(9, 13, 14), "nobody wrote it");
    }

    #[test]
    fn a_power_cut_keeps_what_was_acknowledged_and_nothing_that_it_hid() {
        let at = |change: Change, ticks_before, ticks_after, answer| Change {
            ticks_before,
            ticks_after,
            answer,
            ..change
        };
        let log = Log {
            changes: vec![
                at(change(What::Write(7), 1, 2), 0, 5, Answer::Done),
                at(change(What::Write(8), 5, 6), 10, 15, Answer::Durable),
                at(change(What::Write(9), 7, 8), 20, 25, Answer::Failed),
                at(change(What::Discard, 9, 10), 30, 35, Answer::Durable),
                at(change(What::Size(4096), 11, 12), 40, 45, Answer::Durable),
            ],
            flushes: vec![Flush { begin: 3, ticks_after: 8 }],
            ..Log::default()
        };
        let history = History::new([&log], &first());
        let may = |content, ticks| history.at(ticks).allows(3, content);
        assert!(may(FIRST, 5) && may(7, 5), "nothing was flushed");
        assert!(may(7, 8) && !may(FIRST, 8), "flushed");
        assert!(may(7, 14) && may(8, 14) && !may(8, 9), "a write under way");
        assert!(!may(7, 15) && may(8, 15), "acknowledged as durable");
        assert!(may(8, 25) && may(9, 25) && may(8, NEVER), "a failed write may be there or not");
        assert!(!may(ZERO, 25) && may(ZERO, 30) && may(8, 35), "discarded");
        let size = |bytes, ticks| history.at(ticks).allows(SIZE, bytes);
        assert!(size(8192, 39) && !size(4096, 39), "before it was changed");
        assert!(size(8192, 44) && size(4096, 44) && !size(8192, 45));
    }
}
