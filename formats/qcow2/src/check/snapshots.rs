//! The snapshot table: its content, its faults, and how it is rewritten.
//!
//! Source: qcow2 specification, section "Snapshots".

use vdkit_block::{CheckReport, HostOffset, Result};

use super::image::Image;
use crate::layout;
use crate::snapshots::{self, EXTRA_BYTES_MAX, TABLE_BYTES_MAX};
use crate::structures::{SnapshotTableEntry, header_offset, padded};

const FIXED_BYTES: u64 = size_of::<SnapshotTableEntry>() as u64;

#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    /// Its corrected table entry.
    pub(super) entry: snapshots::Snapshot,
    /// Its L1 table cannot be where the entry says.
    pub(super) lost: bool,
}

impl Snapshot {
    /// Host offset and bytes of its L1 table.
    pub(super) fn l1(&self) -> (u64, u64) {
        (self.entry.l1_offset.0, u64::from(self.entry.l1_entries) * 8)
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
    pub(super) fn read(image: &Image, report: &mut CheckReport) -> Result<Self> {
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
            report.corruption(header_offset!(snapshots_offset), "snapshot table offset", || {
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
                        report.corruption(offset, "snapshot table entry", || fault);
                    }
                    table.snapshots.push(snapshot);
                    table.bytes += bytes;
                }
                Err(message) => {
                    table.rewrite = true;
                    table.cut_short = true;
                    let lost = header.snapshot_count - index;
                    report.corruption(offset, "snapshot table entry", || {
                        format!("{message}; {lost} snapshots from here on are lost")
                    });
                    break;
                }
            }
        }
        if header.has_data_file() && header.snapshot_count > 0 {
            report.corruption(header_offset!(nb_snapshots), "snapshot table", || {
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
        let Some(fixed) = window.get(offset, FIXED_BYTES, room)? else {
            return Ok(Err("found the end of the file or a table that is too long".to_owned()));
        };
        let fixed: SnapshotTableEntry = padded(fixed);
        if fixed.id_str_size.get() == 0 {
            // No writer creates these; zeroes after a shorter table look like them.
            return Ok(Err("found an entry without an id".to_owned()));
        }
        let (extra, names) = (u64::from(fixed.extra_data_size), fixed.id_and_name_bytes() as u64);
        let room = room - FIXED_BYTES;
        let Some(variable) = window.get(offset + FIXED_BYTES, extra + names, room)? else {
            return Ok(Err(format!(
                "found {extra} bytes of extra data and {names} bytes of names, which pass the end \
                 of the file or of the largest table"
            )));
        };
        let bytes = (FIXED_BYTES + extra + names).next_multiple_of(8);
        let (extra_data, id_and_name) = variable.split_at(extra as usize);
        let mut faults = Vec::new();
        let kept = &extra_data[..extra_data.len().min(EXTRA_BYTES_MAX)];
        let mut entry = snapshots::Snapshot::of_entry(&fixed, kept, id_and_name);
        if extra_data.len() > EXTRA_BYTES_MAX {
            faults.push(format!("found {extra} bytes of extra data, expected at most 1024"));
        }
        if image.header.version >= 3 && !entry.has_sizes() {
            faults.push(format!("found {extra} bytes of extra data, expected at least 16"));
            entry.complete(image.header.guest_bytes);
        }
        let mut snapshot = Snapshot { entry, lost: false };
        if let Some(fault) = l1_fault(image, snapshot.l1()) {
            let name = String::from_utf8_lossy(&snapshot.entry.name);
            faults.push(format!("snapshot '{name}': {fault}; the snapshot is lost"));
            snapshot.lost = true;
        }
        Ok(Ok((snapshot, bytes, faults)))
    }
}

fn l1_fault(image: &Image, (offset, bytes): (u64, u64)) -> Option<String> {
    if bytes > layout::L1_BYTES_MAX {
        let entries = bytes / 8;
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
