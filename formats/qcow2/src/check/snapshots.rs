//! The snapshot table: its content, its faults, and how it is rewritten.
//!
//! Source: qcow2 specification, section "Snapshots".

use std::mem::offset_of;

use vdkit_block::{HostOffset, Result};
use zerocopy::IntoBytes;

use super::findings::Findings;
use super::image::Image;
use crate::layout;
use crate::snapshots::{EXTRA_BYTES_MAX, TABLE_BYTES_MAX};
use crate::structures::{SnapshotExtraData, SnapshotTableEntry, header_offset, padded};

const FIXED_BYTES: usize = size_of::<SnapshotTableEntry>();
/// Extra data that each version 3 entry must have: large VM state size and disk size.
const EXTRA_BYTES_MIN: usize = offset_of!(SnapshotExtraData, icount);

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    /// Host offset of its L1 table.
    pub(super) l1_offset: u64,
    pub(super) l1_entries: u32,
    /// Its L1 table cannot be where the entry says.
    pub(super) lost: bool,
    /// The corrected entry; its L1 table may have moved.
    entry: SnapshotTableEntry,
    /// Extra data, ID and name.
    variable: Vec<u8>,
}

impl Snapshot {
    pub(super) fn l1_bytes(&self) -> u64 {
        u64::from(self.l1_entries) * 8
    }

    /// Bytes of its entry in a sound table, up to the next one.
    pub(super) fn entry_bytes(&self) -> u64 {
        ((FIXED_BYTES + self.variable.len()) as u64).next_multiple_of(8)
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
        let pointer = header_offset!(nb_snapshots)..header_offset!(incompatible_features);
        table.rewrite = image.header_faults.iter().any(|f| pointer.contains(&f.offset));
        table.cut_short = table.rewrite;
        let offset = header.snapshots_offset.0;
        if header.snapshot_count == 0
            && (offset & (image.cluster_bytes() - 1) != 0 || offset >= layout::HOST_OFFSET_END)
        {
            // QEMU does not open such an image.
            table.rewrite = true;
            findings.corruption(header_offset!(snapshots_offset), "snapshot table offset", || {
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
            findings.corruption(header_offset!(nb_snapshots), "snapshot table", || {
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
        let room = TABLE_BYTES_MAX.saturating_sub(offset - image.header.snapshots_offset.0);
        let Some(fixed) = window.get(offset, FIXED_BYTES as u64, room)? else {
            return Ok(Err("found the end of the file or a table that is too long".to_owned()));
        };
        let mut entry: SnapshotTableEntry = padded(fixed);
        let (l1_offset, l1_entries) = (entry.l1_table_offset.get(), entry.l1_size.get());
        let extra = u64::from(entry.extra_data_size);
        let names = u64::from(entry.id_str_size) + u64::from(entry.name_size);
        if entry.id_str_size.get() == 0 {
            // No writer creates these; zeroes after a shorter table look like them.
            return Ok(Err("found an entry without an id".to_owned()));
        }
        let room = room - FIXED_BYTES as u64;
        let Some(rest) = window.get(offset + FIXED_BYTES as u64, extra + names, room)? else {
            return Ok(Err(format!(
                "found {extra} bytes of extra data and {names} bytes of names, which pass the end \
                 of the file or of the largest table"
            )));
        };
        let (extra_data, names) = rest.split_at(extra as usize);
        let mut kept = extra_data[..extra_data.len().min(EXTRA_BYTES_MAX)].to_vec();
        let mut faults = Vec::new();
        if extra_data.len() > EXTRA_BYTES_MAX {
            faults.push(format!("found {extra} bytes of extra data, expected at most 1024"));
        }
        if image.header.version >= 3 && kept.len() < EXTRA_BYTES_MIN {
            faults.push(format!("found {extra} bytes of extra data, expected at least 16"));
            kept = fill_extra(&entry, &kept, image.header.guest_bytes);
        }
        entry.extra_data_size.set(kept.len() as u32);
        let variable = [&kept[..], names].concat();
        let bytes = (FIXED_BYTES as u64 + rest.len() as u64).next_multiple_of(8);

        let lost = l1_fault(image, l1_offset, l1_entries);
        if let Some(fault) = &lost {
            faults.push(format!(
                "snapshot '{}': {fault}; the snapshot is lost",
                String::from_utf8_lossy(names)
            ));
        }
        let lost = lost.is_some();
        Ok(Ok((Snapshot { l1_offset, l1_entries, lost, entry, variable }, bytes, faults)))
    }

    /// The bytes of a table of these snapshots.
    pub(super) fn encode<'a>(snapshots: impl Iterator<Item = &'a Snapshot>) -> Vec<u8> {
        let mut table = Vec::new();
        for snapshot in snapshots {
            table.resize(table.len().next_multiple_of(8), 0);
            let entry =
                SnapshotTableEntry { l1_table_offset: snapshot.l1_offset.into(), ..snapshot.entry };
            table.extend_from_slice(entry.as_bytes());
            table.extend_from_slice(&snapshot.variable);
        }
        table
    }
}

/// Extra data with what version 3 requires.
fn fill_extra(entry: &SnapshotTableEntry, extra: &[u8], guest_bytes: u64) -> Vec<u8> {
    let full = SnapshotExtraData {
        vm_state_size_large: entry.vm_state_bytes(extra).into(),
        disk_size: guest_bytes.into(),
        ..Default::default()
    };
    full.as_bytes()[..EXTRA_BYTES_MIN].to_vec()
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
