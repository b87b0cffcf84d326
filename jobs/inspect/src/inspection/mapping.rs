//! The L1 and L2 tables of a qcow2 image: references outside the file, and the amount of data.
//!
//! Each L2 table is read once, even if many L1 entries refer to it (which lets a small file hold a
//! large disk).

use std::collections::HashMap;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_qcow2::entry::L2Entry;
use vdkit_qcow2::header::Header;
use vdkit_qcow2::layout::{COMPRESSED, OFFSET_MASK};

/// Bytes per read of the L1 table.
const CHUNK_BYTES: u64 = 1 << 20;
/// Maximum references outside the file that are reported individually.
const OUTSIDE_REPORTED: usize = 4;

/// Result of reading the mapping.
#[derive(Clone, Debug, Default)]
pub(super) struct Mapping {
    /// Guest clusters with data, including compressed ones; aliases count each time.
    pub(super) clusters: u64,
    /// Entries that refer outside the file.
    pub(super) outside: u64,
    /// The first of them: offset of the entry, and its target.
    pub(super) first_outside: Vec<(u64, u64)>,
}

impl Mapping {
    fn note_outside(&mut self, at: u64, to: u64) {
        self.outside += 1;
        if self.first_outside.len() < OUTSIDE_REPORTED {
            self.first_outside.push((at, to));
        }
    }

    /// Reads all tables of the active disk.
    pub(super) fn read(storage: &dyn Storage, header: &Header, file_len: u64) -> Result<Self> {
        let mut mapping = Self::default();
        let mut seen: HashMap<u64, u64> = HashMap::new();
        let needed = header.geometry.l1_entries_for(header.guest_bytes);
        let total = needed.min(header.l1_entries.into()) * 8;
        let mut done = 0;
        while done < total {
            let start = header.l1_offset + done;
            let mut chunk = vec![0; CHUNK_BYTES.min(total - done) as usize];
            storage.read_padded(&mut chunk, start)?;
            for (index, raw) in chunk.chunks_exact(8).enumerate() {
                let entry = u64::from_be_bytes(raw.try_into().unwrap_or_default());
                let (at, table) = (start.0 + index as u64 * 8, entry & OFFSET_MASK);
                if table == 0 {
                    continue;
                }
                if table >= file_len {
                    mapping.note_outside(at, table);
                    continue;
                }
                let clusters = match seen.get(&table) {
                    Some(&clusters) => clusters,
                    None => {
                        let clusters = mapping.table(storage, header, file_len, table)?;
                        seen.insert(table, clusters);
                        clusters
                    }
                };
                mapping.clusters = mapping.clusters.saturating_add(clusters);
            }
            done += chunk.len() as u64;
        }
        Ok(mapping)
    }

    /// Counts the data clusters of one L2 table.
    fn table(
        &mut self,
        storage: &dyn Storage,
        header: &Header,
        file_len: u64,
        at: u64,
    ) -> Result<u64> {
        let geometry = &header.geometry;
        let mut bytes = vec![0; geometry.cluster_bytes() as usize];
        storage.read_padded(&mut bytes, HostOffset(at))?;
        let mut clusters = 0;
        for (index, entry) in L2Entry::all(&bytes, geometry).enumerate() {
            if entry.word & (COMPRESSED | OFFSET_MASK) == 0 {
                continue;
            }
            let (HostOffset(host), _) = entry.named_bytes(geometry);
            // The data file's length is not known here.
            let outside = host >= file_len && !header.has_data_file();
            if outside {
                self.note_outside(at + index as u64 * geometry.l2_entry_bytes(), host);
            } else {
                clusters += 1;
            }
        }
        Ok(clusters)
    }
}
