//! Writes metadata in an order that keeps the disk consistent at each moment.
//!
//! | first group | second group, after a barrier | after another barrier |
//! |---|---|---|
//! | refcounts and refcount table, bits of dirty bitmaps; the barrier also covers guest data and copied L2 tables, which were written before | L2 slices, L1 sectors, entries of bitmap tables | clusters that lost a reference may be released |
//!
//! The barrier between the groups is omitted if nothing in the second group depends on the first: an
//! earlier flush made the refcounts of all clusters in the L2 slices durable, no slice exposes
//! copied data or clusters with stale bytes, no L2 table was copied or zeroed, and no bitmap has new
//! bits. Lazy refcounts make no
//! difference: the file's length must be durable before an entry points beyond the old end, and the
//! same flush makes the refcounts of a batch durable.

use std::collections::BTreeSet;
use std::ops::Range;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_meta::{Freed, Metadata, MutexGuard};

use crate::bitmaps::record::BitmapCopies;
use crate::header::write_features;
use crate::image::{Meta, Qcow2};
use crate::layout::incompatible;
use crate::pool::Space;
use crate::refcounts::DirtyRefcounts;
use crate::structures::{encode_words, header_offset};

/// Most bytes of one read or write through a buffer on the stack, whose pages consecutive calls
/// reuse. A multiple of every slice length.
pub(crate) const PIECE_BYTES: usize = 64 << 10;

/// Host clusters, each of which lost one reference. They keep their refcount until the reference is
/// gone on disk and no request uses them.
pub(crate) fn freed(first: u64, count: u64, punch: bool) -> Freed {
    Freed { file: 0, first, count, punch }
}

/// Changed parts of the map, and what must be durable before they may be written.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// L2 slices, by their host offset.
    pub(crate) slices: BTreeSet<u64>,
    /// Indexes of 512-byte sectors of the L1 table.
    pub(crate) l1: BTreeSet<u64>,
    /// Refcounts and the length of the file must be durable before the L2 slices and L1 entries.
    pub(crate) refcounts_first: bool,
    /// L2 tables that were copied or zeroed directly on disk must be durable before them.
    pub(crate) tables_first: bool,
    /// Guest data must be durable before them.
    pub(crate) data_first: bool,
}

/// Metadata that was dirty at one moment, marked as being written.
pub struct Taken {
    refcounts: DirtyRefcounts,
    l2: BTreeSet<u64>,
    l1: Writes,
    l1_sectors: BTreeSet<u64>,
    bitmaps: BitmapCopies,
    barrier: bool,
    sequence: u64,
    /// Copies of refcounts and L2 slices. `None` for a flush under the lock, which writes the
    /// slices from the cache.
    copies: (Writes, Option<Writes>),
}

/// Host offset and bytes of writes, adjacent ones merged.
pub(crate) type Writes = Vec<(u64, Vec<u8>)>;

impl Taken {
    fn is_empty(&self) -> bool {
        self.refcounts.is_empty()
            && self.l2.is_empty()
            && self.l1.is_empty()
            && self.bitmaps.is_empty()
    }
}

impl Metadata for Qcow2 {
    type State = Meta;
    type LeaderState = ();
    type Dirty = Taken;

    fn take(&self, meta: &mut MutexGuard<'_, Meta>, alone: bool) -> Result<Taken> {
        meta.check_header(&*self.storage)?;
        self.place_bitmaps(meta)?;
        let mut taken = self.take_dirty(meta);
        let refcounts = meta.space.refcounts.copies(&taken.refcounts);
        taken.copies = (refcounts, (!alone).then(|| self.copies_of(&taken.l2)));
        meta.flush_running = true;
        Ok(taken)
    }

    fn write(&self, taken: &Taken, _order: &mut ()) -> Result<()> {
        let (refcounts, l2) = &taken.copies;
        self.write_in_order(
            taken,
            || write_each(&*self.storage, refcounts),
            || match l2 {
                Some(copies) => write_each(&*self.storage, copies),
                None => self.write_slices(&taken.l2),
            },
        )
    }

    fn end_write(&self, meta: &mut Meta, taken: Taken, durable: bool) {
        meta.flush_running = false;
        if durable {
            taken.l2.into_iter().for_each(|key| self.slices.written(key));
            meta.space.refcounts.written(taken.refcounts);
            self.bitmaps_flushed(taken.bitmaps);
            meta.space.durable_sequence = taken.sequence + 1;
            return;
        }
        let dirty = &mut meta.dirty;
        dirty.slices.extend(taken.l2.into_iter().filter(|&key| self.slices.write_failed(key)));
        dirty.l1.extend(taken.l1_sectors);
        (dirty.data_first, dirty.refcounts_first, dirty.tables_first) = (true, true, true);
        meta.space.refcounts.restore_dirty(taken.refcounts);
        self.bitmaps_failed(taken.bitmaps);
    }

    /// Dirty refcounts alone do not count: they only mark unreferenced clusters as reserved.
    fn is_dirty(&self, meta: &Meta) -> bool {
        let Dirty { slices, l1, .. } = &meta.dirty;
        !slices.is_empty() || !l1.is_empty() || self.bitmaps_unwritten()
    }

    /// Punches those unreferenced clusters that the guest discarded, then puts all into the pool.
    /// In this order: a late hole would erase a new owner's data.
    fn recycle(&self) -> Result<()> {
        // If a refcount cannot be read, its clusters stay in the list.
        let (runs, _) = self.drop_expired_references(&mut self.meta.lock());
        self.punch(&runs);
        self.meta.lock().add_reclaimed(runs);
        Ok(())
    }

    fn trim(&self, meta: &mut MutexGuard<'_, Meta>, _order: &mut ()) -> Result<()> {
        meta.check_header(&*self.storage)?;
        self.give_back(meta)
    }

    fn finish(&self, _order: &mut ()) -> Result<()> {
        let mut meta = self.meta.lock();
        if meta.header.lazy_dirty {
            self.write_incompatible(self.header.incompatible() & !incompatible::DIRTY)?;
            meta.header.lazy_dirty = false;
        }
        Ok(())
    }
}

impl Qcow2 {
    /// Makes all dirty metadata durable while holding the metadata lock: no thread can change it,
    /// so no copy is made. Afterwards disk and memory agree. The caller holds the lead.
    pub(crate) fn flush_locked(&self, meta: &mut Meta) -> Result<()> {
        meta.check_header(&*self.storage)?;
        let taken = self.take_dirty(meta);
        meta.reclaim.begin_commit();
        let result = self.write_in_order(
            &taken,
            || meta.space.refcounts.write(&taken.refcounts, &*self.storage),
            || self.write_slices(&taken.l2),
        );
        self.end_write(meta, taken, result.is_ok());
        meta.reclaim.end_commit(result.is_ok());
        result
    }

    /// Discards the clusters that the guest discarded, in the file system.
    pub(crate) fn punch(&self, runs: &[Freed]) {
        let bits = self.geometry.cluster_bits;
        for run in runs.iter().filter(|run| run.punch) {
            // Errors are ignored: the image owns the space either way.
            let _ = self.storage.discard(HostOffset(run.first << bits), run.count << bits);
        }
    }

    fn take_dirty(&self, meta: &mut Meta) -> Taken {
        let Dirty { slices, l1: l1_sectors, refcounts_first, tables_first, data_first } =
            std::mem::take(&mut meta.dirty);
        // The data file is synced before the second group in any case.
        let data_first = data_first && !self.has_data_file();
        let bitmaps = self.copy_bitmaps();
        let barrier = data_first || refcounts_first || tables_first || !bitmaps.is_empty();
        let words = self.l1.read();
        let l1 = l1_sectors
            .iter()
            .map(|&sector| {
                let first = sector as usize * 64;
                let last = (first + 64).min(words.len());
                (self.l1_offset().0 + sector * 512, encode_words(&words[first..last]))
            })
            .collect();
        let sequence = meta.space.flush_sequence;
        meta.space.flush_sequence += 1;
        Taken {
            refcounts: meta.space.refcounts.take_dirty(),
            l2: slices,
            l1,
            l1_sectors,
            bitmaps,
            barrier,
            sequence,
            copies: Default::default(),
        }
    }

    fn copies_of(&self, slices: &BTreeSet<u64>) -> Writes {
        let runs = runs(slices, self.slices.slice_bytes());
        copy_runs(runs, |at, out| self.slices.begin_writes(at, out))
    }

    /// Writes slices, a piece at a time.
    fn write_slices(&self, slices: &BTreeSet<u64>) -> Result<()> {
        let runs = runs(slices, self.slices.slice_bytes());
        write_pieces(&*self.storage, runs, |at, piece| self.slices.begin_writes(at, piece))
    }

    /// Writes both groups of `taken` with their barriers; `refcounts` writes the refcount blocks,
    /// `l2` the L2 slices.
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
        // If the second group is empty, the last sync is enough.
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

    /// Flushes if dirty slices fill half of the cache, since they cannot be evicted.
    pub(crate) fn relieve_cache(&self) -> Result<()> {
        if self.meta.lock().dirty.slices.len() > self.slices.capacity() / 2 {
            self.meta.flush(self)?;
        }
        Ok(())
    }

    /// Called before the first metadata change: with lazy refcounts, the dirty bit must be durable
    /// before refcounts may be out of date.
    pub(crate) fn before_change(&self, meta: &mut Meta) -> Result<()> {
        meta.check_header(&*self.storage)?;
        if self.header.lazy_refcounts() && !meta.header.lazy_dirty {
            self.write_incompatible(self.header.incompatible() | incompatible::DIRTY)?;
            meta.header.lazy_dirty = true;
        }
        Ok(())
    }

    fn write_incompatible(&self, bits: u64) -> Result<()> {
        write_features(&*self.storage, header_offset!(incompatible_features), bits)
    }

    /// Frees all preallocated clusters, and truncates the file after the last used cluster.
    fn give_back(&self, meta: &mut Meta) -> Result<()> {
        let mut runs: Vec<Space> = meta.space.pool.drain();
        let end = end_without(self.frontier(), runs.iter().chain(&meta.space.spares));
        self.link_spares(meta, end);
        runs.extend(meta.space.spares.drain(..));
        runs.sort_by_key(|r| r.first);
        meta.space.compressed_at = None;
        while let Some(run) = runs.pop() {
            let refcounts = &mut meta.space.refcounts;
            let (done, freed) = refcounts.set_run(run.first, run.count, 0, &*self.storage);
            if let Err(error) = freed {
                // Clusters that were freed are found by the next scan; the others stay reserved.
                let (first, count) = (run.first + done, run.count - done);
                runs.push(Space { first, count, ..run });
                runs.into_iter().for_each(|run| meta.space.pool.add(run));
                (meta.space.scan, meta.space.scan_end) = (0, self.frontier());
                return Err(error);
            }
        }
        // A later write finds the freed clusters again.
        meta.space.scan = 0;
        meta.space.scan_end = end;
        self.set_frontier(meta, end);
        meta.space.tail_written = true;
        if !self.storage.caps().growable {
            return Ok(());
        }
        let len = end << self.geometry.cluster_bits;
        let present = self.storage.len()?;
        if len < present || (self.storage.caps().volatile && len > present) {
            self.storage.set_len(len)?;
        }
        Ok(())
    }
}

fn write_each(storage: &dyn Storage, writes: &Writes) -> Result<()> {
    writes.iter().try_for_each(|(at, bytes)| storage.write_at(bytes, HostOffset(*at)))
}

/// Copies host ranges; `fill` fills in the bytes of an offset.
pub(crate) fn copy_runs(runs: Vec<Range<u64>>, fill: impl Fn(u64, &mut [u8])) -> Writes {
    let copy = |run: Range<u64>| {
        let mut bytes = vec![0; (run.end - run.start) as usize];
        fill(run.start, &mut bytes);
        (run.start, bytes)
    };
    runs.into_iter().map(copy).collect()
}

/// Writes host ranges in pieces, without one large copy; `fill` fills in the bytes of an offset.
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

/// The host ranges of slices of `step` bytes, adjacent ones merged.
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

/// End of the file after freeing the runs at its end.
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
    use vdkit_testbase::CountingStorage;

    use super::*;

    #[test]
    fn pieces_of_a_run_lie_where_their_slices_do() {
        // The content depends on the offset.
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
