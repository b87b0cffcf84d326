//! Grows the file, and creates the refcount blocks that describe the new clusters.
//!
//! A refcount table entry may be written only once the block's own refcount is durable, and the
//! block itself, or zeroes in its place. A new block would therefore need a barrier before the
//! flush's. To avoid it, blocks are prepared long before they are needed:
//!
//! * A new image has more blocks than it needs ([`crate::measure::RefcountClusters::roomy`]).
//! * While the file grows, clusters are set aside as *spares* for future blocks. A spare reads as
//!   zero, and the next flush makes its refcount durable. From then on it may be linked without a
//!   barrier, in the first group of any flush: until its content is durable, a block reads as "all
//!   free", and nothing refers to the clusters that it describes.
//! * A batch ends where a further refcount block would need a barrier.
//! * A clean close links the spares, so that the next open has them.
//!
//! If that was not enough, one barrier makes the refcounts of all spares durable, or creates blocks
//! if there are no spares (in an image of another program), including those for future growth.

use std::ops::Range;

use vdkit_block::{Error, HostOffset, Remedy, Result, ZeroMode};

use crate::allocator::Grown;
use crate::image::{Meta, Qcow2};
use crate::layout::{HOST_OFFSET_END, REFCOUNT_TABLE_BYTES_MAX};
use crate::measure::{GuestSizes, RefcountClusters};
use crate::structures::encode_words;

/// A batch never reserves more than this ahead.
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Refcount blocks are prepared for a growth of at least this many bytes ...
const AHEAD_BYTES_MIN: u64 = 16 << 20;
/// ... and this many clusters ...
const AHEAD_CLUSTERS_MIN: u64 = 8192;
/// ... and a quarter of the file, up to this many bytes.
const AHEAD_BYTES_MAX: u64 = 256 << 20;

/// Metadata that must exist before the file can grow to some cluster.
struct Cover {
    /// Clusters of a larger refcount table; 0 if the current one suffices.
    table_clusters: u64,
    /// Indexes of refcount blocks that are missing.
    blocks: Vec<usize>,
}

impl Cover {
    fn clusters(&self) -> u64 {
        self.table_clusters + self.blocks.len() as u64
    }
}

impl Qcow2 {
    /// Grows the file by a batch, if possible of at least `count` clusters, and reserves it.
    pub(crate) fn extend(&self, meta: &mut Meta, count: u64) -> Result<Grown> {
        loop {
            if let Some(grown) = self.extend_here(meta, count)? {
                return Ok(grown);
            }
        }
    }

    /// As [`Qcow2::extend`]; `None` if the frontier had to move first.
    fn extend_here(&self, meta: &mut Meta, count: u64) -> Result<Option<Grown>> {
        let bits = self.geometry.cluster_bits;
        let growable = self.storage.caps().growable;
        let limit = if growable { HOST_OFFSET_END } else { self.storage.len()? } >> bits;
        let first = self.frontier();
        let want = count.max(meta.space.batch);
        let spares = self.missing_spares(meta, first + want);
        let least = (first + count + spares).min(limit);
        let end = (first + want + spares).min(limit);
        if end <= first {
            return Ok(Some(Grown::Done));
        }
        // After a failed header write, the header may name a table in this range.
        meta.check_header(&*self.storage)?;
        let Some((cover, end)) = self.cover(meta, first..end, least, limit)? else {
            return Ok(Some(Grown::Busy));
        };
        if self.pass_used(meta, first..first + cover.clusters())? {
            return Ok(None);
        }
        // Volatile storage may grow as it is written. Extending and later truncating the file would
        // make XFS write it out on close.
        if growable && !self.storage.caps().volatile {
            self.storage.set_len(end << bits)?;
        }
        let fresh = growable && !meta.space.tail_written;
        let next = match self.make_cover(meta, first, end, &cover, fresh) {
            Ok(next) => next,
            Err(error) => {
                meta.space.tail_written = true;
                return Err(error);
            }
        };
        // From here on, refcount blocks in the new range are in use, even if a later step fails.
        self.set_frontier(meta, end);
        meta.space.tail_written = false;
        if let Err(error) = self.reserve_tail(meta, next, end, fresh) {
            // A later scan finds its free clusters.
            meta.space.scan = meta.space.scan.min(next);
            meta.space.scan_end = end;
            return Err(error);
        }
        self.keep_spares(meta);
        meta.space.batch = (meta.space.batch * 2).min((BATCH_BYTES_MAX >> bits).max(16));
        Ok(Some(Grown::Done))
    }

    /// The metadata that must be created to reserve `batch`, and where the batch is to end: at the
    /// end of the blocks that need no barrier, if that is at least `least`. Returns `None` if a
    /// barrier is needed while a flush is running, since that flush may hold older copies of what
    /// would be written directly.
    fn cover(
        &self,
        meta: &mut Meta,
        batch: Range<u64>,
        least: u64,
        limit: u64,
    ) -> Result<Option<(Cover, u64)>> {
        let mut reach = self.reach(meta, &batch, self.usable_spares(meta));
        if reach < least {
            if meta.flush_running {
                return Ok(None);
            }
            // If the table will soon be too small, the table and the blocks are created together.
            let table = meta.space.refcounts.table.len();
            let lasting = self.blocks_ahead(meta, batch.end, usize::MAX).end <= table;
            if lasting && self.reach(meta, &batch, meta.space.spares.len()) >= least {
                self.sync_refcounts(meta)?;
                reach = self.reach(meta, &batch, self.usable_spares(meta));
            }
        }
        if reach >= least {
            let blocks = self.missing_blocks(meta, self.block_range(batch.start, reach));
            return Ok(Some((Cover { table_clusters: 0, blocks }, reach)));
        }
        let cover = self.missing(meta, batch.start, batch.end)?;
        // Room for the batch's own metadata.
        let own = cover.clusters();
        let end = (batch.end + own + own / 8 + 1).min(limit);
        Ok(Some((self.missing(meta, batch.start, end)?, end)))
    }

    /// End of the part of `batch` that is described by linked blocks, or by up to `more` new ones.
    fn reach(&self, meta: &Meta, batch: &Range<u64>, mut more: usize) -> u64 {
        let bits = self.geometry.refcount_block_bits();
        for index in self.block_range(batch.start, batch.end) {
            let linked = meta.space.refcounts.table.get(index).map(|&entry| entry != 0);
            match linked {
                Some(true) => {}
                Some(false) if more > 0 => more -= 1,
                _ => return batch.start.max((index as u64) << bits),
            }
        }
        batch.end
    }

    /// Moves the frontier behind the first cluster of a range that is in use already (see
    /// [`Qcow2::reserve_tail`]), since refcount blocks need a range without any. Returns whether
    /// there was one.
    fn pass_used(&self, meta: &mut Meta, mut range: Range<u64>) -> Result<bool> {
        let first = range.start;
        loop {
            let Some(cluster) = range.next() else { return Ok(false) };
            if meta.space.refcounts.get(cluster, &*self.storage)? > 0 {
                self.advance(meta, first, cluster + 1);
                return Ok(true);
            }
        }
    }

    /// Moves the frontier from `first` to `end`. Free clusters between them are found by a scan.
    fn advance(&self, meta: &mut Meta, first: u64, end: u64) {
        meta.space.scan = meta.space.scan.min(first);
        meta.space.scan_end = end;
        self.set_frontier(meta, end);
    }

    /// Makes sure that the clusters of an L2 entry, which are to be written in place, are below the
    /// frontier: the file of a truncated image ends before some of them, and what is written beyond
    /// the frontier would be truncated.
    ///
    /// # Errors
    /// I/O, or [`Error::Corrupt`] if such a cluster is not in use.
    pub(crate) fn regain(&self, meta: &mut Meta, host: HostOffset, len: u64) -> Result<()> {
        let (bits, first) = (self.geometry.cluster_bits, self.frontier());
        let end = (host.0 + len).div_ceil(1 << bits);
        if self.has_data_file() || end <= first {
            return Ok(());
        }
        for cluster in first.max(host.0 >> bits)..end {
            if meta.space.refcounts.get(cluster, &*self.storage)? == 0 {
                return Err(Error::corrupt(
                    self.storage.name(),
                    cluster << bits,
                    "refcount",
                    "0 for a cluster of guest data beyond the end of the file",
                    "at least 1",
                )
                .with_remedy(Remedy::REPAIR));
            }
        }
        // Before the frontier moves: if the file cannot be that long, only this write fails, and not
        // each growth from there on.
        if self.storage.caps().growable {
            self.storage.set_len(end << bits)?;
        }
        self.advance(meta, first, end);
        Ok(())
    }

    /// Reserves `first..end`, except what is in use already beyond the end of the file: leaks, and
    /// what a truncated image has lost.
    fn reserve_tail(&self, meta: &mut Meta, first: u64, end: u64, fresh: bool) -> Result<()> {
        let mut runs = Vec::new();
        let mut at = first;
        while at < end {
            at = meta
                .space
                .refcounts
                .free_runs(at..end, &*self.storage, |f, c| runs.push((f, c)))?;
        }
        runs.into_iter().try_for_each(|(first, count)| self.reserve_run(meta, first, count, fresh))
    }

    /// Indexes of the blocks that describe a range of clusters.
    fn block_range(&self, first: u64, end: u64) -> Range<usize> {
        let bits = self.geometry.refcount_block_bits();
        (first >> bits) as usize..(end.div_ceil(1 << bits)) as usize
    }

    fn missing_blocks(&self, meta: &Meta, indexes: Range<usize>) -> Vec<usize> {
        let table = &meta.space.refcounts.table;
        indexes.filter(|&k| table.get(k).is_none_or(|&offset| offset == 0)).collect()
    }

    /// The metadata that is missing to set refcounts for `first..end`; since that costs a barrier,
    /// also for future growth.
    fn missing(&self, meta: &Meta, first: u64, end: u64) -> Result<Cover> {
        let table_len = meta.space.refcounts.table.len();
        let ahead = self.blocks_ahead(meta, end, usize::MAX).end;
        let table_clusters = match self.larger_table(meta, end) {
            Ok(clusters) if end > meta.space.refcounts.table_end() || ahead > table_len => clusters,
            Err(error) if end > meta.space.refcounts.table_end() => return Err(error),
            _ => 0,
        };
        let entries = table_clusters * self.geometry.cluster_bytes() / 8;
        let table_len = table_len.max(entries as usize);
        let mut blocks = self.missing_blocks(meta, self.block_range(first, end));
        blocks.extend(self.missing_blocks(meta, self.blocks_ahead(meta, end, table_len)));
        Ok(Cover { table_clusters, blocks })
    }

    /// Clusters of a larger refcount table, for a file that ends at `end`.
    fn larger_table(&self, meta: &Meta, end: u64) -> Result<u64> {
        let cluster = self.geometry.cluster_bytes();
        let entries = cluster / 8;
        let room = self.full().map_or(0, |full| full.table_with_room(&self.geometry));
        let mut clusters = (meta.space.refcounts.table.len() as u64 / entries * 2).max(room);
        // The table must also describe itself and its blocks.
        while (clusters * entries) << self.geometry.refcount_block_bits() < end + 2 * clusters {
            clusters *= 2;
        }
        if clusters * cluster > REFCOUNT_TABLE_BYTES_MAX {
            let what = format!(
                "the refcount table is at its limit of {REFCOUNT_TABLE_BYTES_MAX} bytes; \
                 convert to an image with a larger cluster_size"
            );
            return Err(Error::no_space(self.storage.name(), what));
        }
        Ok(clusters)
    }

    /// Indexes of the blocks that growth beyond `end` will need, limited to a table of `table_len`
    /// entries. None on a device, which has no fresh space.
    fn blocks_ahead(&self, meta: &Meta, end: u64, table_len: usize) -> Range<usize> {
        let bits = self.geometry.cluster_bits;
        let ahead = (2 * meta.space.batch)
            .max(AHEAD_BYTES_MIN >> bits)
            .max(AHEAD_CLUSTERS_MIN)
            .max((end / 4).min(AHEAD_BYTES_MAX >> bits));
        let first = self.block_range(0, end).end;
        if !self.storage.caps().growable {
            return first..first;
        }
        // An image without snapshots never needs more than its fully allocated disk.
        let useful = match self.full() {
            Some(full) if meta.snapshots.count == 0 => full.blocks as usize,
            _ => table_len,
        };
        first..self.block_range(0, end + ahead).end.min(useful).min(table_len).max(first)
    }

    /// Refcount clusters of the image with a fully allocated disk.
    fn full(&self) -> Option<RefcountClusters> {
        let guest = GuestSizes::new(self.guest_len(), &self.geometry).ok()?;
        let data = if self.has_data_file() { 0 } else { guest.clusters };
        let others = 1 + guest.l1_clusters + guest.l2_tables + data;
        Some(RefcountClusters::covering(others, &self.geometry))
    }

    /// Creates refcount blocks and, if needed, a larger table, in the clusters from `first` on.
    /// Returns the first unused cluster.
    fn make_cover(
        &self,
        meta: &mut Meta,
        first: u64,
        end: u64,
        cover: &Cover,
        fresh: bool,
    ) -> Result<u64> {
        if cover.clusters() == 0 {
            return Ok(first);
        }
        let bits = self.geometry.cluster_bits;
        let old_table_len = meta.space.refcounts.table.len();
        if cover.table_clusters > 0 {
            let entries = (cover.table_clusters << bits) / 8;
            meta.space.refcounts.table.resize(entries as usize, 0);
        }
        let mut own = Vec::new();
        // A larger table is written whole, with its own blocks: linking a spare would write its
        // entry beyond the end of the old table.
        for &index in &cover.blocks {
            if cover.table_clusters > 0 || !self.link_spare(meta, index) {
                own.push(index);
            }
        }
        let next = first + cover.table_clusters + own.len() as u64;
        if next > end {
            // Linked spares stay linked.
            meta.space.refcounts.truncate_table(old_table_len);
            let what = "the device has no room for more refcounts";
            return Err(Error::no_space(self.storage.name(), what));
        }
        if own.is_empty() && cover.table_clusters == 0 {
            return Ok(first);
        }
        let made = self.write_cover(meta, first, cover.table_clusters, &own, fresh);
        if made.is_err() {
            for &index in &own {
                let block = HostOffset(meta.space.refcounts.table[index]);
                meta.space.refcounts.forget_block(block);
                meta.space.refcounts.table[index] = 0;
            }
            meta.space.refcounts.truncate_table(old_table_len);
        } else {
            self.metadata.write().extend(first..next);
        }
        made.map(|()| next)
    }

    /// Writes new blocks (and a new table) with the refcounts of their own clusters, then links
    /// them once they are durable.
    fn write_cover(
        &self,
        meta: &mut Meta,
        first: u64,
        table_clusters: u64,
        own: &[usize],
        fresh: bool,
    ) -> Result<()> {
        let (bits, storage) = (self.geometry.cluster_bits, &*self.storage);
        let used = table_clusters + own.len() as u64;
        if !fresh {
            storage.write_zeroes(HostOffset(first << bits), used << bits, ZeroMode::MayUnmap)?;
        }
        for (i, &index) in own.iter().enumerate() {
            let cluster = first + table_clusters + i as u64;
            meta.space.refcounts.table[index] = cluster << bits;
        }
        for cluster in first..first + used {
            meta.space.refcounts.set(cluster, 1, storage)?;
        }
        if table_clusters == 0 {
            self.sync_refcounts(meta)?;
            for &index in own {
                meta.space
                    .refcounts
                    .set_block(index, HostOffset(meta.space.refcounts.table[index]));
            }
            return Ok(());
        }
        self.write_refcounts(meta, |meta| {
            let raw = encode_words(&meta.space.refcounts.table);
            storage.write_at(&raw, HostOffset(first << bits))?;
            // `switch_header` issues the barrier.
            self.switch_table(meta, first, table_clusters)
        })
    }

    /// Makes all refcounts durable: one barrier.
    fn sync_refcounts(&self, meta: &mut Meta) -> Result<()> {
        self.write_refcounts(meta, |_| self.storage.sync())
    }

    /// Writes all refcounts; `settle` makes them durable. No flush may be running.
    fn write_refcounts(
        &self,
        meta: &mut Meta,
        settle: impl FnOnce(&mut Meta) -> Result<()>,
    ) -> Result<()> {
        debug_assert!(!meta.flush_running);
        let taken = meta.space.refcounts.take_dirty();
        let written =
            meta.space.refcounts.write(&taken, &*self.storage).and_then(|()| settle(meta));
        if let Err(error) = written {
            meta.space.refcounts.restore_dirty(taken);
            return Err(error);
        }
        meta.space.refcounts.written(taken);
        // The refcounts of the pool and the file's length are durable too.
        meta.space.flush_sequence += 1;
        meta.space.durable_sequence = meta.space.flush_sequence;
        Ok(())
    }

    /// Points the header at a durable new refcount table and releases the old one.
    fn switch_table(&self, meta: &mut Meta, first: u64, clusters: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        self.switch_tables(meta, |header| {
            header.refcount_table_offset.set(first << bits);
            header.refcount_table_clusters.set(clusters as u32);
        })?;
        let old = meta.space.refcounts.table_offset;
        let old = self.clusters_of(old, meta.space.table_clusters << bits);
        meta.space.refcounts.table_offset = HostOffset(first << bits);
        meta.space.table_clusters = clusters;
        self.retire(meta, old);
        Ok(())
    }

    /// Number of spares that may be linked without a barrier: all on volatile storage.
    fn usable_spares(&self, meta: &Meta) -> usize {
        if self.storage.caps().volatile {
            return meta.space.spares.len();
        }
        meta.space
            .spares
            .iter()
            .take_while(|spare| spare.sequence < meta.space.durable_sequence)
            .count()
    }

    /// Makes the first spare a refcount block, if that needs no barrier.
    fn link_spare(&self, meta: &mut Meta, index: usize) -> bool {
        if self.usable_spares(meta) == 0 {
            return false;
        }
        let Some(spare) = meta.space.spares.pop_front() else { return false };
        meta.space
            .refcounts
            .set_block(index, HostOffset(spare.first << self.geometry.cluster_bits));
        self.metadata.write().insert(spare.first);
        true
    }

    /// Number of spares to add once the file ends at `end`.
    fn missing_spares(&self, meta: &Meta, end: u64) -> u64 {
        let ahead = self.blocks_ahead(meta, end, meta.space.refcounts.table.len());
        let missing = self.missing_blocks(meta, ahead).len();
        missing.saturating_sub(meta.space.spares.len()) as u64
    }

    /// Sets clusters aside for the refcount blocks of future growth.
    fn keep_spares(&self, meta: &mut Meta) {
        for _ in 0..self.missing_spares(meta, self.frontier()) {
            match meta.space.pool.take_fresh(1) {
                Some(space) => meta.space.spares.push_back(space),
                None => break,
            }
        }
    }

    /// Links the spares of a file that will end at `end`, for its next growth. Spares beyond that
    /// end stay unlinked.
    pub(crate) fn link_spares(&self, meta: &mut Meta, end: u64) {
        meta.space.spares.make_contiguous().sort_by_key(|spare| spare.first);
        let ahead = self.blocks_ahead(meta, end, meta.space.refcounts.table.len());
        for index in self.missing_blocks(meta, ahead) {
            let within = meta.space.spares.front().is_some_and(|spare| spare.first < end);
            if !within || !self.link_spare(meta, index) {
                break;
            }
        }
    }
}
