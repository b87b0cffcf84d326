//! Allocates host clusters: free ones first, then by growing the file.
//!
//! Clusters are reserved in batches (see [`crate::pool`]): their refcounts are set, and the file is
//! extended to hold them ([`crate::growth`]), before anything refers to them. The next flush's
//! barrier makes a whole batch durable. A crash leaves unused clusters of a batch as leaks.

use std::collections::VecDeque;

use vdkit_block::{Error, HostOffset, Remedy, Result, ZeroMode};
use vdkit_meta::{Freed, MutexGuard};

use crate::flush::freed;
use crate::header::Header;
use crate::image::{Meta, Qcow2};
use crate::layout::{COMPRESSED, COPIED, OFFSET_MASK};
use crate::pool::{Pool, Space};
use crate::refcounts::Refcounts;
use crate::structures::words_mut;

/// Most refcount blocks that one allocation scans for free clusters.
const SCAN_BLOCKS_MAX: usize = 64;

/// Which host clusters are in use or reserved.
#[derive(Debug)]
pub(crate) struct HostSpace {
    pub(crate) refcounts: Refcounts,
    pub(crate) pool: Pool,
    /// Clusters that are reserved for future refcount blocks.
    pub(crate) spares: VecDeque<Space>,
    /// Next cluster below [`Qcow2::frontier`] to be searched for refcount 0. Each cluster is searched
    /// once.
    pub(crate) scan: u64,
    pub(crate) scan_end: u64,
    /// Clusters to reserve ahead next time.
    pub(crate) batch: u64,
    /// Snapshots of dirty metadata taken so far.
    pub(crate) flush_sequence: u64,
    /// All refcounts that were set while `flush_sequence` was below this are durable.
    pub(crate) durable_sequence: u64,
    /// The next byte for a compressed cluster, in a host cluster that has room.
    pub(crate) compressed_at: Option<HostOffset>,
    pub(crate) table_clusters: u64,
    /// Clusters beyond the frontier may hold data, so they do not read as zero.
    pub(crate) tail_written: bool,
}

impl HostSpace {
    /// The space of an image whose clusters are all below `frontier`.
    pub(crate) fn new(refcounts: Refcounts, frontier: u64, header: &Header) -> Self {
        Self {
            refcounts,
            pool: Pool::default(),
            spares: VecDeque::new(),
            scan: 0,
            scan_end: frontier,
            batch: ((1 << 20) >> header.geometry.cluster_bits).max(16),
            flush_sequence: 0,
            durable_sequence: 0,
            compressed_at: None,
            table_clusters: header.refcount_table_clusters.into(),
            tail_written: false,
        }
    }

    /// Whether the refcounts of `space` are durable.
    pub(crate) fn is_durable(&self, space: &Space) -> bool {
        space.sequence < self.durable_sequence
    }
}

/// Result of growing the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grown {
    /// The pool has grown, or cannot grow.
    Done,
    /// A flush must end first.
    Busy,
}

impl Qcow2 {
    /// Takes up to `count` contiguous host clusters, at `hint` if that is free.
    ///
    /// Returns `None` if the metadata lock was released meanwhile: the caller's findings may be out
    /// of date, and it must start again.
    pub(crate) fn allocate(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        count: u64,
        hint: Option<u64>,
    ) -> Result<Option<Space>> {
        if let Some(space) = hint.and_then(|h| meta.space.pool.take_at(h, count)) {
            return Ok(Some(space));
        }
        if let Some(space) = meta.space.pool.take(count) {
            return Ok(Some(space));
        }
        let grown = self.grow(meta, count);
        // The new clusters may be fragmented; a shorter run is better than none.
        if let Some(space) =
            meta.space.pool.take(count).or_else(|| meta.space.pool.take_longest(count))
        {
            return Ok(Some(space));
        }
        match grown? {
            Grown::Done => {
                let what = "the device is too small for more clusters";
                Err(Error::no_space(self.storage.name(), what))
            }
            Grown::Busy => {
                self.meta.wait(meta);
                Ok(None)
            }
        }
    }

    /// Takes `count` clusters at any offsets, and adds them to `held`: leaks until something refers
    /// to them. Durable after the next flush.
    pub(crate) fn take_clusters(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        count: usize,
        held: &mut Vec<Space>,
    ) -> Result<Vec<u64>> {
        let mut clusters = Vec::with_capacity(count);
        while clusters.len() < count {
            let missing = (count - clusters.len()) as u64;
            if let Some(space) = self.allocate(meta, missing, None)? {
                held.push(space);
                clusters.extend(space.first..space.first + space.count);
            }
        }
        Ok(clusters)
    }

    /// Takes one cluster for a table, preferably one that reads as zero. `None`: as for
    /// [`Qcow2::allocate`].
    pub(crate) fn allocate_table(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<Option<Space>> {
        match meta.space.pool.take_fresh(1) {
            Some(space) => Ok(Some(space)),
            None => self.allocate(meta, 1, None),
        }
    }

    /// Puts more clusters into the pool.
    fn grow(&self, meta: &mut Meta, count: u64) -> Result<Grown> {
        self.reclaim(meta)?;
        let want = count.max(meta.space.batch);
        if meta.space.pool.clusters() >= want || self.scan(meta, want)? >= want {
            return Ok(Grown::Done);
        }
        loop {
            let frontier = self.frontier();
            let grown = self.extend(meta, count)?;
            // After a crash, a whole batch beyond the end of the file may be in use, as leaks:
            // continue after it.
            if grown == Grown::Busy || meta.space.pool.clusters() > 0 || self.frontier() == frontier
            {
                return Ok(grown);
            }
        }
    }

    /// Reserves free clusters below the frontier. Each refcount block is scanned once.
    fn scan(&self, meta: &mut Meta, want: u64) -> Result<u64> {
        let mut found = 0;
        for _ in 0..SCAN_BLOCKS_MAX {
            if meta.space.scan >= meta.space.scan_end || found >= want {
                break;
            }
            let HostSpace { refcounts, scan, scan_end, .. } = &mut meta.space;
            if !refcounts.covered(*scan) {
                let entries = self.geometry.refcount_block_entries();
                *scan = (*scan / entries + 1) * entries;
                continue;
            }
            let mut runs = Vec::new();
            let stop =
                refcounts.free_runs(*scan..*scan_end, &*self.storage, |f, c| runs.push((f, c)))?;
            meta.space.scan = stop;
            for (first, count) in runs {
                let take = count.min(want - found);
                if take < count {
                    meta.space.scan = first + take;
                }
                self.take_free(meta, first, take)?;
                found += take;
                if take < count {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// Reserves clusters with refcount 0 and arbitrary content.
    fn take_free(&self, meta: &mut Meta, first: u64, count: u64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        {
            let metadata = self.metadata.read();
            if let Some(cluster) = (first..first + count).find(|&c| metadata.contains(c)) {
                return Err(Error::corrupt(
                    self.storage.name(),
                    cluster << self.geometry.cluster_bits,
                    "refcount",
                    "0 for a cluster that holds metadata",
                    "at least 1",
                )
                .with_remedy(Remedy::REPAIR));
            }
        }
        self.reserve_run(meta, first, count, false)
    }

    /// Sets the refcounts of free clusters to 1 and puts them into the pool; after an error, those
    /// that were set.
    pub(crate) fn reserve_run(
        &self,
        meta: &mut Meta,
        first: u64,
        count: u64,
        fresh: bool,
    ) -> Result<()> {
        let sequence = meta.space.flush_sequence;
        let (count, result) = meta.space.refcounts.set_run(first, count, 1, &*self.storage);
        if count > 0 {
            meta.space.pool.add(Space { first, count, fresh, sequence });
        }
        result
    }

    /// Returns freed clusters to the pool once no in-flight request can read them.
    fn reclaim(&self, meta: &mut Meta) -> Result<()> {
        let (runs, result) = self.drop_expired_references(meta);
        meta.add_reclaimed(runs);
        result
    }

    /// Drops the references of all freed clusters that no in-flight request can read any more.
    /// Returns those that had only this reference and are in no list now: the caller puts them into
    /// the pool.
    pub(crate) fn drop_expired_references(&self, meta: &mut Meta) -> (Vec<Freed>, Result<()>) {
        let (mut last, mut result) = (Vec::<Freed>::new(), Ok(()));
        for freed in meta.reclaim.take_expired(&self.in_flight) {
            if result.is_err() {
                meta.reclaim.put_back([freed]);
                continue;
            }
            let run = freed.run;
            for cluster in run.first..run.first + run.count {
                match self.drop_reference(meta, cluster) {
                    Ok(false) => {}
                    Ok(true) => {
                        let one = Freed { first: cluster, count: 1, ..run };
                        if !last.last_mut().is_some_and(|run| run.join(&one)) {
                            last.push(one);
                        }
                    }
                    Err(error) => {
                        let count = run.first + run.count - cluster;
                        let rest = Freed { first: cluster, count, ..run };
                        meta.reclaim.put_back([freed.with(rest)]);
                        result = Err(error);
                        break;
                    }
                }
            }
        }
        // In an image that was written in any order, neighbors in the file are none on the disk.
        // Joined, they are one run of the pool, and one hole in the file system.
        last.sort_unstable_by_key(|run| run.first);
        last.dedup_by(|next, run| run.join(next));
        (last, result)
    }

    /// Drops one reference of a cluster. Returns whether it was the last one: the refcount then
    /// stays 1, as for all clusters of the pool.
    pub(crate) fn drop_reference(&self, meta: &mut Meta, cluster: u64) -> Result<bool> {
        match meta.space.refcounts.get(cluster, &*self.storage)? {
            // Only in a damaged image, whose refcount was too low; there is nothing to free.
            0 => Ok(false),
            // Also damaged: a metadata cluster must not be reused.
            1 if self.metadata.read().contains(cluster) => Ok(false),
            // Of a truncated image. The pool has only clusters of the file.
            1 if cluster >= self.frontier() => {
                meta.space.refcounts.set(cluster, 0, &*self.storage)?;
                Ok(false)
            }
            1 => {
                if meta
                    .space
                    .compressed_at
                    .is_some_and(|at| self.geometry.host_cluster(at) == cluster)
                {
                    // The cluster may be reused before it is full.
                    meta.space.compressed_at = None;
                }
                Ok(true)
            }
            more => {
                meta.space.refcounts.set(cluster, more - 1, &*self.storage)?;
                Ok(false)
            }
        }
    }

    /// Creates or copies the L2 table of an L1 index, so that it may be changed. `None`: as for
    /// [`Qcow2::allocate`].
    pub(crate) fn writable_l2(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        l1_index: u64,
    ) -> Result<Option<()>> {
        let old = match self.l2_table(l1_index)? {
            Some((_, true)) => return Ok(Some(())),
            Some((table, false)) => Some(table),
            None => None,
        };
        let Some(space) = self.allocate_table(meta)? else { return Ok(None) };
        let table = HostOffset(space.first << self.geometry.cluster_bits);
        let cluster = self.geometry.cluster_bytes();
        self.slices.forget(table, cluster);
        let filled = match old {
            // Shared with a snapshot: the copy must be durable before the L1 entry that exposes it.
            Some(old) => self.copy_l2(old, table).map(|()| true),
            None if space.fresh => Ok(false),
            None => self.storage.write_zeroes(table, cluster, ZeroMode::MayUnmap).map(|()| true),
        };
        match filled {
            Ok(written) => meta.dirty.tables_first |= written,
            Err(error) => {
                meta.space.pool.add(Space { fresh: false, ..space });
                return Err(error);
            }
        }
        if old.is_none() {
            self.slices.add_zeroes(table, cluster);
        }
        meta.dirty.refcounts_first |= !meta.space.is_durable(&space);
        self.metadata.write().insert(space.first);
        self.l1.write()[l1_index as usize] = table.0 | COPIED;
        meta.dirty.l1.insert(l1_index / 64);
        if let Some(old) = old {
            let first = old.0 >> self.geometry.cluster_bits;
            // Once no snapshot needs the cluster, it may hold data.
            self.metadata.write().remove(first);
            // Punched: otherwise a check could mistake its content for a table that lost its L1
            // entry.
            meta.reclaim.unlink(&self.in_flight, [freed(first, 1, true)]);
        }
        Ok(Some(()))
    }

    /// Copies a shared L2 table. Its clusters are shared too, so no entry of the copy has COPIED
    /// set.
    fn copy_l2(&self, from: HostOffset, to: HostOffset) -> Result<()> {
        let mut raw = vec![0; self.geometry.cluster_bytes() as usize];
        self.storage.read_padded(&mut raw, from)?;
        if !self.has_data_file() {
            for entry in words_mut(&mut raw).chunks_exact_mut(self.geometry.l2_entry_words()) {
                let word = entry[0].get();
                if word & COMPRESSED == 0 && word & OFFSET_MASK != 0 {
                    entry[0].set(word & !COPIED);
                }
            }
        }
        self.storage.write_at(&raw, to)
    }
}

impl Meta {
    /// Puts clusters into the pool that lost their last reference, also on disk.
    pub(crate) fn add_reclaimed(&mut self, runs: impl IntoIterator<Item = Freed>) {
        for Freed { first, count, .. } in runs {
            // Their refcounts are already durable, their content is arbitrary.
            self.space.pool.add(Space { first, count, fresh: false, sequence: 0 });
        }
    }
}
