//! What several threads did and saw, and whether one disk can have shown it.
//!
//! Each sector is judged by itself: what is read must have been written there, not wholly before
//! something else was written there that ended before the read began.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_storage::MemoryStorage;
use vdkit_testkit::Rng;

use super::support::guest::Guest;

pub const SECTOR: u64 = 512;

/// What a sector held at first.
const FIRST: u64 = 0;
/// Zeroes, whoever made them.
const ZERO: u64 = 1;
/// The numbers of writes begin here.
pub const WRITES: u64 = 2;

/// Moments in one order for all threads.
#[derive(Debug, Default)]
pub struct Clock(AtomicU64);

impl Clock {
    pub fn now(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// What was done to sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The write of this number put [`stamp`]s there.
    Write(u64),
    Zero,
    /// Zero or as before.
    Discard,
}

/// One call that changed sectors.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    pub what: What,
    pub first: u64,
    pub count: u64,
    pub begin: u64,
    pub end: u64,
}

/// One sector that was seen.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub sector: u64,
    pub content: u64,
    pub begin: u64,
    pub end: u64,
}

/// What one thread did and saw.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub changes: Vec<Change>,
    pub seen: Vec<Seen>,
    /// Flushes: when they began, and how many changes of the storages there were when they had
    /// returned.
    pub flushes: Vec<(u64, usize)>,
}

/// The bytes that a write puts into a sector: easy to compress, and without a part that would look
/// the same for another write or place.
pub fn stamp(sector: u64, write: u64) -> [u8; SECTOR as usize] {
    let word = Rng::new(sector << 32 | write).next_u64() | 0x0101_0101_0101_0101;
    let mut bytes = [0; SECTOR as usize];
    for chunk in bytes.chunks_exact_mut(16) {
        chunk[..8].copy_from_slice(&write.to_le_bytes());
        chunk[8..].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Which write a sector's bytes are from.
///
/// # Panics
/// Where they are of none, or of several.
pub fn content_of(sector: u64, bytes: &[u8], first: &[u8]) -> u64 {
    if bytes.iter().all(|b| *b == 0) {
        return ZERO;
    }
    let write = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    if write >= WRITES && bytes == stamp(sector, write) {
        return write;
    }
    assert!(
        bytes == first,
        "sector {sector} holds bytes that nobody wrote: {:02x?}.., with 'write {write}' in front",
        &bytes[..32]
    );
    FIRST
}

/// The changes of all threads, by sector.
#[derive(Debug)]
pub struct History {
    changes: HashMap<u64, Vec<Change>>,
    first: Guest,
}

impl History {
    pub fn new<'a>(logs: impl IntoIterator<Item = &'a Log>, first: &Guest) -> Self {
        let mut history = Self { changes: HashMap::new(), first: first.clone() };
        for change in logs.into_iter().flat_map(|log| &log.changes) {
            for sector in change.first..change.first + change.count {
                history.changes.entry(sector).or_default().push(*change);
            }
        }
        history
    }

    /// Whether a read may see this. `durable` says which changes have surely happened before it.
    fn allows(
        &self,
        sector: u64,
        content: u64,
        before: u64,
        durable: &dyn Fn(&Change) -> bool,
    ) -> bool {
        let none = Vec::new();
        let changes = self.changes.get(&sector).unwrap_or(&none);
        // A discard may have done nothing, so it hides nothing.
        let hidden = |end: u64| {
            changes.iter().any(|c| c.what != What::Discard && c.begin > end && durable(c))
        };
        let first =
            content == FIRST || (content == ZERO && self.first.reads_zero(sector * SECTOR, SECTOR));
        let made = |c: &&Change| match c.what {
            What::Write(write) => content == write,
            What::Zero | What::Discard => content == ZERO,
        };
        (first && !hidden(0))
            || changes.iter().filter(made).any(|c| c.begin < before && !hidden(c.end))
    }

    /// Holds what was seen against what was done.
    pub fn judge(&self, seen: &Seen, what: &str) {
        let durable = |c: &Change| c.end < seen.begin;
        if !self.allows(seen.sector, seen.content, seen.end, &durable) {
            self.complain(seen.sector, seen.content, &format!("{what}: {seen:?}"));
        }
    }

    /// Holds what a power cut left against what was done. Changes that had ended at `flushed`, when
    /// a flush began that returned before the cut, are durable.
    pub fn judge_survivor(&self, sector: u64, content: u64, flushed: u64, what: &str) {
        let durable = |c: &Change| c.end < flushed;
        if !self.allows(sector, content, u64::MAX, &durable) {
            self.complain(sector, content, &format!("{what}: flushed up to {flushed}"));
        }
    }

    fn complain(&self, sector: u64, content: u64, what: &str) -> ! {
        let mut changes = self.changes.get(&sector).cloned().unwrap_or_default();
        changes.sort_by_key(|c| c.begin);
        let from = changes.len().saturating_sub(40);
        panic!("{what}: sector {sector} cannot hold {content} after {:#?}", &changes[from..]);
    }
}

#[test]
fn a_history_tells_what_can_be_from_what_cannot() {
    let change = |what, begin, end| Change { what, first: 3, count: 1, begin, end };
    let log = Log {
        changes: vec![
            change(What::Write(7), 1, 4),
            change(What::Write(8), 3, 6),
            change(What::Zero, 10, 12),
            change(What::Discard, 20, 21),
        ],
        ..Log::default()
    };
    let first = Guest(MemoryStorage::from_bytes("first", &[1; 8192]));
    let history = History::new([&log], &first);
    let sees = |content, begin, end| {
        let durable = |c: &Change| c.end < begin;
        history.allows(3, content, end, &durable)
    };
    assert!(sees(FIRST, 1, 2) && !sees(FIRST, 5, 9), "what was there at first");
    assert!(sees(7, 8, 9) && sees(8, 8, 9), "either of two at once");
    assert!(!sees(8, 1, 2), "before it was written");
    assert!(sees(7, 11, 13) && !sees(7, 13, 14), "until it was zeroed");
    assert!(sees(ZERO, 13, 14) && !sees(ZERO, 8, 9));
    assert!(!sees(9, 13, 14), "nobody wrote it");
}
