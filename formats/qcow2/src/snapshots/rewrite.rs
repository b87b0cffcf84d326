//! Writes new metadata alongside the old, then switches to it with one write.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use vdkit_block::{Error, HostOffset, Monitor, Remedy, Result};
use vdkit_meta::MutexGuard;

use super::deltas::Deltas;
use super::{Snapshot, SnapshotTable};
use crate::check::reader::{self, Meter};
use crate::check::writer::Joined;
use crate::entry::L2Entry;
use crate::flush::freed;
use crate::image::{Meta, Qcow2};
use crate::layout::{COPIED, OFFSET_MASK};
use crate::pool::Space;
use crate::refcounts::{get_refcount, set_refcount};
use crate::structures::{encode_words, words_mut};

/// New COPIED flags of a rewritten L2 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Flags {
    /// All are cleared: everything is shared now.
    #[default]
    Clear,
    /// Set for clusters whose refcount changes to 1.
    SetSingle,
}

/// The new active disk.
#[derive(Debug)]
pub(super) struct Active {
    /// L1 entries; those of rewritten tables still have the old offsets.
    pub(super) words: Vec<u64>,
    pub(super) guest_bytes: u64,
}

/// All changes of one switch.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// Changes of the refcounts of clusters that L1 tables refer to.
    pub(super) deltas: Deltas,
    /// L2 tables that are rewritten for the active disk, sorted.
    pub(super) copies: Vec<u64>,
    /// The active disk refers to the old copies now, but not after the switch.
    pub(super) copies_replace: bool,
    /// New flags of these tables.
    pub(super) flags: Flags,
    /// The new active disk, if it changes.
    pub(super) active: Option<Active>,
    /// The new snapshot list.
    pub(super) snapshots: Vec<Snapshot>,
    /// The last snapshot is new, and its L1 table is the first part of the active one.
    pub(super) new_snapshot: bool,
    /// Clusters of L1 tables that become unused.
    pub(super) retired: Vec<std::ops::Range<u64>>,
    /// `deltas` includes released clusters that wait for in-flight requests
    /// ([`super::walk::Walk::new`]).
    pub(super) counts_released: bool,
}

/// Clusters for all new structures.
struct Places {
    /// Old offset of an L2 table, and its new cluster.
    copies: BTreeMap<u64, u64>,
    active_l1: Option<Space>,
    snapshot_l1: Option<Space>,
    list: Option<Space>,
    /// Index of a refcount block, its old offset, and its new cluster.
    blocks: Vec<(usize, u64, u64)>,
    refcount_table: Option<Space>,
}

impl Qcow2 {
    /// Performs a change. The caller is in [`Qcow2::exclusively`].
    ///
    /// # Errors
    /// Refcounts that do not fit, before anything is written; I/O. The image stays unchanged.
    pub(super) fn rewrite(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        mut change: Change,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        // Impossible changes fail before the file grows.
        SnapshotTable::encode(self.storage.name(), &change.snapshots, &self.limits)?;
        self.apply_to_blocks(
            &self.blocks_of(meta, &change.deltas)?,
            &change.deltas,
            monitor,
            |_, _| Ok(()),
        )?;
        self.before_change(meta)?;
        let mut held = Vec::new();
        let counted = match change.counts_released {
            true => meta.reclaim.take_released(),
            false => Vec::new(),
        };
        let result = self
            .reserve_places(meta, &mut change, &mut held)
            .and_then(|places| self.switch_to(meta, change, &places, monitor));
        if result.is_err() {
            Self::unreserve(meta, held);
            meta.reclaim.put_back(counted);
        }
        result
    }

    /// Reserves clusters for all new structures, and adds them to `held`.
    fn reserve_places(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        change: &mut Change,
        held: &mut Vec<Space>,
    ) -> Result<Places> {
        let mut singles = self.take_clusters(meta, change.copies.len(), held)?.into_iter();
        let copies: BTreeMap<u64, u64> = change.copies.iter().copied().zip(&mut singles).collect();
        if change.new_snapshot {
            // The reservation already counts the active disk's reference.
            for &cluster in copies.values() {
                change.deltas.add(cluster, 1).unwrap_or_default();
            }
        }
        let mut table = |meta: &mut MutexGuard<'_, Meta>, bytes: usize| -> Result<Option<Space>> {
            if bytes == 0 {
                return Ok(None);
            }
            let space = self.reserve_table(meta, bytes as u64)?;
            held.push(space);
            Ok(Some(space))
        };
        let active_l1 = match &change.active {
            Some(active) => table(meta, active.words.len() * 8)?,
            None => None,
        };
        let snapshot_l1 = match change.snapshots.last() {
            Some(new) if change.new_snapshot => table(meta, new.l1_entries as usize * 8)?,
            _ => None,
        };
        let list =
            SnapshotTable::encode(self.storage.name(), &change.snapshots, &self.limits)?.len();
        let list = table(meta, list)?;
        let touched = self.blocks_of(meta, &change.deltas)?;
        let singles = self.take_clusters(meta, touched.len(), held)?;
        let refcount_table = if touched.is_empty() {
            None
        } else {
            // Allocating space may enlarge the table.
            loop {
                let clusters = meta.space.table_clusters;
                let space = self.reserve_table(meta, clusters << self.geometry.cluster_bits)?;
                held.push(space);
                if meta.space.table_clusters == clusters {
                    break Some(space);
                }
            }
        };
        let blocks =
            touched.into_iter().zip(singles).map(|((index, old), new)| (index, old, new)).collect();
        Ok(Places { copies, active_l1, snapshot_l1, list, blocks, refcount_table })
    }

    /// Index and offset of the refcount blocks of all changed clusters.
    fn blocks_of(&self, meta: &Meta, deltas: &Deltas) -> Result<Vec<(usize, u64)>> {
        let mut touched: Vec<(usize, u64)> = Vec::new();
        for (cluster, _) in deltas.iter() {
            let index = meta.space.refcounts.block_index(cluster);
            if touched.last().is_some_and(|&(last, _)| last == index) {
                continue;
            }
            match meta.space.refcounts.table.get(index) {
                Some(&offset) if offset != 0 => touched.push((index, offset)),
                _ => return Err(self.refcount_fault(cluster, 0)),
            }
        }
        Ok(touched)
    }

    /// Reads refcount blocks, applies the changes, and passes each to `use_block` with its index in
    /// the list. Returns the clusters that lose their last reference; they keep a refcount of 1 for
    /// the allocator.
    fn apply_to_blocks(
        &self,
        blocks: &[(usize, u64)],
        deltas: &Deltas,
        monitor: &Monitor<'_>,
        mut use_block: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<Vec<u64>> {
        let geometry = self.geometry;
        let (order, max) = (geometry.refcount_order, geometry.refcount_max());
        let offsets: Vec<u64> = blocks.iter().map(|&(_, offset)| offset).collect();
        let mut freed = Vec::new();
        let mut meter = Meter::new(monitor);
        let mut block = Vec::new();
        reader::for_each_cluster(
            &*self.storage,
            &offsets,
            geometry.cluster_bytes(),
            &mut meter,
            |i, bytes| {
                block.clear();
                block.extend_from_slice(bytes);
                let first = (blocks[i].0 as u64) << geometry.refcount_block_bits();
                let end = first + geometry.refcount_block_entries();
                for (cluster, by) in deltas.within(first..end) {
                    let old = get_refcount(&block, cluster - first, order);
                    let new = i128::from(old) + i128::from(by);
                    if old == 0 || new < 0 {
                        return Err(self.refcount_fault(cluster, old));
                    }
                    if new > i128::from(max) {
                        return Err(self.refcount_overflow());
                    }
                    if new == 0 {
                        freed.push(cluster);
                    }
                    set_refcount(&mut block, cluster - first, order, new.max(1) as u64);
                }
                use_block(i, &block)
            },
        )?;
        Ok(freed)
    }

    fn refcount_fault(&self, cluster: u64, found: u64) -> Error {
        let file = self.storage.name();
        Error::corrupt(
            file,
            cluster << self.geometry.cluster_bits,
            "refcount",
            found.to_string(),
            "as many as there are references",
        )
        .with_remedy(Remedy::REPAIR)
    }

    fn refcount_overflow(&self) -> Error {
        let (bits, max) = (self.geometry.refcount_bits(), self.geometry.refcount_max());
        Error::unsupported(
            self.storage.name(),
            format!(
                "not supported: another snapshot: refcounts of {bits} bits count to {max}, and some \
                 cluster has that many references"
            ),
            "delete a snapshot, or convert to an image with larger refcount_bits",
        )
    }

    /// Writes all new structures, points the header to them, and updates memory.
    fn switch_to(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        mut change: Change,
        places: &Places,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        // From here on the reservations are durable.
        self.flush_locked(meta)?;
        self.write_l2_copies(meta, &change, places, monitor)?;
        let bits = self.geometry.cluster_bits;
        if let Some(active) = &mut change.active {
            for word in &mut active.words {
                if let Some(cluster) = places.copies.get(&(*word & OFFSET_MASK)) {
                    let single = if change.new_snapshot { 0 } else { COPIED };
                    *word = (cluster << bits) | single;
                }
            }
            let raw = encode_words(&active.words);
            if let Some(space) = &places.active_l1 {
                self.write_table(space, &raw)?;
            }
            if let (Some(space), Some(new)) = (&places.snapshot_l1, change.snapshots.last_mut()) {
                new.l1_offset = self.write_table(space, &raw[..new.l1_entries as usize * 8])?;
            }
        }
        let list = SnapshotTable::encode(self.storage.name(), &change.snapshots, &self.limits)?;
        if let Some(space) = &places.list {
            self.write_table(space, &list)?;
        }
        let freed = self.write_blocks(meta, &change, places, monitor)?;
        monitor.cancel.check()?;
        self.point_header(meta, &change, places)?;
        self.install_change(meta, &change, places, freed, list.len() as u64);
        Ok(())
    }

    fn write_l2_copies(
        &self,
        meta: &mut Meta,
        change: &Change,
        places: &Places,
        monitor: &Monitor<'_>,
    ) -> Result<()> {
        let geometry = self.geometry;
        let mut out = Joined::new(&*self.storage);
        reader::for_each_cluster(
            &*self.storage,
            &change.copies,
            geometry.cluster_bytes(),
            &mut Meter::new(monitor),
            |i, bytes| {
                let mut table = bytes.to_vec();
                for words in words_mut(&mut table).chunks_exact_mut(geometry.l2_entry_words()) {
                    let entry = L2Entry::decode(words);
                    if entry.is_compressed() || !entry.has_space(false) {
                        continue;
                    }
                    let word = match change.flags {
                        Flags::Clear => entry.word & !COPIED,
                        Flags::SetSingle => {
                            let cluster = geometry.host_cluster(entry.host());
                            match self.becomes_single(meta, &change.deltas, cluster)? {
                                true => entry.word | COPIED,
                                false => entry.word,
                            }
                        }
                    };
                    words[0].set(word);
                }
                out.write(places.copies[&change.copies[i]] << geometry.cluster_bits, &table)
            },
        )?;
        out.finish()
    }

    /// Whether a cluster's refcount changes to 1.
    pub(super) fn becomes_single(
        &self,
        meta: &mut Meta,
        deltas: &Deltas,
        cluster: u64,
    ) -> Result<bool> {
        let by = deltas.get(cluster);
        if by == 0 {
            return Ok(false);
        }
        let old = meta.space.refcounts.get(cluster, &*self.storage)?;
        Ok(i128::from(old) + i128::from(by) == 1)
    }

    /// Writes the refcount blocks and their table; returns the clusters that become unused.
    fn write_blocks(
        &self,
        meta: &Meta,
        change: &Change,
        places: &Places,
        monitor: &Monitor<'_>,
    ) -> Result<Vec<u64>> {
        let Some(space) = &places.refcount_table else { return Ok(Vec::new()) };
        let blocks: Vec<(usize, u64)> =
            places.blocks.iter().map(|&(index, old, _)| (index, old)).collect();
        let mut out = Joined::new(&*self.storage);
        let freed = self.apply_to_blocks(&blocks, &change.deltas, monitor, |i, bytes| {
            out.write(places.blocks[i].2 << self.geometry.cluster_bits, bytes)
        })?;
        out.finish()?;
        let mut table = meta.space.refcounts.table.clone();
        for &(index, _, new) in &places.blocks {
            table[index] = new << self.geometry.cluster_bits;
        }
        self.write_table(space, &encode_words(&table))?;
        Ok(freed)
    }

    /// Points the header to everything new.
    fn point_header(&self, meta: &mut Meta, change: &Change, places: &Places) -> Result<()> {
        let bits = self.geometry.cluster_bits;
        let table_clusters = meta.space.table_clusters as u32;
        self.switch_tables(meta, |header| {
            if let Some(active) = &change.active {
                header.size.set(active.guest_bytes);
                header.l1_size.set(active.words.len() as u32);
                if let Some(space) = places.active_l1 {
                    header.l1_table_offset.set(space.first << bits);
                }
            }
            if let Some(space) = places.refcount_table {
                header.refcount_table_offset.set(space.first << bits);
                header.refcount_table_clusters.set(table_clusters);
            }
            header.nb_snapshots.set(change.snapshots.len() as u32);
            header.snapshots_offset.set(places.list.map_or(0, |space| space.first << bits));
        })
    }

    /// Updates memory to match the new header, and releases the old tables.
    fn install_change(
        &self,
        meta: &mut Meta,
        change: &Change,
        places: &Places,
        gone: Vec<u64>,
        list_bytes: u64,
    ) {
        let bits = self.geometry.cluster_bits;
        let at = |cluster: u64| HostOffset(cluster << bits);
        if let Some(active) = &change.active {
            self.install_active(meta, active, places);
        }
        for (&old, &new) in &places.copies {
            self.slices.forget(at(new), self.geometry.cluster_bytes());
            self.slices.forget(HostOffset(old), self.geometry.cluster_bytes());
            if change.copies_replace {
                self.retire(meta, old >> bits..(old >> bits) + 1);
            }
        }
        let tables = [places.active_l1, places.list, places.refcount_table];
        {
            let mut metadata = self.metadata.write();
            metadata.extend(tables.iter().flatten().flat_map(|s| s.first..s.first + s.count));
            metadata.extend(places.blocks.iter().map(|&(_, _, new)| new));
            if let Some(space) = places.snapshot_l1 {
                metadata.insert_snapshot_l1(space.first..space.first + space.count);
            }
        }
        if let Some(space) = places.refcount_table {
            let old = self
                .clusters_of(meta.space.refcounts.table_offset, meta.space.table_clusters << bits);
            meta.space.refcounts.table_offset = at(space.first);
            self.retire(meta, old);
        }
        for &(index, old, new) in &places.blocks {
            meta.space.refcounts.forget_block(HostOffset(old));
            meta.space.refcounts.forget_block(at(new));
            meta.space.refcounts.table[index] = new << bits;
            self.retire(meta, old >> bits..(old >> bits) + 1);
        }
        self.retire(meta, self.clusters_of(meta.snapshots.offset, meta.snapshots.bytes));
        meta.snapshots.offset = at(places.list.map_or(0, |space| space.first));
        meta.snapshots.bytes = list_bytes;
        meta.snapshots.count = change.snapshots.len() as u32;
        for clusters in &change.retired {
            self.retire(meta, clusters.clone());
        }
        meta.space.compressed_at = None;
        let gone = gone.into_iter().map(|first| freed(first, 1, true));
        meta.reclaim.release(&self.in_flight, gone);
    }

    fn install_active(&self, meta: &mut Meta, active: &Active, places: &Places) {
        let bits = self.geometry.cluster_bits;
        for cluster in places.copies.values() {
            self.slices.forget(HostOffset(cluster << bits), self.geometry.cluster_bytes());
        }
        let offsets = |words: &[u64]| -> Vec<u64> {
            words.iter().map(|w| (w & OFFSET_MASK) >> bits).filter(|&c| c != 0).collect()
        };
        self.guest_bytes.store(active.guest_bytes, Ordering::Release);
        let old = std::mem::replace(&mut *self.l1.write(), active.words.clone());
        {
            let mut metadata = self.metadata.write();
            for cluster in offsets(&old) {
                // Once no snapshot needs the cluster, it may hold data.
                metadata.remove(cluster);
            }
            metadata.extend(offsets(&active.words));
        }
        let old_bytes = old.len() as u64 * 8;
        let old_offset = match places.active_l1 {
            Some(space) => self.l1_moved(HostOffset(space.first << bits)),
            None => self.l1_offset(),
        };
        self.retire(meta, self.clusters_of(old_offset, old_bytes));
    }
}
