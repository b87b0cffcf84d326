//! A walk over the entries of all L2 tables, those of snapshots too.

use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Limits, Monitor, Result, Storage};

use crate::entry::L2Entry;
use crate::header::Header;
use crate::layout::{L1_BYTES_MAX, OFFSET_MASK, ZERO};
use crate::snapshots::SnapshotTable;

/// Where the L2 tables of an image are.
pub(super) struct Tables<'a> {
    storage: &'a dyn Storage,
    header: Header,
    limits: Limits,
    /// The snapshots.
    pub(super) snapshots: SnapshotTable,
}

/// What is looked for in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Find {
    /// Compressed clusters.
    Compressed,
    /// Clusters with a zero flag (of standard entries).
    Zero,
}

impl<'a> Tables<'a> {
    pub(super) fn read(storage: &'a dyn Storage, header: &Header, limits: &Limits) -> Result<Self> {
        let snapshots = SnapshotTable::read(storage, header, limits)?;
        Ok(Self { storage, header: header.clone(), limits: *limits, snapshots })
    }

    pub(super) fn file(&self) -> &str {
        self.storage.name()
    }

    /// Whether the active disk has such an entry.
    pub(super) fn in_active(&self, find: Find, monitor: &Monitor<'_>) -> Result<bool> {
        let mut seen = FxHashSet::default();
        self.in_l1(self.header.l1_offset, self.header.l1_entries, find, &mut seen, monitor)
    }

    /// The name of a snapshot that has such an entry.
    pub(super) fn in_snapshots(&self, find: Find, monitor: &Monitor<'_>) -> Result<Option<String>> {
        let mut seen = FxHashSet::default();
        for snapshot in &self.snapshots.snapshots {
            let (at, entries) = (snapshot.l1_offset, snapshot.l1_entries);
            if self.in_l1(at, entries, find, &mut seen, monitor)? {
                return Ok(Some(String::from_utf8_lossy(&snapshot.name).into_owned()));
            }
        }
        Ok(None)
    }

    fn in_l1(
        &self,
        at: HostOffset,
        entries: u32,
        find: Find,
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
            if self.in_table(&table, find) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn in_table(&self, table: &[u8], find: Find) -> bool {
        let step = self.header.geometry.l2_entry_bytes() as usize;
        table.chunks_exact(step).any(|bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[..8]);
            let entry = L2Entry { word: u64::from_be_bytes(word), bitmap: 0 };
            match find {
                Find::Compressed => entry.is_compressed(),
                Find::Zero => !entry.is_compressed() && entry.word & ZERO != 0,
            }
        })
    }
}
