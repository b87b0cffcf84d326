//! Making metadata durable in an order that is consistent at each moment.
//!
//! | first group | then, behind a barrier | after that barrier |
//! |---|---|---|
//! | refcounts and refcount table, guest data, copied L2 tables, bits of dirty bitmaps | L2 slices, L1 sectors, entries of bitmap tables | clusters that lost a reference may be released |
//!
//! The barrier between the groups is left out where nothing in the second group depends on the
//! first: all host clusters that the L2 slices point at were reserved by an earlier flush, none of
//! them shows data that must not be torn, and no bitmap has new bits. (Lazy refcounts make no difference: the file's
//! length must be durable before an entry points behind the old end, and the refcounts of a batch
//! become so with it.)

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{HostOffset, Result, Storage};

use crate::bitmaps::record::BitmapCopies;
use crate::header::field;
use crate::image::{Freed, Meta, Qcow2};
use crate::layout::incompatible;
use crate::pool::Space;
use crate::refcounts::DirtyRefcounts;

/// Read or written at once at most, by way of the stack: one call after the other uses the same pages
/// there. A multiple of each slice's length.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// What was dirty at one moment, marked as being written.
pub(crate) struct Taken {
    refcounts: DirtyRefcounts,
    l2: BTreeSet<u64>,
    l1: Writes,
    l1_sectors: BTreeSet<u64>,
    bitmaps: BitmapCopies,
    unlinked: Vec<Freed>,
    barrier: bool,
    sequence: u64,
}

/// Host offset and bytes of writes, neighbours joined.
pub(crate) type Writes = Vec<(u64, Vec<u8>)>;

impl Taken {
    fn is_empty(&self) -> bool {
        self.refcounts.is_empty()
            && self.l2.is_empty()
            && self.l1.is_empty()
            && self.bitmaps.is_empty()
    }
}

impl Qcow2 {
    /// Flushes; callers that come while another flush runs share the next one.
    pub(crate) fn flush_grouped(&self) -> Result<()> {
        let mine = self.flush_requests.fetch_add(1, Ordering::SeqCst) + 1;
        let mut state = self.flushing.lock();
        if state.completed >= mine {
            return Ok(());
        }
        // Everyone who asked up to now has finished their writes: this flush serves them too.
        let serves = self.flush_requests.load(Ordering::SeqCst);
        self.flush_once()?;
        state.completed = serves;
        Ok(())
    }

    /// One flush; the caller holds `flushing`.
    pub(crate) fn flush_once(&self) -> Result<()> {
        // Copies, so that others can go on while they are written.
        let (taken, refcounts, l2) = {
            let mut meta = self.meta.lock();
            meta.check_header(&*self.storage)?;
            self.place_bitmaps(&mut meta)?;
            meta.flush_running = true;
            let taken = self.take_dirty(&mut meta);
            let refcounts = meta.refcounts.copies(&taken.refcounts);
            let l2 = self.copies_of(&taken.l2);
            (taken, refcounts, l2)
        };
        let result = self.write_in_order(
            &taken,
            || write_each(&*self.storage, &refcounts),
            || write_each(&*self.storage, &l2),
        );
        let mut meta = self.meta.lock();
        meta.flush_running = false;
        match result {
            Ok(()) => self.flushed(&mut meta, taken),
            Err(_) => self.flush_failed(&mut meta, taken),
        }
        drop(meta);
        self.ended.notify_all();
        if result.is_ok() {
            self.recycle();
        }
        result
    }

    /// Makes all dirty metadata durable without giving up the metadata lock: nobody can change what is
    /// written, so no copy of it is made. Afterwards the disk says what memory says. The caller holds
    /// `flushing`.
    pub(crate) fn flush_locked(&self, meta: &mut Meta) -> Result<()> {
        meta.check_header(&*self.storage)?;
        let taken = self.take_dirty(meta);
        let result = self.write_in_order(
            &taken,
            || meta.refcounts.write(&taken.refcounts, &*self.storage),
            || self.write_slices(&taken.l2),
        );
        match result {
            Ok(()) => self.flushed(meta, taken),
            Err(_) => self.flush_failed(meta, taken),
        }
        result
    }

    /// Gives clusters that nothing refers to any more back to the file system where the guest gave
    /// them up, and puts them into the pool. Not before: a late hole would erase a new owner's data.
    pub(crate) fn recycle(&self) {
        // A failure to read a refcount leaves them waiting.
        let (runs, _) = self.take_released(&mut self.meta.lock());
        self.punch(&runs);
        let mut meta = self.meta.lock();
        for run in runs {
            meta.add_reclaimed(run);
        }
    }

    /// Gives those clusters back to the file system that the guest gave up.
    pub(crate) fn punch(&self, runs: &[Freed]) {
        let bits = self.geometry.cluster_bits;
        for run in runs.iter().filter(|run| run.punch) {
            // Only a hint: the space is ours either way.
            let _ = self.storage.discard(HostOffset(run.first << bits), run.count << bits);
        }
    }

    fn take_dirty(&self, meta: &mut Meta) -> Taken {
        // The data file is synced before the second group in any case.
        let data_first = meta.data_first && !self.has_data_file();
        let barrier = data_first || meta.refcounts_first || meta.tables_first;
        meta.data_first = false;
        meta.refcounts_first = false;
        meta.tables_first = false;
        // Before bits of bitmaps are looked for, as whoever sets one asks in the other order.
        self.dirty.store(false, Ordering::SeqCst);
        let bitmaps = self.copy_bitmaps();
        let barrier = barrier || !bitmaps.is_empty();
        let l1_sectors = std::mem::take(&mut meta.dirty_l1);
        let words = self.l1.read();
        let l1 = l1_sectors
            .iter()
            .map(|&sector| {
                let first = sector as usize * 64;
                let last = (first + 64).min(words.len());
                let bytes = words[first..last].iter().flat_map(|w| w.to_be_bytes()).collect();
                (self.l1_offset().0 + sector * 512, bytes)
            })
            .collect();
        let sequence = meta.flush_sequence;
        meta.flush_sequence += 1;
        Taken {
            refcounts: meta.refcounts.take_dirty(),
            l2: std::mem::take(&mut meta.dirty_slices),
            l1,
            l1_sectors,
            bitmaps,
            unlinked: std::mem::take(&mut meta.unlinked),
            barrier,
            sequence,
        }
    }

    /// Copies of slices.
    fn copies_of(&self, slices: &BTreeSet<u64>) -> Writes {
        let copy = |run: Range<u64>| {
            let mut bytes = vec![0; (run.end - run.start) as usize];
            self.slices.begin_writes(run.start, &mut bytes);
            (run.start, bytes)
        };
        runs(slices, self.slices.slice_bytes()).into_iter().map(copy).collect()
    }

    /// Writes slices, a piece at a time.
    fn write_slices(&self, slices: &BTreeSet<u64>) -> Result<()> {
        let runs = runs(slices, self.slices.slice_bytes());
        write_pieces(&*self.storage, runs, |at, piece| self.slices.begin_writes(at, piece))
    }

    /// Writes both groups with their barriers: what was taken, refcount blocks by `refcounts` and L2
    /// slices by `l2`.
    fn write_in_order(
        &self,
        taken: &Taken,
        refcounts: impl FnOnce() -> Result<()>,
        l2: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if taken.is_empty() {
            return self.data.sync();
        }
        let storage = &*self.storage;
        refcounts()?;
        write_each(storage, &taken.bitmaps.pages)?;
        if self.has_data_file() {
            self.data.sync()?;
        }
        // Also when only refcounts go: with nothing behind them, the last sync is enough.
        let second =
            !(taken.l2.is_empty() && taken.l1.is_empty() && taken.bitmaps.tables.is_empty());
        if taken.barrier && second {
            storage.sync()?;
        }
        l2()?;
        write_each(storage, &taken.l1)?;
        write_each(storage, &taken.bitmaps.tables)?;
        storage.sync()
    }

    fn flushed(&self, meta: &mut Meta, taken: Taken) {
        for key in taken.l2 {
            self.slices.written(key);
        }
        meta.refcounts.written(taken.refcounts);
        self.bitmaps_flushed(taken.bitmaps);
        meta.durable_sequence = taken.sequence + 1;
        meta.released.extend(taken.unlinked);
    }

    fn flush_failed(&self, meta: &mut Meta, taken: Taken) {
        for key in taken.l2 {
            if self.slices.write_failed(key) {
                meta.dirty_slices.insert(key);
            }
        }
        meta.refcounts.restore_dirty(taken.refcounts);
        self.bitmaps_failed(taken.bitmaps);
        meta.dirty_l1.extend(taken.l1_sectors);
        let later = std::mem::replace(&mut meta.unlinked, taken.unlinked);
        meta.unlinked.extend(later);
        meta.data_first = true;
        meta.refcounts_first = true;
        meta.tables_first = true;
        self.dirty.store(true, Ordering::Release);
    }

    /// Flushes when dirty slices fill half of the cache, since they cannot be evicted.
    pub(crate) fn relieve_cache(&self) -> Result<()> {
        if self.meta.lock().dirty_slices.len() > self.slices.capacity() / 2 {
            self.flush_grouped()?;
        }
        Ok(())
    }

    /// Called before the first change of metadata: with lazy refcounts, the dirty bit must be
    /// durable before refcounts may be behind.
    pub(crate) fn before_change(&self, meta: &mut Meta) -> Result<()> {
        meta.check_header(&*self.storage)?;
        if self.header.lazy_refcounts() && !meta.lazy_dirty {
            self.write_incompatible(self.header.incompatible() | incompatible::DIRTY)?;
            meta.lazy_dirty = true;
        }
        Ok(())
    }

    fn write_incompatible(&self, bits: u64) -> Result<()> {
        self.storage.write_at(&bits.to_be_bytes(), HostOffset(field::INCOMPATIBLE))?;
        self.storage.sync()
    }

    /// As [`vdkit_block::Format::close`].
    pub(crate) fn close_cleanly(&self) -> Result<()> {
        let mut state = self.flushing.lock();
        let serves = self.flush_requests.load(Ordering::SeqCst);
        self.meta.lock().check_header(&*self.storage)?;
        if self.dirty() || self.has_unreleased() {
            self.flush_last()?;
        }
        self.recycle();
        let shorter = self.give_back(&mut self.meta.lock())?;
        if let Some(len) = shorter {
            self.storage.set_len(len)?;
        }
        self.flush_last()?;
        state.completed = serves;
        let mut meta = self.meta.lock();
        if meta.lazy_dirty {
            self.write_incompatible(self.header.incompatible() & !incompatible::DIRTY)?;
            meta.lazy_dirty = false;
        }
        Ok(())
    }

    /// A flush of an image that is being closed: nobody is there who would have to wait for the lock.
    /// The caller holds `flushing`.
    fn flush_last(&self) -> Result<()> {
        let mut meta = self.meta.lock();
        self.place_bitmaps(&mut meta)?;
        let result = self.flush_locked(&mut meta);
        drop(meta);
        self.ended.notify_all();
        result
    }

    fn dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire)
    }

    fn has_unreleased(&self) -> bool {
        !self.meta.lock().unlinked.is_empty()
    }

    /// Frees all that is reserved ahead; returns the length that the file is to have, where it is
    /// another.
    fn give_back(&self, meta: &mut Meta) -> Result<Option<u64>> {
        let mut runs: Vec<Space> = meta.pool.drain();
        let end = end_without(meta.frontier, runs.iter().chain(&meta.spares));
        self.link_spares(meta, end);
        runs.extend(meta.spares.drain(..));
        runs.sort_by_key(|r| r.first);
        meta.packed_at = None;
        for (done, run) in runs.iter().enumerate().rev() {
            if let Err(error) = meta.refcounts.set_run(run.first, run.count, 0, &*self.storage) {
                for run in &runs[..=done] {
                    meta.pool.add(*run);
                }
                return Err(error);
            }
        }
        if !runs.is_empty() {
            self.dirty.store(true, Ordering::Release);
        }
        // A later write finds the freed clusters again.
        meta.scan = 0;
        meta.scan_end = end;
        meta.frontier = end;
        meta.tail_written = true;
        if !self.storage.caps().growable {
            return Ok(None);
        }
        let len = end << self.geometry.cluster_bits;
        let present = self.storage.len()?;
        Ok((len < present || (self.storage.volatile() && len > present)).then_some(len))
    }
}

/// Writes what was copied.
fn write_each(storage: &dyn Storage, writes: &Writes) -> Result<()> {
    writes.iter().try_for_each(|(at, bytes)| storage.write_at(bytes, HostOffset(*at)))
}

/// Writes host ranges a piece at a time, without a copy of all; `fill` puts in what lies at an offset.
pub(crate) fn write_pieces(
    storage: &dyn Storage,
    runs: Vec<Range<u64>>,
    fill: impl Fn(u64, &mut [u8]),
) -> Result<()> {
    let mut piece = [0; PIECE_BYTES];
    for run in runs {
        for at in run.clone().step_by(PIECE_BYTES) {
            let bytes = &mut piece[..PIECE_BYTES.min((run.end - at) as usize)];
            fill(at, bytes);
            storage.write_at(bytes, HostOffset(at))?;
        }
    }
    Ok(())
}

/// The host ranges of slices of `step` bytes, those that lie behind each other in one.
pub(crate) fn runs(slices: &BTreeSet<u64>, step: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for &start in slices {
        match runs.last_mut() {
            Some(run) if run.end == start => run.end += step,
            _ => runs.push(start..start + step),
        }
    }
    runs
}

/// Where a file ends when those runs are free that lie at its end.
fn end_without<'a>(mut end: u64, runs: impl Iterator<Item = &'a Space>) -> u64 {
    let mut runs: Vec<&Space> = runs.collect();
    runs.sort_by_key(|run| run.first);
    while let Some(last) = runs.pop()
        && last.first + last.count == end
    {
        end = last.first;
    }
    end
}

#[cfg(test)]
mod tests {
    use vdkit_storage::MemoryStorage;
    use vdkit_testkit::CountingStorage;

    use super::*;

    #[test]
    fn pieces_of_a_run_lie_where_their_slices_do() {
        // What lies at an offset says where it is.
        let at = |offset: u64| (offset / 512) as u8 ^ (offset >> 16) as u8;
        let fill = |first: u64, out: &mut [u8]| {
            for (offset, byte) in (first..).zip(out) {
                *byte = at(offset);
            }
        };
        let piece = PIECE_BYTES as u64;
        let runs = vec![512..1024, 4096..4096 + 2 * piece + 512, 4 * piece..5 * piece];
        let memory = std::sync::Arc::new(MemoryStorage::with_len("m", 5 * piece));
        let storage = CountingStorage::new(memory.clone());
        write_pieces(&*storage, runs.clone(), fill).unwrap();
        assert_eq!(storage.counts().writes, 1 + 3 + 1);
        for (offset, byte) in (0..).zip(memory.to_vec()) {
            let written = runs.iter().any(|run| run.contains(&offset));
            assert_eq!(byte, if written { at(offset) } else { 0 }, "offset {offset:#x}");
        }
    }
}
