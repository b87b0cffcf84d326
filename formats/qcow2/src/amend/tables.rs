//! Walks the entries of all L2 tables, including those of snapshots, to find compressed ones.

use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Limits, Monitor, Result, Storage};

use crate::entry::L2Entry;
use crate::header::Header;
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK};
use crate::snapshots::{SnapshotTable, TablePlace};

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
        for word in l1.as_chunks::<8>().0 {
            let offset = u64::from_be_bytes(*word) & OFFSET_MASK;
            if offset == 0 || !seen.insert(offset) {
                continue;
            }
            monitor.cancel.check()?;
            self.storage.read_padded(&mut table, HostOffset(offset))?;
            if self.in_table(&table) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn in_table(&self, table: &[u8]) -> bool {
        let step = self.header.geometry.l2_entry_bytes() as usize;
        table.chunks_exact(step).any(|bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[..8]);
            L2Entry { word: u64::from_be_bytes(word), bitmap: 0 }.is_compressed()
        })
    }
}
