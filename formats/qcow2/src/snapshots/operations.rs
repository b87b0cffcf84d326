//! Snapshot operations of users.

use std::collections::BTreeMap;
use std::sync::Arc;

use vdkit_block::{
    CIPHER_SECTOR_BYTES, Error, Format, HostOffset, Monitor, NewSnapshot, Remedy, Result,
    SnapshotInfo, Snapshots,
};
use vdkit_meta::MutexGuard;

use super::names::{self, First};
use super::rewrite::{Active, Change, Flags};
use super::walk::{Table, Walk};
use super::{Snapshot, SnapshotTable, TablePlace};
use crate::header::DiskTables;
use crate::image::{Meta, Qcow2};
use crate::layout::{COPIED, L1_BYTES_MAX, OFFSET_MASK};
use crate::structures::decode_words;

impl Snapshots for Qcow2 {
    fn list(&self) -> Result<Vec<SnapshotInfo>> {
        Ok(self.read_list(&self.meta.lock())?.snapshots.iter().map(Snapshot::info).collect())
    }

    fn create(&self, new: &NewSnapshot, monitor: &Monitor<'_>) -> Result<SnapshotInfo> {
        names::check(&new.name)?;
        self.need_own_data()?;
        self.exclusively(|meta| self.create_snapshot(meta, new, monitor))
    }

    fn apply(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo> {
        self.need_own_data()?;
        let _admin = self.bitmaps.admin.lock();
        self.exclusively_between(
            |lead| {
                let snapshots = self.read_list(&self.meta.lock())?.snapshots;
                let index = names::find(self.storage.name(), &snapshots, which, First::Id)?;
                let (old, new) = (self.guest_len(), self.size_to_apply(&snapshots[index])?);
                // The new disk may differ from the old one anywhere, so recording bitmaps are
                // marked all dirty before the switch.
                self.mark_bitmaps_dirty(lead)?;
                self.bitmaps_before_resize(old, new)
            },
            |meta| self.apply_snapshot(meta, which, monitor),
            |lead, resizing| self.bitmaps_after_resize(lead, &resizing),
        )
    }

    fn delete(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo> {
        self.need_own_data()?;
        self.exclusively(|meta| self.delete_snapshot(meta, which, monitor))
    }

    fn rename(&self, which: &str, name: &str) -> Result<SnapshotInfo> {
        names::check(name)?;
        self.exclusively(|meta| {
            let mut snapshots = self.load_list(meta)?;
            let index = names::find(self.storage.name(), &snapshots, which, First::Name)?;
            snapshots[index].name = name.as_bytes().to_vec();
            let info = snapshots[index].info();
            let change = Change { snapshots, ..Change::default() };
            self.rewrite(meta, change, &Monitor::default())?;
            Ok(info)
        })
    }

    fn view(&self, which: &str) -> Result<Arc<dyn Format>> {
        self.need_own_data()?;
        let snapshots = self.read_list(&self.meta.lock())?.snapshots;
        let index = names::find(self.storage.name(), &snapshots, which, First::Id)?;
        let snapshot = &snapshots[index];
        self.check_snapshot(snapshot)?;
        Ok(self.reading(DiskTables {
            l1_offset: snapshot.l1_offset,
            l1_entries: snapshot.l1_entries,
            guest_bytes: snapshot.disk_bytes.unwrap_or_else(|| self.guest_len()),
        })?)
    }
}

impl Qcow2 {
    fn need_own_data(&self) -> Result<()> {
        if !self.has_data_file() {
            return Ok(());
        }
        Err(Error::unsupported(
            self.storage.name(),
            "not supported: snapshots in an image with a data file",
            "its data is written in place: convert to an image without one, or make an overlay",
        ))
    }

    /// Adds the sizes of disk and VM state to each snapshot, which version 2 entries may lack.
    pub(crate) fn complete_snapshots(&self) -> Result<()> {
        self.exclusively(|meta| {
            let mut snapshots = self.load_list(meta)?;
            let guest_bytes = self.guest_len();
            snapshots.iter_mut().for_each(|snapshot| snapshot.complete(guest_bytes));
            let change = Change { snapshots, ..Change::default() };
            self.rewrite(meta, change, &Monitor::default())
        })
    }

    fn read_list(&self, meta: &Meta) -> Result<SnapshotTable> {
        let place = TablePlace { count: meta.snapshots.count, offset: meta.snapshots.offset };
        SnapshotTable::read(&*self.storage, place, &self.limits)
    }

    fn load_list(&self, meta: &Meta) -> Result<Vec<Snapshot>> {
        Ok(self.read_list(meta)?.snapshots)
    }

    fn create_snapshot(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        new: &NewSnapshot,
        monitor: &Monitor<'_>,
    ) -> Result<SnapshotInfo> {
        let mut snapshots = self.load_list(meta)?;
        let guest_bytes = self.guest_len();
        let mut words = self.l1.read().clone();
        // Entries beyond the disk are VM state that an applied snapshot left; the new snapshot does
        // not include it.
        let kept = words.len().min(self.geometry.l1_entries_for(guest_bytes) as usize);
        let mut walk = Walk::new(self, meta)?;
        let offsets = walk.tables(self.l1_offset(), &words[..kept])?;
        let tables: Vec<Table> = offsets.iter().map(|&offset| Table { offset, by: 1 }).collect();
        let copies = walk.count(&tables, monitor)?;
        for &copied in &copies {
            // Both the disk and the snapshot refer to the new table.
            walk.uncount(copied, 1)?;
        }
        for word in &mut words[..kept] {
            *word &= !COPIED;
        }
        let snapshot = Snapshot {
            l1_offset: HostOffset(0),
            l1_entries: kept as u32,
            id: names::new_id(self.storage.name(), &snapshots)?,
            name: new.name.as_bytes().to_vec(),
            date_seconds: new.date_seconds,
            date_nanoseconds: new.date_nanoseconds,
            disk_bytes: Some(guest_bytes),
            extra: Snapshot::new_extra(guest_bytes),
            ..Snapshot::default()
        };
        let info = snapshot.info();
        snapshots.push(snapshot);
        let change = Change {
            deltas: walk.deltas,
            counts_released: true,
            copies,
            copies_replace: true,
            active: Some(Active { words, guest_bytes }),
            new_snapshot: true,
            snapshots,
            ..Change::default()
        };
        self.rewrite(meta, change, monitor)?;
        Ok(info)
    }

    fn apply_snapshot(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        which: &str,
        monitor: &Monitor<'_>,
    ) -> Result<SnapshotInfo> {
        let snapshots = self.load_list(meta)?;
        let index = names::find(self.storage.name(), &snapshots, which, First::Id)?;
        let snapshot = &snapshots[index];
        let info = snapshot.info();
        let guest_bytes = self.size_to_apply(snapshot)?;
        let mut words = self.snapshot_words(snapshot)?;
        let mut walk = Walk::new(self, meta)?;
        let mut tables = BTreeMap::new();
        for offset in walk.tables(self.l1_offset(), &self.l1.read())? {
            *tables.entry(offset).or_insert(0) -= 1;
        }
        for offset in walk.tables(snapshot.l1_offset, &words)? {
            *tables.entry(offset).or_insert(0) += 1;
        }
        // Tables that both use stay unchanged.
        let tables: Vec<Table> = tables
            .into_iter()
            .filter(|&(_, by)| by != 0)
            .map(|(offset, by)| Table { offset, by })
            .collect();
        let mut copies = walk.count(&tables, monitor)?;
        copies.retain(|copy| {
            tables.binary_search_by_key(copy, |t| t.offset).is_ok_and(|i| tables[i].by > 0)
        });
        for &copied in &copies {
            walk.uncount(copied, 1)?;
        }
        for word in &mut words {
            *word &= OFFSET_MASK;
        }
        let entries = self.geometry.l1_entries_for(guest_bytes) as usize;
        words.resize(words.len().max(entries), 0);
        let change = Change {
            deltas: walk.deltas,
            counts_released: true,
            copies,
            active: Some(Active { words, guest_bytes }),
            snapshots,
            ..Change::default()
        };
        self.rewrite(meta, change, monitor)?;
        Ok(info)
    }

    /// Checks that a snapshot's L1 table can be read, and that a disk can have its size.
    fn check_snapshot(&self, snapshot: &Snapshot) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        let bytes = u64::from(snapshot.l1_entries) * 8;
        let (offset, file_len) = (snapshot.l1_offset.0, self.storage.len()?);
        let end = offset.checked_add(bytes);
        let placed = offset & (cluster - 1) == 0 && end.is_some_and(|end| end <= file_len);
        let size = snapshot.disk_bytes.unwrap_or(0);
        let whole = self.encryption.is_none() || size.is_multiple_of(CIPHER_SECTOR_BYTES);
        let fits = whole
            && size <= i64::MAX as u64 - cluster
            && self.geometry.l1_entries_for(size).saturating_mul(8) <= L1_BYTES_MAX;
        if fits && (bytes == 0 || (offset != 0 && bytes <= L1_BYTES_MAX && placed)) {
            return Ok(());
        }
        let file = self.storage.name();
        Err(Error::corrupt(
            file,
            offset,
            "snapshot L1 table",
            format!(
                "snapshot '{}' of a disk of {size} bytes with an L1 table of {bytes} bytes at \
                 {offset:#x}",
                String::from_utf8_lossy(&snapshot.name)
            ),
            "a possible size, and an L1 table at a cluster boundary within the file",
        )
        .with_remedy(Remedy::Check))
    }

    /// The disk size after applying a snapshot.
    fn size_to_apply(&self, snapshot: &Snapshot) -> Result<u64> {
        self.check_snapshot(snapshot)?;
        let present = self.guest_len();
        let size = snapshot.disk_bytes.unwrap_or(present);
        if size != present && self.header.version() < 3 {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: applying a snapshot of another size in a version 2 image",
                "the sizes of its snapshots need not be recorded; convert to compat=1.1",
            ));
        }
        Ok(size)
    }

    fn snapshot_words(&self, snapshot: &Snapshot) -> Result<Vec<u64>> {
        self.check_snapshot(snapshot)?;
        let mut raw = vec![0; snapshot.l1_entries as usize * 8];
        self.storage.read_at(&mut raw, snapshot.l1_offset)?;
        Ok(decode_words(&raw))
    }

    fn delete_snapshot(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        which: &str,
        monitor: &Monitor<'_>,
    ) -> Result<SnapshotInfo> {
        let mut snapshots = self.load_list(meta)?;
        let index = names::find(self.storage.name(), &snapshots, which, First::Name)?;
        let snapshot = snapshots.remove(index);
        let words = self.snapshot_words(&snapshot)?;
        let mut walk = Walk::new(self, meta)?;
        let offsets = walk.tables(snapshot.l1_offset, &words)?;
        let tables: Vec<Table> = offsets.iter().map(|&offset| Table { offset, by: -1 }).collect();
        walk.count(&tables, monitor)?;
        let l1 = self.clusters_of(snapshot.l1_offset, words.len() as u64 * 8);
        self.check_own(meta, &walk, &snapshot, l1.clone())?;

        let mut active = self.l1.read().clone();
        let used = walk.tables(self.l1_offset(), &active)?;
        let (geometry, deltas) = (self.geometry, &walk.deltas);
        let copies = walk.find(&used, monitor, |entry| {
            if entry.is_compressed() || entry.is_copied() || !entry.has_space(false) {
                return Ok(false);
            }
            self.becomes_single(meta, deltas, geometry.host_cluster(entry.host()))
        })?;
        let mut changed = !copies.is_empty();
        for word in active.iter_mut().filter(|word| **word & OFFSET_MASK != 0) {
            let table = geometry.host_cluster(HostOffset(*word & OFFSET_MASK));
            if self.becomes_single(meta, deltas, table)? {
                *word |= COPIED;
                changed = true;
            }
        }
        let guest_bytes = self.guest_len();
        let change = Change {
            deltas: walk.deltas,
            counts_released: true,
            copies,
            copies_replace: true,
            flags: Flags::SetSingle,
            active: changed.then_some(Active { words: active, guest_bytes }),
            retired: vec![l1],
            snapshots,
            ..Change::default()
        };
        self.rewrite(meta, change, monitor)?;
        Ok(snapshot.info())
    }

    /// Fails unless the snapshot alone uses the clusters of its L1 table.
    fn check_own(
        &self,
        meta: &mut Meta,
        walk: &Walk<'_>,
        snapshot: &Snapshot,
        clusters: std::ops::Range<u64>,
    ) -> Result<()> {
        for cluster in clusters {
            let refcount = meta.space.refcounts.get(cluster, &*self.storage)?;
            if refcount != 1 || walk.deltas.get(cluster) != 0 || walk.is_metadata(cluster) {
                return Err(walk.fault(
                    snapshot.l1_offset.0,
                    "snapshot L1 table",
                    format!("a cluster with refcount {refcount}, or one that is used otherwise"),
                    "clusters of its own",
                ));
            }
        }
        Ok(())
    }
}
