//! A storage that knows what may survive a crash.
//!
//! # What survives a crash
//!
//! [`CrashStorage`] keeps the order of all changes. After a crash
//!
//! - every change that had *returned before* a [`Storage::sync`] *began*, where that sync
//!   returned before the crash, is there;
//! - of the others, each 512-byte sector on its own holds its durable content, or what it held
//!   right after any later change that touched it. So changes are lost, reordered and torn, but a
//!   sector is never mixed of two contents;
//! - the length is the durable one or the one after any later change. It is independent of the
//!   sectors: a longer file may lack its bytes, which then read zero; bytes past a shorter length
//!   are gone;
//! - bytes between an old length and a longer new one read zero. What a shrinking cut off never
//!   comes back in a survivor whose length is that of the shrinking or a later one;
//! - zeroing and discarding are writes of zeroes (of whole sectors, for discarding);
//! - nothing is ever promised for a change that had not returned when the sync began, even where
//!   it reached the storage first.
//!
//! A sync that did not return promises nothing. Allocating changes only the length.
//!
//! Several storages can lose their power at one moment: those on one [`CrashClock`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use vdkit_block::{
    AccessExchange, CacheMode, Error, HostOffset, IoAction, ReadPaths, Result, SpaceMap, Storage,
    StorageCaps, StorageExt, StorageExtent, ZeroMode,
};
use vdkit_storage::MemoryStorage;

pub use crate::crash_image::CrashImage;
use crate::crash_image::{Change, Event, SECTOR, Sector, Sectors};
pub use crate::crash_steps::Step;
use crate::rng::Rng;

/// The longest length.
const LEN_MAX: u64 = i64::MAX as u64;

/// Numbers the changes and syncs of several storages in one order.
#[derive(Clone, Debug, Default)]
pub struct CrashClock(Arc<Mutex<Ticks>>);

#[derive(Debug, Default)]
struct Ticks {
    storages: usize,
    /// The storage of each change or sync.
    all: Vec<usize>,
}

impl CrashClock {
    /// A clock without storages: see [`CrashStorage::on`].
    pub fn new() -> Self {
        Self::default()
    }

    /// Changes and syncs of all its storages so far.
    pub fn now(&self) -> usize {
        self.0.lock().all.len()
    }

    fn join(&self) -> usize {
        let mut ticks = self.0.lock();
        ticks.storages += 1;
        ticks.storages - 1
    }

    fn tick(&self, storage: usize) {
        self.0.lock().all.push(storage);
    }

    fn ops_of(&self, storage: usize, at: usize) -> usize {
        self.0.lock().all[..at].iter().filter(|other| **other == storage).count()
    }
}

#[derive(Debug)]
pub(crate) struct State {
    live: Sectors,
    pub(crate) len: u64,
    pub(crate) events: Vec<Event>,
    /// How many events had happened after each operation.
    points: Vec<usize>,
    /// Numbers of changes and syncs, from 1.
    pub(crate) next: u64,
    pub(crate) now: CrashImage,
}

/// Memory that records every change; see the [module's documentation](self) for what survives a
/// crash. Fine for runs of some thousand changes: nothing is ever forgotten.
#[derive(Debug)]
pub struct CrashStorage {
    name: String,
    cache: CacheMode,
    pub(crate) initial: CrashImage,
    pub(crate) state: Mutex<State>,
    clock: CrashClock,
    /// Its number on the clock.
    index: usize,
    /// Calls wait now and then before they return.
    stumbles: AtomicBool,
    waits: AtomicU64,
    /// For opening it again.
    itself: Weak<Self>,
}

/// The crashes of one storage, in the order of time; see [`CrashStorage::replay`].
#[derive(Debug)]
pub struct Replay {
    storage: Arc<CrashStorage>,
    image: CrashImage,
    /// Events that the image has seen.
    events: usize,
}

impl Replay {
    /// A crash after the first `at` changes and syncs of all storages on the clock; as
    /// [`Replay::at`].
    ///
    /// # Panics
    /// As [`Replay::at`].
    pub fn at_tick(&mut self, at: usize) -> &CrashImage {
        self.at(self.storage.clock.ops_of(self.storage.index, at))
    }

    /// A crash after the first `ops` changes and syncs of the storage. Moments come in ascending
    /// order.
    ///
    /// # Panics
    /// If there were not so many, or a later moment was asked for before.
    pub fn at(&mut self, ops: usize) -> &CrashImage {
        let state = self.storage.state.lock();
        let end = state.moment_after(ops);
        assert!(self.events <= end, "moments of a replay come in ascending order");
        for event in &state.events[self.events..end] {
            self.image.apply(event);
        }
        self.events = end;
        &self.image
    }
}

impl CrashStorage {
    /// An empty storage that can grow.
    pub fn new() -> Arc<Self> {
        Self::on(&CrashClock::new())
    }

    /// An empty storage that can grow, on a clock that others are on too.
    pub fn on(clock: &CrashClock) -> Arc<Self> {
        Self::with(Sectors::new(), 0, CacheMode::Writeback, clock)
    }

    /// An empty storage as one that was opened in a cache mode: where it says so each change is
    /// durable when it returns, and with [`CacheMode::Unsafe`] nothing ever is.
    pub fn in_mode(cache: CacheMode) -> Arc<Self> {
        Self::with(Sectors::new(), 0, cache, &CrashClock::new())
    }

    /// A storage that holds, durably, what `source` holds.
    ///
    /// # Panics
    /// If `source` cannot be read.
    pub fn holding(source: &dyn Storage) -> Arc<Self> {
        Self::holding_in(source, CacheMode::Writeback, &CrashClock::new())
    }

    /// As [`CrashStorage::holding`], in a cache mode as [`CrashStorage::in_mode`], on a clock that
    /// others are on too.
    ///
    /// # Panics
    /// If `source` cannot be read.
    pub fn holding_in(source: &dyn Storage, cache: CacheMode, clock: &CrashClock) -> Arc<Self> {
        let len = source.len().expect("the length of the source");
        let mut sectors = Sectors::new();
        let mut at = 0;
        while at < len {
            let extent = source.extent_at(HostOffset(at), len - at).expect("an extent");
            let end = (at + extent.len).min(len);
            if extent.data {
                for number in at / SECTOR..end.div_ceil(SECTOR) {
                    let mut bytes = [0; SECTOR as usize];
                    source.read_padded(&mut bytes, HostOffset(number * SECTOR)).expect("a read");
                    sectors.insert(number, sector_of(bytes));
                }
            }
            at = end;
        }
        Self::with(sectors, len, cache, clock)
    }

    fn with(sectors: Sectors, len: u64, cache: CacheMode, clock: &CrashClock) -> Arc<Self> {
        let initial = CrashImage::new(&sectors, len);
        Arc::new_cyclic(|itself| Self {
            name: "crash".to_owned(),
            cache,
            initial: initial.clone(),
            state: Mutex::new(State {
                live: sectors,
                len,
                events: Vec::new(),
                points: Vec::new(),
                next: 1,
                now: initial,
            }),
            clock: clock.clone(),
            index: clock.join(),
            stumbles: AtomicBool::new(false),
            waits: AtomicU64::new(0),
            itself: itself.clone(),
        })
    }

    /// Changes and syncs so far. A program that notes this after each of its steps knows which
    /// steps were done at a crash.
    pub fn ops(&self) -> usize {
        self.state.lock().points.len()
    }

    /// A crash right now.
    pub fn crash_now(&self) -> CrashImage {
        self.state.lock().now.clone()
    }

    /// A crash after the first `at` changes and syncs of all storages on its clock.
    ///
    /// # Panics
    /// If there were not so many.
    pub fn crash_at_tick(&self, at: usize) -> CrashImage {
        self.crash_at(self.clock.ops_of(self.index, at))
    }

    /// A crash right after the first `ops` changes and syncs: a change has reached the storage,
    /// a sync has returned.
    ///
    /// # Panics
    /// If there were not so many.
    pub fn crash_at(&self, ops: usize) -> CrashImage {
        let moment = self.state.lock().moment_after(ops);
        self.crash_at_moment(moment)
    }

    /// Its crashes in the order of time, which costs less than [`CrashStorage::crash_at`] for each.
    pub fn replay(self: &Arc<Self>) -> Replay {
        Replay { storage: self.clone(), image: self.initial.clone(), events: 0 }
    }

    /// Delays changes and syncs at random, so that other threads run between their beginning and their
    /// end.
    pub fn stumble(&self, on: bool) {
        self.stumbles.store(on, Ordering::Relaxed);
    }

    /// Delays a call, between its beginning and its end.
    fn linger(&self) {
        if !self.stumbles.load(Ordering::Relaxed) {
            return std::thread::yield_now();
        }
        let roll = Rng::new(self.waits.fetch_add(1, Ordering::Relaxed)).next_u64();
        match roll % 8 {
            0..=3 => {}
            4 | 5 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(roll >> 8 & 63)),
        }
    }

    /// Calls `look` with the crash after each number of operations, from 0 to [`CrashStorage::ops`].
    pub fn for_each_crash(self: &Arc<Self>, mut look: impl FnMut(usize, &CrashImage)) {
        let mut replay = self.replay();
        for ops in 0..=self.ops() {
            look(ops, replay.at(ops));
        }
    }

    /// One of the survivors of a crash right now; see [`CrashImage::survivor`].
    pub fn survivor(&self, rng: &mut Rng) -> MemoryStorage {
        self.crash_now().survivor(rng)
    }

    /// Applies a change in two steps, so that a sync of another thread may fall between.
    fn change(&self, work: impl FnOnce(&mut State) -> Result<Option<Change>>) -> Result<()> {
        let id = {
            let mut state = self.state.lock();
            let Some(change) = work(&mut state)? else { return Ok(()) };
            self.begin_change(&mut state, change)
        };
        self.linger();
        self.end(id);
        if self.cache.write_durable() { self.sync() } else { Ok(()) }
    }

    /// Numbers and records a change that reaches the storage.
    pub(crate) fn begin_change(&self, state: &mut State, change: Change) -> u64 {
        let id = state.next;
        state.next += 1;
        self.record(state, Event::Changed(Arc::new(Change { id, ..change })));
        id
    }

    /// Records what ends an operation.
    pub(crate) fn record(&self, state: &mut State, event: Event) {
        state.record(event);
        state.points.push(state.events.len());
        self.clock.tick(self.index);
    }

    fn end_of(&self, action: IoAction, offset: HostOffset, len: u64) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end.0 <= LEN_MAX => Ok(end.0),
            _ => {
                let source = std::io::ErrorKind::FileTooLarge.into();
                Err(Error::io(&self.name, action, offset.0, len, source))
            }
        }
    }
}

fn sector_of(bytes: [u8; SECTOR as usize]) -> Sector {
    bytes.iter().any(|b| *b != 0).then(|| Arc::new(bytes))
}

impl State {
    pub(crate) fn record(&mut self, event: Event) {
        self.now.apply(&event);
        self.events.push(event);
    }

    /// How many events had happened after the first `ops` changes and syncs.
    fn moment_after(&self, ops: usize) -> usize {
        ops.checked_sub(1).map_or(0, |last| self.points[last])
    }

    /// The length that a change up to `end` has to settle, if any. That is also one which another
    /// thread has made and whose change still is under way: what is synced is not past the end.
    pub(crate) fn grow(&mut self, end: u64) -> Option<u64> {
        if end > self.len {
            self.len = end;
            return Some(end);
        }
        self.now.may_lose_len(end).then_some(self.len)
    }

    /// Writes over `start..end`, `bytes` giving the content from an offset on.
    pub(crate) fn write(&mut self, start: u64, end: u64, buf: &[u8]) -> Vec<(u64, Sector)> {
        let mut touched = Vec::new();
        for number in start / SECTOR..end.div_ceil(SECTOR) {
            let base = number * SECTOR;
            let mut bytes = self.live.get(&number).cloned().flatten().map_or([0; 512], |s| *s);
            let (from, to) = (start.max(base), end.min(base + SECTOR));
            bytes[(from - base) as usize..(to - base) as usize]
                .copy_from_slice(&buf[(from - start) as usize..(to - start) as usize]);
            let sector = sector_of(bytes);
            self.live.insert(number, sector.clone());
            touched.push((number, sector));
        }
        touched
    }

    /// Makes `start..end` zero. Sectors that were never touched are zero in every version.
    pub(crate) fn clear(&mut self, start: u64, end: u64) -> Vec<(u64, Sector)> {
        let mut touched = Vec::new();
        if start >= end {
            return touched;
        }
        for (number, sector) in self.live.range_mut(start / SECTOR..end.div_ceil(SECTOR)) {
            let base = number * SECTOR;
            let (from, to) = (start.max(base), end.min(base + SECTOR));
            if let Some(old) = sector.as_deref() {
                let mut bytes = *old;
                bytes[(from - base) as usize..(to - base) as usize].fill(0);
                *sector = sector_of(bytes);
            }
            touched.push((*number, sector.clone()));
        }
        touched
    }
}

/// A change that still lacks its number.
fn unnumbered(sectors: Vec<(u64, Sector)>, new_len: Option<u64>) -> Option<Change> {
    Some(Change { id: 0, sectors, new_len, cut: false })
}

impl Storage for CrashStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps {
            writable: true,
            growable: true,
            volatile: self.cache == CacheMode::Unsafe,
            prompt_writes: true,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.state.lock().len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let state = self.state.lock();
        let there = state.len.saturating_sub(offset.0).min(buf.len() as u64);
        let buf = &mut buf[..there as usize];
        buf.fill(0);
        if there == 0 {
            return Ok(0);
        }
        let end = offset.0 + there;
        for (number, sector) in state.live.range(offset.0 / SECTOR..end.div_ceil(SECTOR)) {
            let Some(bytes) = sector else { continue };
            let base = number * SECTOR;
            let (from, to) = (offset.0.max(base), end.min(base + SECTOR));
            buf[(from - offset.0) as usize..(to - offset.0) as usize]
                .copy_from_slice(&bytes[(from - base) as usize..(to - base) as usize]);
        }
        Ok(there as usize)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.end_of(IoAction::Write, offset, buf.len() as u64)?;
        if buf.is_empty() {
            return Ok(());
        }
        let step = Step::Write { at: offset.0, bytes: buf };
        self.change(|state| Ok(Some(state.change_of(step))))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, _mode: ZeroMode) -> Result<()> {
        let end = self.end_of(IoAction::WriteZeroes, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        self.change(|state| {
            let touched = state.clear(offset.0, end);
            Ok(unnumbered(touched, state.grow(end)))
        })
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.change(|state| {
            let end = offset.0.saturating_add(len).min(state.len);
            let start = offset.0.checked_next_multiple_of(SECTOR).unwrap_or(end);
            let touched = state.clear(start, end / SECTOR * SECTOR);
            Ok(if touched.is_empty() { None } else { unnumbered(touched, None) })
        })
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let end = self.end_of(IoAction::Allocate, offset, len)?;
        self.change(|state| {
            Ok(if len == 0 {
                None
            } else {
                state.grow(end).and_then(|len| unnumbered(Vec::new(), Some(len)))
            })
        })
    }

    fn sync(&self) -> Result<()> {
        if self.cache == CacheMode::Unsafe {
            return Ok(());
        }
        let sync = self.begin_sync();
        self.linger();
        self.end_sync(sync);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.end_of(IoAction::Resize, HostOffset(len), 0)?;
        self.change(|state| {
            let settled = len == state.len && !state.now.may_lose_len(len);
            Ok((!settled).then(|| state.change_of(Step::SetLen(len))))
        })
    }

    vdkit_block::capabilities! {
        space_map: SpaceMap, read_paths: ReadPaths, access_exchange: AccessExchange
    }
}

impl SpaceMap for CrashStorage {
    fn may_have_holes(&self) -> Result<bool> {
        let state = self.state.lock();
        let data = state.live.values().filter(|sector| sector.is_some()).count() as u64;
        Ok(data * SECTOR < state.len)
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        let state = self.state.lock();
        let len = len.max(1);
        if offset.0 >= state.len {
            return Ok(StorageExtent { data: false, len });
        }
        let end = offset.0.saturating_add(len).min(state.len);
        let mut data = state.live.range(offset.0 / SECTOR..end.div_ceil(SECTOR));
        let Some((first, _)) = data.find(|(_, sector)| sector.is_some()) else {
            return Ok(StorageExtent { data: false, len: end - offset.0 });
        };
        if first * SECTOR > offset.0 {
            return Ok(StorageExtent { data: false, len: first * SECTOR - offset.0 });
        }
        let mut stop = first + 1;
        for (number, sector) in data {
            if *number != stop || sector.is_none() {
                break;
            }
            stop += 1;
        }
        Ok(StorageExtent { data: true, len: (stop * SECTOR).min(end) - offset.0 })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        let state = self.state.lock();
        Ok(state.live.values().filter(|sector| sector.is_some()).count() as u64 * SECTOR)
    }
}

impl ReadPaths for CrashStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        self.read_padded(buf, offset).map(|()| true)
    }
}

impl AccessExchange for CrashStorage {
    fn downgrade_lock(&self) -> Result<()> {
        Ok(())
    }

    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        // Whoever calls holds it, so it is there.
        self.itself.upgrade().map(|itself| itself as Arc<dyn Storage>).ok_or(Error::Interrupted)
    }
}

#[cfg(test)]
#[path = "crash_tests.rs"]
mod tests;
