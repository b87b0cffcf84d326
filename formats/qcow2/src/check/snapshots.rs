//! The snapshot table: its content, its faults, and how it is rewritten.
//!
//! Source: qcow2 specification, section "Snapshots".

use vdkit_block::{HostOffset, Result};

use super::findings::Findings;
use super::image::Image;
use crate::header::field;
use crate::layout::{self, SNAPSHOTS_MAX};

const FIXED_BYTES: usize = 40;
/// Extra data that each version 3 entry must have: large VM state size and disk size.
const EXTRA_BYTES_MIN: usize = 16;
/// Largest accepted extra data (QEMU's bound).
const EXTRA_BYTES_MAX: usize = 1024;
/// Largest accepted table in bytes (QEMU's bound).
const TABLE_BYTES_MAX: u64 = 1024 * SNAPSHOTS_MAX as u64;

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    /// Host offset of its L1 table.
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u32,
    /// Its L1 table cannot be where the entry says.
    pub(super) lost: bool,
    /// The corrected entry, without padding.
    encoded: Vec<u8>,
}

impl Snapshot {
    pub(super) fn l1_bytes(&self) -> u64 {
        u64::from(self.l1_entries) * 8
    }

    /// Bytes of its entry in a sound table, up to the next one.
    pub(super) fn entry_bytes(&self) -> u64 {
        (self.encoded.len() as u64).next_multiple_of(8)
    }

    /// Sets another offset of the L1 table.
    pub(super) fn move_l1(&mut self, offset: u64) {
        self.l1_offset = offset;
        self.encoded[..8].copy_from_slice(&offset.to_be_bytes());
    }
}

#[derive(Debug, Default)]
pub(super) struct SnapshotTable {
    /// The readable snapshots.
    pub(super) snapshots: Vec<Snapshot>,
    /// Bytes of the table in the file.
    pub(super) bytes: u64,
    /// The table must be rewritten.
    pub(super) rewrite: bool,
    /// Some snapshots, or all, could not be read.
    pub(super) cut_short: bool,
}

impl SnapshotTable {
    /// Reads the table. If an entry cannot be read, it and all later ones are lost.
    pub(super) fn read(image: &Image, findings: &mut Findings) -> Result<Self> {
        let header = &image.header;
        let mut table = Self::default();
        // With a bad pointer in the header, there is nothing to read or keep.
        let pointer = field::SNAPSHOTS..field::SNAPSHOTS + 12;
        table.rewrite = image.header_faults.iter().any(|f| pointer.contains(&f.offset));
        table.cut_short = table.rewrite;
        let offset = header.snapshots_offset.0;
        if header.snapshot_count == 0
            && (offset & (image.cluster_bytes() - 1) != 0 || offset >= layout::HOST_OFFSET_END)
        {
            // QEMU does not open such an image.
            table.rewrite = true;
            findings.corruption(field::SNAPSHOTS + 4, "snapshot table offset", || {
                format!("found {offset:#x} with no snapshots, expected 0")
            });
        }
        let mut window = Window { image, start: 0, bytes: Vec::new() };
        for index in 0..header.snapshot_count {
            let offset = header.snapshots_offset.0 + table.bytes;
            match Self::read_entry(image, &mut window, offset)? {
                Ok((snapshot, bytes, faults)) => {
                    for fault in faults {
                        table.rewrite = true;
                        findings.corruption(offset, "snapshot table entry", || fault);
                    }
                    table.snapshots.push(snapshot);
                    table.bytes += bytes;
                }
                Err(message) => {
                    table.rewrite = true;
                    table.cut_short = true;
                    let lost = header.snapshot_count - index;
                    findings.corruption(offset, "snapshot table entry", || {
                        format!("{message}; {lost} snapshots from here on are lost")
                    });
                    break;
                }
            }
        }
        if header.has_data_file() && header.snapshot_count > 0 {
            findings.corruption(field::SNAPSHOTS, "snapshot table", || {
                format!(
                    "found {} snapshots, expected none in an image with a data file (cannot be \
                     repaired: their data is not kept)",
                    header.snapshot_count
                )
            });
        }
        Ok(table)
    }

    #[allow(clippy::type_complexity)]
    fn read_entry(
        image: &Image,
        window: &mut Window<'_>,
        offset: u64,
    ) -> Result<Result<(Snapshot, u64, Vec<String>), String>> {
        let room = TABLE_BYTES_MAX - (offset - image.header.snapshots_offset.0);
        let Some(fixed) = window.get(offset, FIXED_BYTES as u64, room)? else {
            return Ok(Err("found the end of the file or a table that is too long".to_owned()));
        };
        let mut encoded = fixed.to_vec();
        let be32 = |at: usize| {
            u32::from_be_bytes([encoded[at], encoded[at + 1], encoded[at + 2], encoded[at + 3]])
        };
        let be16 = |at: usize| u16::from_be_bytes([encoded[at], encoded[at + 1]]);
        let l1_offset = u64::from(be32(0)) << 32 | u64::from(be32(4));
        let l1_entries = be32(8);
        let extra = u64::from(be32(36));
        let names = u64::from(be16(12)) + u64::from(be16(14));
        if be16(12) == 0 {
            // No writer creates these; zeroes after a shorter table look like them.
            return Ok(Err("found an entry without an id".to_owned()));
        }
        let Some(rest) = window.get(offset + FIXED_BYTES as u64, extra + names, room)? else {
            return Ok(Err(format!(
                "found {extra} bytes of extra data and {names} bytes of names, which pass the end \
                 of the file or of the largest table"
            )));
        };
        let (extra_data, names) = rest.split_at(extra as usize);
        let kept = &extra_data[..extra_data.len().min(EXTRA_BYTES_MAX)];
        let mut faults = Vec::new();
        encoded.extend_from_slice(kept);
        if extra_data.len() > EXTRA_BYTES_MAX {
            faults.push(format!("found {extra} bytes of extra data, expected at most 1024"));
        }
        if image.header.version >= 3 && kept.len() < EXTRA_BYTES_MIN {
            faults.push(format!("found {extra} bytes of extra data, expected at least 16"));
            fill_extra(&mut encoded, image.header.guest_bytes);
        }
        let kept = (encoded.len() - FIXED_BYTES) as u32;
        encoded[36..40].copy_from_slice(&kept.to_be_bytes());
        encoded.extend_from_slice(names);
        let bytes = (FIXED_BYTES as u64 + rest.len() as u64).next_multiple_of(8);

        let lost = l1_fault(image, l1_offset, l1_entries);
        if let Some(fault) = &lost {
            faults.push(format!(
                "snapshot '{}': {fault}; the snapshot is lost",
                String::from_utf8_lossy(names)
            ));
        }
        let lost = lost.is_some();
        Ok(Ok((Snapshot { l1_offset, l1_entries, lost, encoded }, bytes, faults)))
    }

    /// The bytes of a table of these snapshots.
    pub(super) fn encode<'a>(snapshots: impl Iterator<Item = &'a Snapshot>) -> Vec<u8> {
        let mut table = Vec::new();
        for snapshot in snapshots {
            table.resize(table.len().next_multiple_of(8), 0);
            table.extend_from_slice(&snapshot.encoded);
        }
        table
    }
}

/// Extends the extra data to what version 3 requires.
fn fill_extra(encoded: &mut Vec<u8>, guest_bytes: u64) {
    let have = encoded.len() - FIXED_BYTES;
    let mut full = [0; EXTRA_BYTES_MIN];
    if have < 8 {
        // Without the large field, the 32-bit field of the fixed part holds the VM state size.
        full[4..8].copy_from_slice(&encoded[32..36]);
    } else {
        full[..8].copy_from_slice(&encoded[FIXED_BYTES..FIXED_BYTES + 8]);
    }
    full[8..].copy_from_slice(&guest_bytes.to_be_bytes());
    encoded.truncate(FIXED_BYTES);
    encoded.extend_from_slice(&full);
}

fn l1_fault(image: &Image, offset: u64, entries: u32) -> Option<String> {
    let bytes = u64::from(entries) * 8;
    if bytes > layout::L1_BYTES_MAX {
        return Some(format!("found an L1 table of {entries} entries, expected at most 4194304"));
    }
    let aligned = offset & (image.cluster_bytes() - 1) == 0;
    if !aligned || (bytes > 0 && (offset == 0 || !image.in_file(offset, bytes))) {
        return Some(format!(
            "found an L1 table of {bytes} bytes at {offset:#x}, expected one at a cluster boundary \
             within the file"
        ));
    }
    None
}

/// A buffered view of the file for many small adjacent reads.
struct Window<'a> {
    image: &'a Image,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    const BYTES: u64 = 64 << 10;

    /// Bytes of the file; `None` if they exceed its end or `room`.
    fn get(&mut self, offset: u64, bytes: u64, room: u64) -> Result<Option<&[u8]>> {
        let end = offset + bytes;
        if bytes > room || end > self.image.file_len {
            return Ok(None);
        }
        if offset < self.start || end > self.start + self.bytes.len() as u64 {
            self.start = offset;
            self.bytes.resize(bytes.max(Self::BYTES) as usize, 0);
            self.image.storage.read_padded(&mut self.bytes, HostOffset(offset))?;
        }
        let at = (offset - self.start) as usize;
        Ok(Some(&self.bytes[at..at + bytes as usize]))
    }
}
