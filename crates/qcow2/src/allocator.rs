//! Finding host clusters: free ones first, then a longer file.
//!
//! Clusters are reserved in batches (see [`crate::pool`]): their refcounts are set, and the file
//! is made long enough for them ([`crate::growth`]), before anything refers to them. A batch costs a part of one
//! barrier, the next flush's. What a crash leaves of it is a leak.

use parking_lot::MutexGuard;
use vdkit_block::{Error, HostOffset, Result, ZeroMode};

use crate::image::{Freed, Meta, Qcow2};
use crate::layout::{COMPRESSED, COPIED, OFFSET_MASK};
use crate::pool::Space;

/// Refcount blocks that one allocation reads at most in search of free clusters.
const SCAN_BLOCKS_MAX: usize = 64;

/// What came of an attempt to put more clusters into the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grown {
    /// There are more now, or there cannot be.
    Done,
    /// A flush must end first.
    Busy,
}

impl Qcow2 {
    /// Takes up to `count` contiguous host clusters, at `hint` where that is free.
    ///
    /// Nothing: the metadata lock was given up meanwhile, and whatever the caller found out under
    /// it may be wrong by now. It must begin again.
    pub(crate) fn allocate(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        count: u64,
        hint: Option<u64>,
    ) -> Result<Option<Space>> {
        if let Some(space) = hint.and_then(|h| meta.pool.take_at(h, count)) {
            return Ok(Some(space));
        }
        if let Some(space) = meta.pool.take(count) {
            return Ok(Some(space));
        }
        let grown = self.grow(meta, count);
        // What was found may be in pieces; a shorter one is better than none.
        if let Some(space) = meta.pool.take(count).or_else(|| meta.pool.take_longest(count)) {
            return Ok(Some(space));
        }
        match grown? {
            Grown::Done => Err(Error::NoSpace {
                file: self.storage.name().to_owned(),
                what: "the device is too small for more clusters".into(),
            }),
            Grown::Busy => {
                self.ended.wait(meta);
                Ok(None)
            }
        }
    }

    /// Takes so many clusters, wherever they are, for good: they are leaks until something refers to
    /// them. Durable after the next flush.
    pub(crate) fn take_clusters(&self, count: u64) -> Result<Vec<u64>> {
        let mut meta = self.meta.lock();
        self.before_change(&mut meta)?;
        let mut clusters = Vec::new();
        while (clusters.len() as u64) < count {
            let missing = count - clusters.len() as u64;
            if let Some(space) = self.allocate(&mut meta, missing, None)? {
                clusters.extend(space.first..space.first + space.count);
            }
        }
        Ok(clusters)
    }

    /// Takes one cluster for a table; one that reads as zero where there is one. Nothing: as for
    /// [`Qcow2::allocate`].
    fn allocate_table(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<Option<Space>> {
        match meta.pool.take_fresh(1) {
            Some(space) => Ok(Some(space)),
            None => self.allocate(meta, 1, None),
        }
    }

    /// Puts more clusters into the pool.
    fn grow(&self, meta: &mut Meta, count: u64) -> Result<Grown> {
        self.reclaim(meta)?;
        let want = count.max(meta.batch);
        if meta.pool.clusters() >= want || self.scan(meta, want)? >= want {
            return Ok(Grown::Done);
        }
        loop {
            let frontier = meta.frontier;
            let grown = self.extend(meta, count)?;
            // After a crash all of a batch behind the end of the file may be in use, as leaks:
            // go on behind them.
            if grown == Grown::Busy || meta.pool.clusters() > 0 || meta.frontier == frontier {
                return Ok(grown);
            }
        }
    }

    /// Reserves free clusters below the frontier. Each refcount block is searched once.
    fn scan(&self, meta: &mut Meta, want: u64) -> Result<u64> {
        let mut found = 0;
        for _ in 0..SCAN_BLOCKS_MAX {
            if meta.scan >= meta.scan_end || found >= want {
                break;
            }
            let Meta { refcounts, scan, scan_end, .. } = meta;
            if !refcounts.covered(*scan) {
                let entries = self.geometry.refcount_block_entries();
                *scan = (*scan / entries + 1) * entries;
                continue;
            }
            let mut runs = Vec::new();
            let stop =
                refcounts.free_runs(*scan..*scan_end, &*self.storage, |f, c| runs.push((f, c)))?;
            meta.scan = stop;
            for (first, count) in runs {
                let take = count.min(want - found);
                if take < count {
                    meta.scan = first + take;
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

    /// Reserves clusters with refcount 0 whose bytes may be anything.
    fn take_free(&self, meta: &mut Meta, first: u64, count: u64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        {
            let metadata = self.metadata.read();
            if let Some(cluster) = (first..first + count).find(|c| metadata.contains(c)) {
                return Err(Error::corrupt(
                    self.storage.name(),
                    cluster << self.geometry.cluster_bits,
                    "refcount",
                    "0 for a cluster that holds metadata",
                    "at least 1; run: vdkit check --repair all",
                ));
            }
        }
        for cluster in first..first + count {
            meta.refcounts.set(cluster, 1, &*self.storage)?;
        }
        let sequence = meta.flush_sequence;
        meta.pool.add(Space { first, count, fresh: false, sequence });
        self.dirty.store(true, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    /// Puts freed clusters back into use once nobody can be reading them.
    fn reclaim(&self, meta: &mut Meta) -> Result<()> {
        let (runs, result) = self.take_released(meta);
        for run in runs {
            meta.add_reclaimed(run);
        }
        result
    }

    /// Takes the references away from all freed clusters that nobody can be reading any more.
    /// Returns those that had only this one, in no list now: the caller puts them into the pool.
    pub(crate) fn take_released(&self, meta: &mut Meta) -> (Vec<Freed>, Result<()>) {
        let (mut waiting, mut last) = (Vec::new(), Vec::<Freed>::new());
        let mut result = Ok(());
        for freed in std::mem::take(&mut meta.released) {
            if result.is_err() || !self.in_flight.passed(freed.stamp) {
                waiting.push(freed);
                continue;
            }
            for cluster in freed.first..freed.first + freed.count {
                match self.drop_reference(meta, cluster) {
                    Ok(false) => {}
                    Ok(true) => match last.last_mut() {
                        Some(run)
                            if run.first + run.count == cluster && run.punch == freed.punch =>
                        {
                            run.count += 1;
                        }
                        _ => last.push(Freed { first: cluster, count: 1, ..freed }),
                    },
                    Err(error) => {
                        let count = freed.first + freed.count - cluster;
                        waiting.push(Freed { first: cluster, count, ..freed });
                        result = Err(error);
                        break;
                    }
                }
            }
        }
        meta.released.extend(waiting);
        (last, result)
    }

    /// Takes one reference from a cluster. Whether it was the last one: the refcount stays 1 then,
    /// as for all clusters of the pool.
    pub(crate) fn drop_reference(&self, meta: &mut Meta, cluster: u64) -> Result<bool> {
        match meta.refcounts.get(cluster, &*self.storage)? {
            // A damaged image counted too low; there is nothing to give back.
            0 => Ok(false),
            // As damaged: what is metadata must not become anything else.
            1 if self.metadata.read().contains(&cluster) => Ok(false),
            1 => {
                if meta.packed_at.is_some_and(|at| self.geometry.host_cluster(at) == cluster) {
                    meta.packed_at = None;
                }
                Ok(true)
            }
            more => {
                self.dirty.store(true, std::sync::atomic::Ordering::Release);
                meta.refcounts.set(cluster, more - 1, &*self.storage)?;
                Ok(false)
            }
        }
    }

    /// Makes or copies the L2 table of an L1 index, so that it may be changed. Nothing: as for
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
            // Shared with a snapshot: the copy must be durable before the L1 entry that shows it.
            Some(old) => self.copy_l2(old, table).map(|()| true),
            None if space.fresh => Ok(false),
            None => self.storage.write_zeroes(table, cluster, ZeroMode::MayUnmap).map(|()| true),
        };
        match filled {
            Ok(written) => meta.tables_first |= written,
            Err(error) => {
                meta.pool.add(Space { fresh: false, ..space });
                return Err(error);
            }
        }
        if old.is_none() {
            self.slices.add_zeroes(table, cluster);
        }
        meta.refcounts_first |= space.sequence >= meta.durable_sequence;
        self.metadata.write().insert(space.first);
        self.l1.write()[l1_index as usize] = table.0 | COPIED;
        meta.dirty_l1.insert(l1_index / 64);
        if let Some(old) = old {
            let first = old.0 >> self.geometry.cluster_bits;
            // It may hold data one day, where no snapshot needs it any more.
            self.metadata.write().remove(&first);
            let stamp = self.in_flight.stamp();
            // Or a check would take what is left of it for a table that lost its L1 entry.
            meta.unlink([Freed { first, count: 1, stamp, punch: true }]);
        }
        self.dirty.store(true, std::sync::atomic::Ordering::Release);
        Ok(Some(()))
    }

    /// Copies a shared L2 table. What it refers to is shared too, so no entry of the copy says
    /// COPIED.
    fn copy_l2(&self, from: HostOffset, to: HostOffset) -> Result<()> {
        let mut raw = vec![0; self.geometry.cluster_bytes() as usize];
        self.storage.read_padded(&mut raw, from)?;
        if !self.has_data_file() {
            let entry = self.geometry.l2_entry_bytes() as usize;
            for bytes in raw.chunks_exact_mut(entry) {
                let mut word = [0; 8];
                word.copy_from_slice(&bytes[..8]);
                let word = u64::from_be_bytes(word);
                if word & COMPRESSED == 0 && word & OFFSET_MASK != 0 {
                    bytes[..8].copy_from_slice(&(word & !COPIED).to_be_bytes());
                }
            }
        }
        self.storage.write_at(&raw, to)
    }
}

impl Meta {
    /// Puts clusters into the pool that lost their last reference, on disk too.
    pub(crate) fn add_reclaimed(&mut self, run: Freed) {
        // Their refcounts have long been durable, their bytes are anything.
        self.pool.add(Space { first: run.first, count: run.count, fresh: false, sequence: 0 });
    }
}
