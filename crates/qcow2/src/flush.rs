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

use vdkit_block::{HostOffset, Result};

use crate::bitmaps::record::BitmapCopies;
use crate::header::field;
use crate::image::{Freed, Meta, Qcow2};
use crate::layout::incompatible;
use crate::pool::Space;
use crate::refcounts::DirtyRefcounts;

/// Dirty metadata as it was at one moment.
pub(crate) struct Copies {
    refcounts: DirtyRefcounts,
    /// Host offset and bytes, neighbours joined.
    l2: Vec<(u64, Vec<u8>)>,
    l2_keys: BTreeSet<u64>,
    l1: Vec<(u64, Vec<u8>)>,
    l1_sectors: BTreeSet<u64>,
    bitmaps: BitmapCopies,
    unlinked: Vec<Freed>,
    barrier: bool,
    sequence: u64,
}

impl Copies {
    fn is_empty(&self) -> bool {
        self.refcounts.writes.is_empty()
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
        let copies = {
            let mut meta = self.meta.lock();
            meta.check_header(&*self.storage)?;
            self.place_bitmaps(&mut meta)?;
            meta.flush_running = true;
            self.copy_dirty(&mut meta)
        };
        let result = self.write_copies(&copies);
        let mut meta = self.meta.lock();
        meta.flush_running = false;
        match result {
            Ok(()) => self.flushed(&mut meta, copies),
            Err(_) => self.flush_failed(&mut meta, copies),
        }
        drop(meta);
        self.ended.notify_all();
        if result.is_ok() {
            self.recycle();
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

    pub(crate) fn copy_dirty(&self, meta: &mut Meta) -> Copies {
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
        let l2_keys = std::mem::take(&mut meta.dirty_slices);
        let slice_bytes = self.slices.slice_bytes();
        let mut l2: Vec<(u64, Vec<u8>)> = Vec::new();
        for run in runs(&l2_keys, slice_bytes) {
            let mut bytes = Vec::with_capacity((run.end - run.start) as usize);
            for key in run.clone().step_by(slice_bytes as usize) {
                self.slices.begin_write(key, &mut bytes);
            }
            l2.push((run.start, bytes));
        }
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
        Copies {
            refcounts: meta.refcounts.take_dirty(),
            l2,
            l2_keys,
            l1,
            l1_sectors,
            bitmaps,
            unlinked: std::mem::take(&mut meta.unlinked),
            barrier,
            sequence,
        }
    }

    pub(crate) fn write_copies(&self, copies: &Copies) -> Result<()> {
        if copies.is_empty() {
            return self.data.sync();
        }
        let write = |writes: &[(u64, Vec<u8>)]| {
            writes.iter().try_for_each(|(at, bytes)| self.storage.write_at(bytes, HostOffset(*at)))
        };
        write(&copies.refcounts.writes)?;
        write(&copies.bitmaps.pages)?;
        if self.has_data_file() {
            self.data.sync()?;
        }
        // Also when only refcounts go: with nothing behind them, the last sync is enough.
        let second = [&copies.l2, &copies.l1, &copies.bitmaps.tables].iter().any(|w| !w.is_empty());
        if copies.barrier && second {
            self.storage.sync()?;
        }
        write(&copies.l2)?;
        write(&copies.l1)?;
        write(&copies.bitmaps.tables)?;
        self.storage.sync()
    }

    pub(crate) fn flushed(&self, meta: &mut Meta, copies: Copies) {
        for key in copies.l2_keys {
            self.slices.written(key);
        }
        meta.refcounts.written(copies.refcounts);
        self.bitmaps_flushed(copies.bitmaps);
        meta.durable_sequence = copies.sequence + 1;
        meta.released.extend(copies.unlinked);
    }

    pub(crate) fn flush_failed(&self, meta: &mut Meta, copies: Copies) {
        for key in copies.l2_keys {
            if self.slices.write_failed(key) {
                meta.dirty_slices.insert(key);
            }
        }
        meta.refcounts.restore_dirty(copies.refcounts);
        self.bitmaps_failed(copies.bitmaps);
        meta.dirty_l1.extend(copies.l1_sectors);
        let later = std::mem::replace(&mut meta.unlinked, copies.unlinked);
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
            self.flush_once()?;
        }
        self.recycle();
        let shorter = self.give_back(&mut self.meta.lock())?;
        if let Some(len) = shorter {
            self.storage.set_len(len)?;
        }
        self.flush_once()?;
        state.completed = serves;
        let mut meta = self.meta.lock();
        if meta.lazy_dirty {
            self.write_incompatible(self.header.incompatible() & !incompatible::DIRTY)?;
            meta.lazy_dirty = false;
        }
        Ok(())
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
