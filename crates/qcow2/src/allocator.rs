//! Finding host clusters: free ones first, then a longer file.
//!
//! Clusters are reserved in batches (see [`crate::pool`]): their refcounts are set, and the file
//! is made long enough for them, before anything refers to them. A batch costs a part of one
//! barrier, the next flush's. What a crash leaves of it is a leak.

use parking_lot::MutexGuard;
use vdkit_block::{Error, HostOffset, Result, ZeroMode};

use crate::header::field;
use crate::image::{Freed, Meta, Qcow2};
use crate::layout::{COMPRESSED, COPIED, HOST_OFFSET_END, OFFSET_MASK, REFCOUNT_TABLE_BYTES_MAX};
use crate::pool::Space;

/// A batch never reserves more than this ahead.
const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Refcount blocks that one allocation reads at most in search of free clusters.
const SCAN_BLOCKS_MAX: usize = 64;

/// Metadata that must exist before the file can grow to some cluster.
struct Cover {
    /// Clusters of a larger refcount table; 0 where the present one will do.
    table_clusters: u64,
    /// Indexes of refcount blocks that are missing.
    blocks: Vec<usize>,
}

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

    /// Makes the file longer by a batch and reserves it.
    pub(crate) fn extend(&self, meta: &mut Meta, count: u64) -> Result<Grown> {
        let bits = self.geometry.cluster_bits;
        let growable = self.storage.caps().growable;
        let limit = if growable { HOST_OFFSET_END } else { self.storage.len()? } >> bits;
        let want = count.max(meta.batch);
        let first = meta.frontier;
        let mut end = (first + want).min(limit);
        let mut cover = self.missing(meta, first, end)?;
        // Room for what the batch itself needs.
        let own = cover.table_clusters + cover.blocks.len() as u64;
        if own > 0 {
            end = (end + own + own / 8 + 1).min(limit);
            cover = self.missing(meta, first, end)?;
        }
        if end <= first {
            return Ok(Grown::Done);
        }
        // The flush may hold older copies of what would now be written past the cache.
        if own > 0 && meta.flush_running {
            return Ok(Grown::Busy);
        }
        // The header may point to a table where this would write.
        meta.check_header(&*self.storage)?;
        // Where no order survives a crash, the file may grow as it is written: a file that is made
        // longer and cut again is written out by XFS when it is closed.
        if growable {
            match self.storage.volatile() {
                true => self.storage.expect_len(end << bits)?,
                false => self.storage.set_len(end << bits)?,
            }
        }
        let fresh = growable && !meta.tail_written;
        let next = match self.make_cover(meta, first, end, &cover, fresh) {
            Ok(next) => next,
            Err(error) => {
                meta.tail_written = true;
                return Err(error);
            }
        };
        // From here on blocks in the new part are in use, whatever fails: it belongs to the file.
        meta.frontier = end;
        meta.tail_written = false;
        if let Err(error) = self.reserve_tail(meta, next, end, fresh) {
            // What is free of it is found again.
            meta.scan = meta.scan.min(next);
            meta.scan_end = end;
            return Err(error);
        }
        meta.batch = (meta.batch * 2).min((BATCH_BYTES_MAX >> bits).max(16));
        self.keep_spares(meta);
        Ok(Grown::Done)
    }

    /// Reserves `first..end`, leaving out what is in use already (leaks beyond the end of the file).
    fn reserve_tail(&self, meta: &mut Meta, first: u64, end: u64, fresh: bool) -> Result<()> {
        let mut runs = Vec::new();
        let mut at = first;
        while at < end {
            at = meta.refcounts.free_runs(at..end, &*self.storage, |f, c| runs.push((f, c)))?;
        }
        let sequence = meta.flush_sequence;
        for (first, count) in runs {
            meta.refcounts.set_run(first, count, 1, &*self.storage)?;
            meta.pool.add(Space { first, count, fresh, sequence });
        }
        self.dirty.store(true, std::sync::atomic::Ordering::Release);
        Ok(())
    }

    /// What is missing so that refcounts for `first..end` can be set.
    fn missing(&self, meta: &Meta, first: u64, end: u64) -> Result<Cover> {
        let mut cover = Cover { table_clusters: 0, blocks: Vec::new() };
        if end <= first {
            return Ok(cover);
        }
        if end > meta.refcounts.table_end() {
            let cluster = self.geometry.cluster_bytes();
            let entries = cluster / 8;
            let present = meta.refcounts.table.len() as u64 / entries;
            let mut clusters = present * 2;
            // The table itself and its blocks lie within what it describes.
            while (clusters * entries) << self.geometry.refcount_block_bits() < end + 2 * clusters {
                clusters *= 2;
            }
            if clusters * cluster > REFCOUNT_TABLE_BYTES_MAX.max(cluster) {
                return Err(Error::NoSpace {
                    file: self.storage.name().to_owned(),
                    what: format!(
                        "the refcount table is at its limit of {REFCOUNT_TABLE_BYTES_MAX} bytes; \
                         convert to an image with a larger cluster_size"
                    ),
                });
            }
            cover.table_clusters = clusters;
        }
        let (from, to) = (meta.refcounts.block_index(first), meta.refcounts.block_index(end - 1));
        cover.blocks = (from..=to)
            .filter(|&k| meta.refcounts.table.get(k).is_none_or(|&offset| offset == 0))
            .collect();
        Ok(cover)
    }

    /// Makes refcount blocks, and a larger table where that is needed, in the clusters from
    /// `first` on. Returns the first cluster that was not used for them.
    fn make_cover(
        &self,
        meta: &mut Meta,
        first: u64,
        end: u64,
        cover: &Cover,
        fresh: bool,
    ) -> Result<u64> {
        if cover.blocks.is_empty() && cover.table_clusters == 0 {
            return Ok(first);
        }
        let bits = self.geometry.cluster_bits;
        let old_table_len = meta.refcounts.table.len();
        if cover.table_clusters > 0 {
            let entries = (cover.table_clusters << bits) / 8;
            meta.refcounts.table.resize(entries as usize, 0);
        }
        // A block in a cluster whose refcount is durable may be linked without a barrier: until
        // its content is durable too, it reads as zeroes, and nothing refers to what it describes.
        let mut own = Vec::new();
        // (A larger table is written whole, with its own blocks: entries for the old one must not
        // lie behind its end.)
        for &index in &cover.blocks {
            let durable = meta.durable_sequence;
            let usable = |s: &Space| s.fresh && s.sequence < durable && cover.table_clusters == 0;
            match meta.spares.iter().position(usable) {
                Some(at) => {
                    let spare = meta.spares.swap_remove(at);
                    meta.refcounts.set_block(index, HostOffset(spare.first << bits));
                    self.metadata.write().insert(spare.first);
                }
                None => own.push(index),
            }
        }
        let next = first + cover.table_clusters + own.len() as u64;
        if next > end {
            for &index in &cover.blocks {
                // Spares were linked already; they stay.
                if own.contains(&index) {
                    meta.refcounts.table[index] = 0;
                }
            }
            meta.refcounts.truncate_table(old_table_len);
            return Err(Error::NoSpace {
                file: self.storage.name().to_owned(),
                what: "the device has no room for more refcounts".into(),
            });
        }
        if own.is_empty() && cover.table_clusters == 0 {
            return Ok(first);
        }
        let made = self.write_cover(meta, first, cover.table_clusters, &own, fresh);
        if made.is_err() {
            for &index in &own {
                let block = HostOffset(meta.refcounts.table[index]);
                meta.refcounts.forget_block(block);
                meta.refcounts.table[index] = 0;
            }
            meta.refcounts.truncate_table(old_table_len);
        } else {
            self.metadata.write().extend(first..next);
        }
        made.map(|()| next)
    }

    /// Writes new blocks (and a new table) with the refcounts of their own clusters, and links
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
            meta.refcounts.table[index] = cluster << bits;
        }
        for cluster in first..first + used {
            meta.refcounts.set(cluster, 1, storage)?;
        }
        let taken = meta.refcounts.take_dirty();
        let written = taken
            .writes
            .iter()
            .try_for_each(|(at, bytes)| storage.write_at(bytes, HostOffset(*at)))
            .and_then(|()| match table_clusters {
                0 => Ok(()),
                _ => {
                    let raw: Vec<u8> =
                        meta.refcounts.table.iter().flat_map(|e| e.to_be_bytes()).collect();
                    storage.write_at(&raw, HostOffset(first << bits))
                }
            })
            .and_then(|()| storage.sync());
        if let Err(error) = written {
            meta.refcounts.restore_dirty(taken);
            return Err(error);
        }
        meta.refcounts.written(taken);
        if table_clusters == 0 {
            for &index in own {
                meta.refcounts.set_block(index, HostOffset(meta.refcounts.table[index]));
            }
            return Ok(());
        }
        self.switch_table(meta, first, table_clusters)
    }

    /// Points the header at a durable new refcount table and lets the old one go.
    fn switch_table(&self, meta: &mut Meta, first: u64, clusters: u64) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let mut fields = [0; 12];
        fields[..8].copy_from_slice(&(first << bits).to_be_bytes());
        fields[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        self.switch_header(meta, field::REFCOUNT_TABLE, &fields)?;
        let old = meta.refcounts.table_offset;
        let old = self.clusters_of(old, meta.table_clusters << bits);
        meta.refcounts.table_offset = HostOffset(first << bits);
        meta.table_clusters = clusters;
        self.retire(meta, old);
        Ok(())
    }

    /// Keeps clusters for the refcount blocks that the next batches will need.
    fn keep_spares(&self, meta: &mut Meta) {
        let entries = self.geometry.refcount_block_entries();
        let ahead = 2 * meta.batch;
        // The frontier's own block exists; further ones begin every `entries` clusters.
        let needed = ((meta.frontier % entries + ahead) / entries) as usize;
        while meta.spares.len() < needed {
            match meta.pool.take_fresh(1) {
                Some(space) => meta.spares.push(space),
                None => break,
            }
        }
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
            meta.unlink([Freed { first, count: 1, stamp, punch: false }]);
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
