//! In-flight records of requests, in memory that outlives this process.
//!
//! Per queue: a header of 16 bytes (features u64, version u16, number of descriptors u16, the head
//! of the last batch u16, the used index u16), then 16 bytes per descriptor (in flight u8, 5 bytes
//! unused, next u16, counter u64). See "Inflight I/O tracking" in QEMU's "Vhost-user Protocol". A
//! process can die between any two stores; their order keeps every state readable.
//!
//! After the queues' parts: a mark (u64) of memory made by this server, and the guest's write cache
//! switch (u8). The monitor reports the switch only when the guest changes it, not to the next
//! server.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::wire::{InflightArea, invalid};

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
const VERSION: u16 = 1;
/// Alignment of each queue's part.
const ALIGN: usize = 64;

/// The tail after the queues' parts.
const TAIL_BYTES: usize = ALIGN;
const TAIL_MARK: u64 = u64::from_le_bytes(*b"vdkit-wc");
const TAIL_WRITEBACK: usize = 8;

const AT_VERSION: usize = 8;
const AT_DESCRIPTORS: usize = 10;
const AT_LAST_BATCH: usize = 12;
const AT_USED: usize = 14;
const ENTRY_NEXT: usize = 6;
const ENTRY_COUNTER: usize = 8;

fn part_bytes(queue_size: u16) -> usize {
    (HEAD_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(ALIGN)
}

/// The in-flight records of all queues.
#[derive(Debug)]
pub struct Area {
    map: MmapRegion<()>,
    queues: u16,
    queue_size: u16,
    /// Offset of the tail, in memory made by this server.
    tail: Option<usize>,
}

impl Area {
    /// Creates the memory; the monitor keeps its file.
    pub fn create(queues: u16, queue_size: u16) -> io::Result<(InflightArea, OwnedFd)> {
        let parts = part_bytes(queue_size) as u64 * u64::from(queues);
        let size = parts + TAIL_BYTES as u64;
        let file = rustix::fs::memfd_create(
            "vdkit-inflight",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        rustix::fs::ftruncate(&file, size)?;
        let mut tail = [0; TAIL_WRITEBACK + 1];
        tail[..TAIL_WRITEBACK].copy_from_slice(&TAIL_MARK.to_ne_bytes());
        tail[TAIL_WRITEBACK] = 1;
        rustix::io::pwrite(&file, &tail, parts)?;
        // Sealed, so that no process can be killed by truncating the mapped file.
        rustix::fs::fcntl_add_seals(file.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
        Ok((InflightArea { size, file_offset: 0, queues, queue_size }, file))
    }

    /// Takes over memory kept by a monitor.
    pub fn open(area: InflightArea, file: OwnedFd) -> io::Result<Self> {
        let needed = part_bytes(area.queue_size) as u64 * u64::from(area.queues);
        if area.queues == 0 || area.queue_size == 0 || area.size < needed {
            return Err(invalid("too little memory for the requests in flight"));
        }
        let file = FileOffset::new(file.into(), area.file_offset);
        let with_tail = needed + TAIL_BYTES as u64;
        let mapped = area.size.min(with_tail);
        let map = MmapRegion::from_file(file, mapped as usize).map_err(invalid)?;
        let (queues, queue_size) = (area.queues, area.queue_size);
        let mut area = Self { map, queues, queue_size, tail: None };
        let mark =
            |area: &Self| area.map.as_volatile_slice().load(needed as usize, Ordering::Acquire);
        if mapped == with_tail && mark(&area).is_ok_and(|mark: u64| mark == TAIL_MARK) {
            area.tail = Some(needed as usize);
        }
        Ok(area)
    }

    /// The last recorded state of the guest's write cache. `None` if another server made the
    /// memory.
    pub fn writeback(&self) -> Option<bool> {
        let at = self.tail? + TAIL_WRITEBACK;
        let noted: u8 = self.map.as_volatile_slice().load(at, Ordering::Acquire).ok()?;
        Some(noted != 0)
    }

    /// Records it for the next server.
    pub fn note_writeback(&self, on: bool) {
        let Some(tail) = self.tail else { return };
        let slice = self.map.as_volatile_slice();
        let stored = slice.store(u8::from(on), tail + TAIL_WRITEBACK, Ordering::Release);
        debug_assert!(stored.is_ok(), "the tail was mapped");
    }

    /// The records of one queue.
    pub fn tracker(self: &Arc<Self>, queue: u16) -> Option<Tracker> {
        let base = usize::from(queue) * part_bytes(self.queue_size);
        (queue < self.queues).then(|| Tracker { area: self.clone(), base })
    }
}

/// Recovered state.
#[derive(Debug, PartialEq)]
pub struct Recovered {
    /// Nothing was recorded before.
    pub fresh: bool,
    /// Requests taken but not put back, in the order of taking.
    pub heads: Vec<u16>,
}

impl Default for Recovered {
    fn default() -> Self {
        Self { fresh: true, heads: Vec::new() }
    }
}

/// The records of one queue.
#[derive(Clone, Debug)]
pub struct Tracker {
    area: Arc<Area>,
    base: usize,
}

impl Tracker {
    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        let slice = self.area.map.as_volatile_slice();
        slice.load(self.base + at, Ordering::Acquire).unwrap_or_default()
    }

    fn store<T: AtomicAccess>(&self, value: T, at: usize) {
        let slice = self.area.map.as_volatile_slice();
        let stored = slice.store(value, self.base + at, Ordering::Release);
        debug_assert!(stored.is_ok(), "places were checked when the memory was mapped");
    }

    fn entry(head: u16) -> usize {
        HEAD_BYTES + ENTRY_BYTES * usize::from(head)
    }

    /// Records a taken request. `head` is less than the queue's size.
    pub fn begin(&self, head: u16, counter: u64) {
        self.store(counter, Self::entry(head) + ENTRY_COUNTER);
        self.store(1_u8, Self::entry(head));
    }

    /// Call before putting a request into the used ring.
    pub fn ending(&self, head: u16) {
        self.store(self.load::<u16>(AT_LAST_BATCH), Self::entry(head) + ENTRY_NEXT);
        self.store(head, AT_LAST_BATCH);
    }

    /// Call after that, with the used ring's new index.
    pub fn ended(&self, head: u16, used: u16) {
        self.store(0_u8, Self::entry(head));
        self.store(used, AT_USED);
    }

    /// Clears all records.
    pub fn reset(&self, size: u16, used: u16) {
        let size = size.min(self.area.queue_size);
        for head in 0..size {
            self.store(0_u8, Self::entry(head));
        }
        self.store(size, AT_DESCRIPTORS);
        self.store(used, AT_USED);
        self.store(VERSION, AT_VERSION);
    }

    /// Whether a queue of this size fits.
    pub fn fits(&self, size: u16) -> bool {
        size <= self.area.queue_size
    }

    /// The requests to repeat. `used` is the used ring's index. `None` if the records are invalid
    /// for a queue of `size`.
    pub fn recover(&self, size: u16, used: u16) -> Option<Recovered> {
        if !self.fits(size) {
            return None;
        }
        if self.load::<u16>(AT_VERSION) == 0 {
            self.reset(size, used);
            return Some(Recovered::default());
        }
        let known = self.load::<u16>(AT_VERSION) == VERSION;
        if !known || self.load::<u16>(AT_DESCRIPTORS) != size {
            return None;
        }
        // A batch with unfinished records: it is in the used ring.
        let batch = used.wrapping_sub(self.load::<u16>(AT_USED));
        if batch > size {
            return None;
        }
        let mut head = self.load::<u16>(AT_LAST_BATCH);
        for _ in 0..batch {
            if head >= size {
                return None;
            }
            self.store(0_u8, Self::entry(head));
            head = self.load(Self::entry(head) + ENTRY_NEXT);
        }
        self.store(used, AT_USED);
        let in_flight = (0..size).filter(|head| self.load::<u8>(Self::entry(*head)) == 1);
        let mut found: Vec<(u64, u16)> =
            in_flight.map(|head| (self.load(Self::entry(head) + ENTRY_COUNTER), head)).collect();
        found.sort_unstable();
        Some(Recovered { fresh: false, heads: found.into_iter().map(|(_, head)| head).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tracker(size: u16) -> Tracker {
        let (area, file) = Area::create(2, size).unwrap();
        Arc::new(Area::open(area, file).unwrap()).tracker(1).unwrap()
    }

    fn again(notes: &Tracker, size: u16, used: u16) -> Vec<u16> {
        let recovered = notes.recover(size, used).unwrap();
        assert!(!recovered.fresh);
        recovered.heads
    }

    #[test]
    fn what_was_begun_and_not_ended_comes_back_in_order() {
        let notes = tracker(8);
        assert!(notes.recover(8, 0).unwrap().fresh);
        for (counter, head) in [5, 2, 7].into_iter().enumerate() {
            notes.begin(head, counter as u64);
        }
        notes.ending(2);
        notes.ended(2, 1);
        assert_eq!(again(&notes, 8, 1), [5, 7]);
    }

    #[test]
    fn a_death_at_any_step_of_ending_is_told_by_the_used_index() {
        // Before it is in the used ring: repeat it. After: do not.
        let notes = tracker(8);
        notes.recover(8, 0);
        notes.begin(3, 0);
        notes.begin(4, 1);
        notes.ending(3);
        assert_eq!(again(&notes, 8, 0), [3, 4]);
        notes.ending(3);
        assert_eq!(again(&notes, 8, 1), [4]);
        assert_eq!(again(&notes, 8, 1), [4]);
    }

    #[test]
    fn the_write_cache_is_noted_where_the_memory_is_ours() {
        let (described, file) = Area::create(2, 8).unwrap();
        let again = file.try_clone().unwrap();
        let area = Area::open(described, file).unwrap();
        assert_eq!(area.writeback(), Some(true));
        area.note_writeback(false);
        assert_eq!(
            Area::open(described, again.try_clone().unwrap()).unwrap().writeback(),
            Some(false)
        );
        // Another server's memory: without the tail, or with other content there.
        let parts = described.size - TAIL_BYTES as u64;
        let short = InflightArea { size: parts, ..described };
        let short = Area::open(short, again.try_clone().unwrap()).unwrap();
        short.note_writeback(true);
        assert_eq!(short.writeback(), None);
        rustix::io::pwrite(&again, &[7], parts).unwrap();
        assert_eq!(Area::open(described, again).unwrap().writeback(), None);
    }

    #[test]
    fn notes_that_make_no_sense_are_refused() {
        let notes = tracker(8);
        assert_eq!(notes.recover(16, 0), None, "a larger queue than was noted for");
        notes.recover(8, 0);
        assert_eq!(notes.recover(4, 0), None, "another size");
        assert_eq!(notes.recover(8, 9), None, "a batch larger than the queue");
        notes.store(200_u16, AT_LAST_BATCH);
        assert_eq!(notes.recover(8, 1), None, "a head beyond the queue");
        notes.store(2_u16, AT_VERSION);
        assert_eq!(notes.recover(8, 0), None, "a later version");
        let (area, file) = Area::create(1, 8).unwrap();
        let large = InflightArea { queues: 9, ..area };
        assert!(Area::open(large, file).is_err(), "memory for fewer queues");
    }
}
