//! Walks the entries of all L2 tables, including those of snapshots, to find compressed ones.

use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Limits, Monitor, Result, Storage};

use crate::entry::L2Entry;
use crate::header::Header;
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK};
use crate::snapshots::{SnapshotTable, TablePlace};
use crate::structures::words;

/// The L2 tables of an image.
pub(super) struct Tables<'a> {
    storage: &'a dyn Storage,
    header: Header,
    limits: Limits,
    pub(super) snapshots: SnapshotTable,
}

impl<'a> Tables<'a> {
    pub(super) fn read(storage: &'a dyn Storage, header: &Header, limits: &Limits) -> Result<Self> {
        let snapshots = SnapshotTable::read(storage, TablePlace::of(header), limits)?;
        Ok(Self { storage, header: header.clone(), limits: *limits, snapshots })
    }

    pub(super) fn file(&self) -> &str {
        self.storage.name()
    }

    /// Whether the disk or a snapshot has compressed clusters.
    pub(super) fn any_compressed(&self, monitor: &Monitor<'_>) -> Result<bool> {
        let mut seen = FxHashSet::default();
        let active = (self.header.l1_offset, self.header.l1_entries);
        let snapshots = self.snapshots.snapshots.iter().map(|s| (s.l1_offset, s.l1_entries));
        for (at, entries) in std::iter::once(active).chain(snapshots) {
            if self.in_l1(at, entries, &mut seen, monitor)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn in_l1(
        &self,
        at: HostOffset,
        entries: u32,
        seen: &mut FxHashSet<u64>,
        monitor: &Monitor<'_>,
    ) -> Result<bool> {
        let bytes = u64::from(entries) * 8;
        let limit = self.limits.table_bytes_max.min(L1_BYTES_MAX);
        if bytes > limit {
            let file = self.storage.name().to_owned();
            return Err(Error::Limit { file, what: "an L1 table in bytes", found: bytes, limit });
        }
        let mut l1 = vec![0; bytes as usize];
        self.storage.read_at(&mut l1, at)?;
        let mut table = vec![0; self.header.geometry.cluster_bytes() as usize];
        for entry in words(&l1) {
            let offset = entry.get() & OFFSET_MASK;
            if offset == 0 || !seen.insert(offset) {
                continue;
            }
            monitor.cancel.check()?;
            self.storage.read_padded(&mut table, HostOffset(offset))?;
            if L2Entry::all(&table, &self.header.geometry).any(L2Entry::is_compressed) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
