//! Internal snapshots.
//!
//! ```text
//!   operations ── names      create, apply, delete, rename; a snapshot as a read-only disk
//!        │
//!      walk ── deltas        references of L1 tables, and changes of refcounts
//!        │
//!     rewrite ── this file   new tables, then one header write
//! ```
//!
//! A change writes new copies of everything that it modifies: refcount blocks and their table, L2
//! tables whose COPIED flags change, the active L1 table, the snapshot table. The header's first
//! sector points to all of them, so one write switches from the old state to the new one.
//!
//! Source: qcow2 specification, section "Snapshots".

mod deltas;
mod names;
mod operations;
mod rewrite;
mod walk;

use std::mem::offset_of;
use std::ops::Range;

use vdkit_block::{Error, HostOffset, Limits, Remedy, Result, SnapshotInfo, Storage};
use zerocopy::{FromBytes, IntoBytes};

use crate::header::Header;
use crate::layout::{Geometry, L1_BYTES_MAX, SNAPSHOTS_MAX};
use crate::structures::{SnapshotExtraData, SnapshotTableEntry, words, words_mut};

const FIXED_BYTES: usize = size_of::<SnapshotTableEntry>();
/// Largest extra data of an entry (QEMU's bound).
pub(crate) const EXTRA_BYTES_MAX: usize = 1024;
/// Largest table (QEMU's bound).
pub(crate) const TABLE_BYTES_MAX: u64 = 1024 * SNAPSHOTS_MAX as u64;
/// Bytes of an entry for the first read: fixed part, extra data and names of common length.
const ENTRY_BYTES_GUESS: u64 = 256;
/// Smallest size of the first read; a smaller one would not be cheaper.
const FIRST_READ_BYTES: u64 = 16 << 10;

/// One internal snapshot, as in its table entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Host offset of its L1 table; not validated.
    pub l1_offset: HostOffset,
    /// Entries of its L1 table; not validated.
    pub l1_entries: u32,
    /// Unique id, in QEMU a decimal number.
    pub id: Vec<u8>,
    /// Name.
    pub name: Vec<u8>,
    /// Seconds since 1970.
    pub date_seconds: u32,
    /// Nanoseconds beyond `date_seconds`.
    pub date_nanoseconds: u32,
    /// Guest clock in nanoseconds.
    pub vm_clock_nanoseconds: u64,
    /// Bytes of saved VM state.
    pub vm_state_bytes: u64,
    /// The 32-bit field for the VM state size, not interpreted.
    pub vm_state_bytes_small: u32,
    /// Bytes of the guest disk when the snapshot was created; `None` in old images.
    pub disk_bytes: Option<u64>,
    /// The raw extra data, including the VM state and disk sizes.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// The snapshot of a table entry: its fixed part, extra data, and ID and name.
    pub(crate) fn of_entry(entry: &SnapshotTableEntry, extra: &[u8], id_and_name: &[u8]) -> Self {
        let (id, name) = id_and_name.split_at(entry.id_str_size.get().into());
        Self {
            l1_offset: HostOffset(entry.l1_table_offset.get()),
            l1_entries: entry.l1_size.get(),
            id: id.to_vec(),
            name: name.to_vec(),
            date_seconds: entry.date_sec.get(),
            date_nanoseconds: entry.date_nsec.get(),
            vm_clock_nanoseconds: entry.vm_clock_nsec.get(),
            vm_state_bytes: words(extra)
                .first()
                .map_or(entry.vm_state_size.into(), |large| large.get()),
            vm_state_bytes_small: entry.vm_state_size.get(),
            disk_bytes: words(extra).get(1).map(|disk_size| disk_size.get()),
            extra: extra.to_vec(),
        }
    }

    /// Description for users.
    pub fn info(&self) -> SnapshotInfo {
        SnapshotInfo {
            id: String::from_utf8_lossy(&self.id).into_owned(),
            name: String::from_utf8_lossy(&self.name).into_owned(),
            vm_state_bytes: self.vm_state_bytes,
            date_seconds: self.date_seconds,
            date_nanoseconds: self.date_nanoseconds,
            vm_clock_nanoseconds: self.vm_clock_nanoseconds,
            disk_bytes: self.disk_bytes,
            icount: self.icount(),
        }
    }

    /// Instructions that the guest had executed, if they were counted.
    fn icount(&self) -> Option<u64> {
        let (extra, _) = SnapshotExtraData::ref_from_prefix(&self.extra).ok()?;
        Some(extra.icount.get()).filter(|&count| count != u64::MAX)
    }

    /// Whether the extra data has the sizes of VM state and disk, as version 3 requires.
    pub(crate) fn has_sizes(&self) -> bool {
        self.extra.len() >= offset_of!(SnapshotExtraData, icount)
    }

    /// Adds the sizes. Before version 3, a disk with snapshots could not be resized.
    pub(crate) fn complete(&mut self, guest_bytes: u64) {
        if !self.has_sizes() {
            self.disk_bytes = Some(guest_bytes);
            self.extra = Self::new_extra(guest_bytes);
            words_mut(&mut self.extra)[0].set(self.vm_state_bytes);
        }
    }

    /// The extra data of a new snapshot: bytes of VM state and disk, and no count of instructions.
    fn new_extra(disk_bytes: u64) -> Vec<u8> {
        let (disk_size, icount) = (disk_bytes.into(), u64::MAX.into());
        SnapshotExtraData { disk_size, icount, ..Default::default() }.as_bytes().to_vec()
    }

    /// Bytes of its table entry, up to the next one.
    pub(crate) fn entry_bytes(&self) -> u64 {
        let bytes = FIXED_BYTES + self.extra.len() + self.id.len() + self.name.len();
        bytes.next_multiple_of(8) as u64
    }

    fn encode(&self, table: &mut Vec<u8>) {
        let entry = SnapshotTableEntry {
            l1_table_offset: self.l1_offset.0.into(),
            l1_size: self.l1_entries.into(),
            id_str_size: (self.id.len() as u16).into(),
            name_size: (self.name.len() as u16).into(),
            date_sec: self.date_seconds.into(),
            date_nsec: self.date_nanoseconds.into(),
            vm_clock_nsec: self.vm_clock_nanoseconds.into(),
            vm_state_size: self.vm_state_bytes_small.into(),
            extra_data_size: (self.extra.len() as u32).into(),
        };
        table.extend_from_slice(entry.as_bytes());
        table.extend_from_slice(&self.extra);
        table.extend_from_slice(&self.id);
        table.extend_from_slice(&self.name);
        table.resize(table.len().next_multiple_of(8), 0);
    }
}

/// The bytes of a table of these snapshots.
pub(crate) fn encode<'a>(snapshots: impl IntoIterator<Item = &'a Snapshot>) -> Vec<u8> {
    let mut table = Vec::new();
    snapshots.into_iter().for_each(|snapshot| snapshot.encode(&mut table));
    table
}

/// Place of the snapshot table according to a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePlace {
    /// Entries.
    pub count: u32,
    /// Host offset.
    pub offset: HostOffset,
}

impl TablePlace {
    /// The place in this header.
    pub fn of(header: &Header) -> Self {
        Self { count: header.snapshot_count, offset: header.snapshots_offset }
    }
}

/// All snapshots of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotTable {
    /// Snapshots in table order.
    pub snapshots: Vec<Snapshot>,
    /// Bytes of the table in the file.
    pub bytes: u64,
}

impl SnapshotTable {
    /// Reads the table in one read, or two if its entries are unusually long; without snapshots,
    /// reads nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if an entry exceeds the end of the file or the largest accepted table (64
    /// MiB, or less by `limits`).
    pub fn read(storage: &dyn Storage, place: TablePlace, limits: &Limits) -> Result<Self> {
        let TablePlace { count, offset: start } = place;
        if count == 0 {
            return Ok(Self::default());
        }
        let most = TABLE_BYTES_MAX
            .min(limits.snapshots_bytes_max)
            .min(u64::from(count) * (FIXED_BYTES + EXTRA_BYTES_MAX + 2 * 65536) as u64);
        let room = storage.len()?.saturating_sub(start.0).min(most);
        let guess = (u64::from(count) * ENTRY_BYTES_GUESS).max(FIRST_READ_BYTES).min(room);
        let mut bytes = vec![0; guess as usize];
        storage.read_at(&mut bytes, start)?;
        let parsed = match Self::parse(&bytes, count) {
            Err(Stop::Ended { .. }) if guess < room => {
                bytes.resize(room as usize, 0);
                storage.read_at(&mut bytes[guess as usize..], start + guess)?;
                Self::parse(&bytes, count)
            }
            parsed => parsed,
        };
        parsed.map_err(|stop| {
            let (at, found, expected) = match stop {
                Stop::Ended { at, index } => (
                    at,
                    format!("entry {index} of {count} passing the end of {room} bytes"),
                    "a table within the file and the limits".to_owned(),
                ),
                Stop::Extra { at, found } => (
                    at + offset_of!(SnapshotTableEntry, extra_data_size),
                    format!("{found} bytes of extra data"),
                    format!("at most {EXTRA_BYTES_MAX}"),
                ),
            };
            Error::corrupt(
                storage.name(),
                start.0 + at as u64,
                "snapshot table entry",
                found,
                expected,
            )
            .with_remedy(Remedy::REPAIR)
        })
    }

    /// Host clusters of the L1 tables, but for those that no L1 table can have.
    pub(crate) fn l1_clusters(&self, geometry: Geometry) -> impl Iterator<Item = Range<u64>> {
        self.snapshots.iter().filter_map(move |snapshot| {
            let (start, bytes) = (snapshot.l1_offset, u64::from(snapshot.l1_entries) * 8);
            let end = start.0.checked_add(bytes).filter(|_| bytes <= L1_BYTES_MAX)?;
            Some(geometry.host_cluster(start)..end.div_ceil(geometry.cluster_bytes()))
        })
    }

    /// The bytes of a table of these snapshots.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it exceeds the largest accepted size.
    fn encode(file: &str, snapshots: &[Snapshot], limits: &Limits) -> Result<Vec<u8>> {
        let table = encode(snapshots);
        let most = TABLE_BYTES_MAX.min(limits.snapshots_bytes_max);
        if table.len() as u64 > most || snapshots.len() > SNAPSHOTS_MAX as usize {
            return Err(Error::invalid_for(
                &file,
                format!(
                    "{} snapshots take a table of {} bytes; at most {SNAPSHOTS_MAX} and {most} \
                 bytes are accepted; delete some first",
                    snapshots.len(),
                    table.len()
                ),
            ));
        }
        Ok(table)
    }

    fn parse(bytes: &[u8], count: u32) -> Result<Self, Stop> {
        // An entry has at least 40 bytes, so the bytes read bound this.
        let most = bytes.len() / FIXED_BYTES;
        let mut snapshots = Vec::with_capacity(most.min(count as usize));
        let mut at = 0;
        for index in 0..count {
            let ended = Stop::Ended { at, index };
            let entry = bytes.get(at..).map(SnapshotTableEntry::ref_from_prefix);
            let Some(Ok((entry, rest))) = entry else { return Err(ended) };
            let extra_bytes = entry.extra_data_size.get() as usize;
            if extra_bytes > EXTRA_BYTES_MAX {
                return Err(Stop::Extra { at, found: extra_bytes });
            }
            let variable_bytes = extra_bytes + entry.id_and_name_bytes();
            let Some(variable) = rest.get(..variable_bytes) else { return Err(ended) };
            let (extra, id_and_name) = variable.split_at(extra_bytes);
            let snapshot = Snapshot::of_entry(entry, extra, id_and_name);
            at += snapshot.entry_bytes() as usize;
            snapshots.push(snapshot);
        }
        Ok(Self { snapshots, bytes: at as u64 })
    }
}

/// Why parsing stopped.
enum Stop {
    /// The bytes end within the entry that begins at `at`.
    Ended { at: usize, index: u32 },
    /// The entry that begins at `at` has too much extra data.
    Extra { at: usize, found: usize },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(number: u32, name_bytes: usize) -> Snapshot {
        Snapshot {
            l1_offset: HostOffset(0x10000),
            l1_entries: 1,
            id: number.to_string().into_bytes(),
            name: vec![b'n'; name_bytes],
            disk_bytes: Some(4096),
            extra: Snapshot::new_extra(4096),
            ..Snapshot::default()
        }
    }

    #[test]
    fn tables_read_as_they_were_written() {
        let mut odd = snapshot(7, 3);
        odd.vm_state_bytes_small = 5;
        odd.vm_state_bytes = 1 << 33;
        odd.extra = (1u64 << 33).to_be_bytes().into_iter().chain(4096u64.to_be_bytes()).collect();
        odd.extra.extend_from_slice(b"more than anybody knows");
        let old = Snapshot { extra: Vec::new(), disk_bytes: None, ..snapshot(8, 1) };
        let all = vec![snapshot(1, 200), odd, old, snapshot(9, 0)];
        let bytes = SnapshotTable::encode("f", &all, &Limits::default()).unwrap();
        let read = SnapshotTable::parse(&bytes, 4).ok().unwrap();
        assert_eq!(read.snapshots, all);
        assert_eq!(read.bytes, bytes.len() as u64);
        assert_eq!((all[0].info().icount, all[0].info().disk_bytes), (None, Some(4096)));
    }

    #[test]
    fn tables_that_nobody_would_read_are_not_written() {
        let limits = Limits::default();
        let mut all: Vec<Snapshot> = (0..SNAPSHOTS_MAX).map(|i| snapshot(i, 255)).collect();
        assert!(SnapshotTable::encode("f", &all, &limits).is_ok());
        all.push(snapshot(SNAPSHOTS_MAX, 1));
        let error = SnapshotTable::encode("f", &all, &limits).unwrap_err().to_string();
        assert!(error.contains("65537 snapshots"), "{error}");
        let mut small = limits;
        small.snapshots_bytes_max = 1000;
        assert!(SnapshotTable::encode("f", &all[..4], &small).is_err());
    }
}
