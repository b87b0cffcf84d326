//! Finds the entries that must be replayed [2.3.2], and replays them [2.3.3].

use std::mem::offset_of;

use uuid::Uuid;
use vdkit_block::{Error, HostOffset, Result, Storage, ZeroMode};

use super::entry::{Change, Ring};
use crate::header::Header;
use crate::layout::{FILE_BYTES_MAX, PAGE_BYTES, REGION_OFFSETS};
use crate::on_disk::LogEntryHeader;

/// The entries that must be replayed, in order.
#[derive(Debug)]
pub(crate) struct ActiveSequence {
    log: Vec<u8>,
    entries: Vec<(u64, LogEntryHeader)>,
    /// Least length of the file after the replay.
    pub(crate) file_bytes: u64,
}

/// Finds the active sequence; `None` if the log is empty. Takes one read.
///
/// # Errors
/// [`Error::Corrupt`] if the file is shorter than when the log was written, or an entry would
/// change what no entry may; I/O.
pub(crate) fn find(storage: &dyn Storage, header: &Header) -> Result<Option<ActiveSequence>> {
    if header.log == Uuid::nil() || header.log_bytes == 0 {
        return Ok(None);
    }
    let mut log = vec![0; header.log_bytes as usize];
    storage.read_padded(&mut log, HostOffset(header.log_offset))?;
    let entries = active(&Ring(&log), header);
    let Some((at, head)) = entries.last() else { return Ok(None) };
    let at = header.log_offset + at * PAGE_BYTES;
    let len = storage.len()?;
    let (flushed, last) = (head.flushed_file_offset.get(), head.last_file_offset.get());
    if flushed > len {
        return Err(Error::corrupt(
            storage.name(),
            at + offset_of!(LogEntryHeader, flushed_file_offset) as u64,
            "log entry",
            format!("a file of {len:#x} bytes"),
            format!("{flushed:#x} at least, as when the entry was written [2.3.1.1]"),
        ));
    }
    if last > FILE_BYTES_MAX {
        let found = format!("a file of {last:#x} bytes");
        let expected = format!("{FILE_BYTES_MAX:#x} at most [2.3.1.1]");
        let at = at + offset_of!(LogEntryHeader, last_file_offset) as u64;
        return Err(Error::corrupt(storage.name(), at, "log entry", found, expected));
    }
    let file_bytes = last.max(len);
    let found = ActiveSequence { log, entries, file_bytes };
    found.check_targets(storage, header)?;
    Ok(Some(found))
}

/// The contiguous sequence of entries that ends with the highest sequence number and contains its
/// own tail.
fn active(ring: &Ring<'_>, header: &Header) -> Vec<(u64, LogEntryHeader)> {
    let sectors = header.log_bytes / PAGE_BYTES;
    let mut best: Vec<(u64, LogEntryHeader)> = Vec::new();
    let mut start = 0;
    while start < sectors {
        let mut run: Vec<(u64, LogEntryHeader)> = Vec::new();
        let (mut at, mut taken) = (start, 0);
        while let Some(head) = ring.entry(at % sectors, header.log) {
            let sequence = head.sequence_number.get();
            let follows = run.last().is_none_or(|(_, last)| {
                last.sequence_number.get().checked_add(1) == Some(sequence)
            });
            let sectors_taken = u64::from(head.entry_length) / PAGE_BYTES;
            taken += sectors_taken;
            if !follows || taken > sectors {
                break;
            }
            run.push((at % sectors, head));
            at += sectors_taken;
        }
        let next = at.max(start + 1);
        let tail = run.last().map(|(_, last)| u64::from(last.tail) / PAGE_BYTES);
        let first = run.iter().position(|(at, _)| Some(*at) == tail);
        if let (Some(first), Some((_, last))) = (first, run.last())
            && best.last().is_none_or(|(_, other)| last.sequence_number > other.sequence_number)
        {
            best = run.split_off(first);
        }
        start = next;
    }
    best
}

impl ActiveSequence {
    /// Number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Calls `apply` for all changes in order.
    pub(crate) fn each_change(&self, mut apply: impl FnMut(Change) -> Result<()>) -> Result<()> {
        let ring = Ring(&self.log);
        for (at, head) in &self.entries {
            ring.changes(*at, head).into_iter().try_for_each(&mut apply)?;
        }
        Ok(())
    }

    /// Fails if an entry would change the headers, the log itself, or bytes beyond the end of the
    /// file.
    fn check_targets(&self, storage: &dyn Storage, header: &Header) -> Result<()> {
        let log = header.log_offset..header.log_offset + header.log_bytes;
        self.each_change(|change| {
            let (start, bytes) = match change {
                Change::Page(at, _) => (at, PAGE_BYTES),
                Change::Zero(at, bytes) => (at, bytes),
            };
            let end = start.checked_add(bytes).filter(|end| *end <= self.file_bytes);
            let fits = end.is_some_and(|end| {
                start >= REGION_OFFSETS[0] && (end <= log.start || start >= log.end)
            });
            if fits {
                return Ok(());
            }
            Err(Error::corrupt(
                storage.name(),
                header.log_offset,
                "log entry",
                format!("{bytes:#x} bytes for offset {start:#x}"),
                "a target within the file, outside of headers and log [2.3.1]",
            ))
        })
    }

    /// Replays everything to the storage, durably. An interrupted replay can be repeated: the log
    /// is valid until a header changes its GUID.
    pub(crate) fn replay(&self, storage: &dyn Storage) -> Result<()> {
        self.each_change(|change| match change {
            Change::Page(at, page) => storage.write_at(&page[..], HostOffset(at)),
            Change::Zero(_, 0) => Ok(()),
            Change::Zero(at, bytes) => {
                storage.write_zeroes(HostOffset(at), bytes, ZeroMode::MayUnmap)
            }
        })?;
        if storage.len()? < self.file_bytes && storage.caps().growable {
            storage.set_len(self.file_bytes)?;
        }
        storage.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::encode;
    use super::*;
    use crate::on_disk::put;

    fn header() -> Header {
        Header {
            sequence: 1,
            file_write: Uuid::nil(),
            data_write: Uuid::nil(),
            log: Uuid::from_bytes([7; 16]),
            log_version: 0,
            version: 1,
            log_bytes: 1 << 20,
            log_offset: 1 << 20,
        }
    }

    /// Entries of one page each, two sectors long: (first sector, sequence number, sector of the
    /// tail).
    fn sequences(entries: &[(u64, u64, u64)]) -> Vec<u64> {
        let header = header();
        let mut log = vec![0; 1 << 20];
        for (at, sequence, tail) in entries {
            let page = Box::new([*sequence as u8; 4096]);
            let entry = encode(header.log, *sequence, tail * 4096, (0, 0), &[(2 << 20, page)]);
            for (i, sector) in entry.chunks(4096).enumerate() {
                put(&mut log, (*at as usize + i) % 256 * 4096, sector);
            }
        }
        active(&Ring(&log), &header).iter().map(|(_, head)| head.sequence_number.get()).collect()
    }

    #[test]
    fn the_sequence_with_the_highest_number_is_active() {
        assert!(sequences(&[]).is_empty());
        assert_eq!(sequences(&[(0, 5, 0)]), [5]);
        assert_eq!(sequences(&[(0, 5, 0), (2, 6, 0), (4, 7, 0)]), [5, 6, 7]);
        // The tail excludes older entries.
        assert_eq!(sequences(&[(0, 5, 0), (2, 6, 0), (4, 7, 2)]), [6, 7]);
        // A gap in the sequence numbers, and a gap in position.
        assert_eq!(sequences(&[(0, 5, 0), (2, 7, 2)]), [7]);
        assert_eq!(sequences(&[(0, 5, 0), (3, 6, 3)]), [6]);
        // Around the end of the log.
        assert_eq!(sequences(&[(254, 5, 254), (0, 6, 254), (2, 7, 254)]), [5, 6, 7]);
        assert_eq!(sequences(&[(255, 5, 255), (1, 6, 255)]), [5, 6]);
        // Entries of the previous round are not part of the sequence.
        assert_eq!(sequences(&[(0, 9, 0), (2, 10, 0), (4, 3, 0), (6, 4, 0)]), [9, 10]);
        assert_eq!(sequences(&[(0, 3, 0), (2, 4, 0), (8, 9, 8)]), [9]);
        // A sequence whose last entry names a tail outside of it is invalid.
        assert!(sequences(&[(2, 6, 0)]).is_empty());
    }
}
