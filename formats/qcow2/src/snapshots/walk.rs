//! Counts the references of L1 tables.

use vdkit_block::{Error, HostOffset, Monitor, Remedy, Result, require_within};

use super::deltas::Deltas;
use crate::check::reader::{self, Meter};
use crate::entry::L2Entry;
use crate::image::{Meta, Qcow2};
use crate::layout::{L1_RESERVED, OFFSET_MASK};
use crate::metadata::Metadata;

/// An L2 table, and the change of the number of references to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) offset: u64,
    /// Change of the references to everything that it names.
    pub(super) by: i32,
}

/// State of a walk over L2 tables.
pub(super) struct Walk<'a> {
    image: &'a Qcow2,
    /// No host cluster from here on can be referred to.
    end: u64,
    /// Clusters that hold metadata: no L2 entry may name one.
    metadata: Metadata,
    pub(super) deltas: Deltas,
}

impl<'a> Walk<'a> {
    /// Starts with the released clusters that wait for in-flight requests: their references are
    /// gone, so new refcounts and COPIED flags must not count them.
    pub(super) fn new(image: &'a Qcow2, meta: &Meta) -> Result<Self> {
        let file = image.storage.len()?.div_ceil(image.geometry.cluster_bytes());
        // A file that grows as it is written may end before the reserved clusters.
        let end = file.max(image.frontier());
        let metadata = image.metadata.read().clone();
        let mut walk = Self { image, end, metadata, deltas: Deltas::default() };
        for run in meta.reclaim.released() {
            for cluster in run.first..run.first + run.count {
                walk.add(cluster, -1, cluster << image.geometry.cluster_bits)?;
            }
        }
        Ok(walk)
    }

    /// The L2 tables of an L1 table, sorted, without duplicates.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if an entry violates the specification. `at` is the table's offset.
    pub(super) fn tables(&self, at: HostOffset, words: &[u64]) -> Result<Vec<u64>> {
        let cluster = self.image.geometry.cluster_bytes();
        let mut tables = Vec::new();
        for (index, &word) in words.iter().enumerate() {
            let offset = word & OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            let wrong = word & L1_RESERVED != 0 || offset & (cluster - 1) != 0;
            if wrong || offset / cluster >= self.end {
                return Err(self.fault(
                    at.0 + index as u64 * 8,
                    "L1 entry",
                    format!("{word:#018x}"),
                    "an L2 table at a cluster boundary within the file",
                ));
            }
            tables.push(offset);
        }
        tables.sort_unstable();
        if let Some(pair) = tables.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.fault(
                at.0,
                "L1 table",
                format!("the L2 table at {:#x} twice", pair[0]),
                "each L2 table once",
            ));
        }
        Ok(tables)
    }

    /// Counts the references of these tables (sorted) and of their entries.
    ///
    /// Returns the tables that have an entry with COPIED set.
    pub(super) fn count(&mut self, tables: &[Table], monitor: &Monitor<'_>) -> Result<Vec<u64>> {
        let offsets: Vec<u64> = tables.iter().map(|t| t.offset).collect();
        let mut copied = Vec::new();
        let image = self.image;
        for table in tables {
            self.add(table.offset >> image.geometry.cluster_bits, table.by, table.offset)?;
        }
        reader::for_each_cluster(
            &*image.storage,
            &offsets,
            image.geometry.cluster_bytes(),
            &mut Meter::new(monitor),
            |i, bytes| {
                if self.count_entries(tables[i], bytes)? {
                    copied.push(tables[i].offset);
                }
                self.check_limit()
            },
        )?;
        Ok(copied)
    }

    /// Counts one table's entries. Returns whether one of them has COPIED set.
    fn count_entries(&mut self, table: Table, bytes: &[u8]) -> Result<bool> {
        let geometry = self.image.geometry;
        let mut copied = false;
        for (index, entry) in L2Entry::all(bytes, &geometry).enumerate() {
            if entry == L2Entry::default() {
                continue;
            }
            let version = self.image.header.version();
            if let Some(expected) = entry.fault(&geometry, version, false) {
                let table = HostOffset(table.offset);
                return Err(self.image.entry_fault(table, index as u64, entry.word, expected));
            }
            let at = table.offset + index as u64 * geometry.l2_entry_bytes();
            if !entry.is_compressed() && !entry.has_space(false) {
                continue;
            }
            copied |= !entry.is_compressed() && entry.is_copied();
            let (offset, bytes) = entry.named_bytes(&geometry);
            let (first, last) =
                (geometry.host_cluster(offset), geometry.host_cluster(offset + (bytes - 1)));
            for cluster in first..=last {
                if cluster >= self.end || self.metadata.contains(cluster) {
                    return Err(self.fault(
                        at,
                        "L2 entry",
                        format!("{:#018x}", entry.word),
                        "data within the file, in clusters that hold no metadata",
                    ));
                }
                self.add(cluster, table.by, at)?;
            }
        }
        Ok(copied)
    }

    /// L2 tables among `tables` (sorted) with an entry for which `asked` is true.
    pub(super) fn find(
        &self,
        tables: &[u64],
        monitor: &Monitor<'_>,
        mut asked: impl FnMut(L2Entry) -> Result<bool>,
    ) -> Result<Vec<u64>> {
        let (mut found, image) = (Vec::new(), self.image);
        reader::for_each_cluster(
            &*image.storage,
            tables,
            image.geometry.cluster_bytes(),
            &mut Meter::new(monitor),
            |i, bytes| {
                for entry in L2Entry::all(bytes, &image.geometry) {
                    if asked(entry)? {
                        found.push(tables[i]);
                        break;
                    }
                }
                Ok(())
            },
        )?;
        Ok(found)
    }

    /// Undoes counted references to an L2 table.
    pub(super) fn uncount(&mut self, table: u64, times: i32) -> Result<()> {
        self.add(table >> self.image.geometry.cluster_bits, -times, table)
    }

    /// Whether a cluster holds metadata of the active disk or of the image.
    pub(super) fn is_metadata(&self, cluster: u64) -> bool {
        self.metadata.live().contains(&cluster)
    }

    fn add(&mut self, cluster: u64, by: i32, at: u64) -> Result<()> {
        self.deltas.add(cluster, by).ok_or_else(|| {
            let found = format!("more than 2^31 references to cluster {cluster}");
            self.fault(at, "L2 table", found, "a few references to each cluster")
        })
    }

    /// Fails once the numbers take more memory than a check may: entries all over a sparse file
    /// would fill it.
    fn check_limit(&self) -> Result<()> {
        let (found, limit) = (self.deltas.bytes(), self.image.limits.check_bytes_max);
        let what = "the memory to count references in bytes";
        require_within(self.image.storage.name(), what, found, limit)
    }

    pub(super) fn fault(
        &self,
        at: u64,
        what: &'static str,
        found: String,
        expected: &str,
    ) -> Error {
        let file = self.image.storage.name();
        Error::corrupt(file, at, what, found, expected).with_remedy(Remedy::Check)
    }
}
