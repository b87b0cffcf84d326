//! Encoding of log entries [2.3.1].

use std::mem::offset_of;

use uuid::Uuid;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes, transmute, transmute_ref};

use crate::layout::{PAGE, PAGE_BYTES, Page};
use crate::on_disk::{DataSector, Descriptor, LogEntryHeader, PageParts, checksum, put};

const SIGNATURE: &[u8; 4] = b"loge";
const DATA_DESCRIPTOR: &[u8; 4] = b"desc";
const ZERO_DESCRIPTOR: &[u8; 4] = b"zero";
const DATA_SECTOR: &[u8; 4] = b"data";
const HEADER_BYTES: usize = size_of::<LogEntryHeader>();
const DESCRIPTOR_BYTES: usize = size_of::<Descriptor>();
/// Descriptors that a sector holds.
const SECTOR_DESCRIPTORS: usize = PAGE / DESCRIPTOR_BYTES;

/// A page and its offset in the file.
pub(crate) type LoggedPage = (u64, Page);

/// Sectors of the entry's header and descriptors.
fn descriptor_sectors(descriptors: u64) -> u64 {
    (HEADER_BYTES as u64 + descriptors * DESCRIPTOR_BYTES as u64).div_ceil(PAGE_BYTES)
}

pub(crate) fn entry_bytes(pages: u64) -> u64 {
    (descriptor_sectors(pages) + pages) * PAGE_BYTES
}

/// Most pages of an entry that fills a log of `log_bytes` bytes.
pub(crate) fn pages_max(log_bytes: u64) -> u64 {
    let sectors = log_bytes / PAGE_BYTES;
    let mut pages = sectors.saturating_sub(1);
    while pages > 0 && descriptor_sectors(pages) + pages > sectors {
        pages -= 1;
    }
    pages
}

/// Encodes an entry of pages. `flushed` and `last` are its two file offsets.
pub(crate) fn encode(
    guid: Uuid,
    sequence: u64,
    tail: u64,
    (flushed, last): (u64, u64),
    pages: &[LoggedPage],
) -> Vec<u8> {
    let descriptor_bytes = descriptor_sectors(pages.len() as u64) as usize * PAGE;
    let len = descriptor_bytes + pages.len() * PAGE;
    let header = LogEntryHeader {
        signature: *SIGNATURE,
        entry_length: (len as u32).into(),
        tail: (tail as u32).into(),
        sequence_number: sequence.into(),
        descriptor_count: (pages.len() as u32).into(),
        log_guid: guid.to_bytes_le(),
        flushed_file_offset: flushed.into(),
        last_file_offset: last.into(),
        ..FromZeros::new_zeroed()
    };
    let mut entry = Vec::with_capacity(len);
    entry.extend_from_slice(header.as_bytes());
    for (offset, page) in pages {
        let parts: &PageParts = transmute_ref!(&**page);
        let descriptor = Descriptor {
            signature: *DATA_DESCRIPTOR,
            trailing_bytes: parts.trailing_bytes,
            leading_bytes: parts.leading_bytes,
            file_offset: (*offset).into(),
            sequence_number: sequence.into(),
        };
        entry.extend_from_slice(descriptor.as_bytes());
    }
    entry.resize(descriptor_bytes, 0);
    for (_, page) in pages {
        let parts: &PageParts = transmute_ref!(&**page);
        let sector = DataSector {
            signature: *DATA_SECTOR,
            sequence_high: ((sequence >> 32) as u32).into(),
            data: parts.data,
            sequence_low: (sequence as u32).into(),
        };
        entry.extend_from_slice(sector.as_bytes());
    }
    let sum = checksum(&entry);
    put(&mut entry, offset_of!(LogEntryHeader, checksum), &sum.to_le_bytes());
    entry
}

/// One change of a replayed entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Offset and new content of a page.
    Page(u64, Box<[u8; PAGE]>),
    /// A range to zero: offset and bytes.
    Zero(u64, u64),
}

/// The log as a ring of sectors.
pub(crate) struct Ring<'a>(pub(crate) &'a [u8]);

impl Ring<'_> {
    fn sector(&self, index: u64) -> &[u8; PAGE] {
        let sectors = self.0.as_chunks::<PAGE>().0;
        &sectors[index as usize % sectors.len()]
    }

    /// The header of the entry that begins at a sector, if it is plausible.
    pub(crate) fn head(&self, start: u64, guid: Uuid) -> Option<LogEntryHeader> {
        let (head, _) = LogEntryHeader::read_from_prefix(self.sector(start)).ok()?;
        let (bytes, tail) = (u64::from(head.entry_length), u64::from(head.tail));
        let good = head.signature == *SIGNATURE
            && head.log_guid == guid.to_bytes_le()
            && head.sequence_number.get() > 0
            && bytes >= PAGE_BYTES
            && bytes.is_multiple_of(PAGE_BYTES)
            && bytes <= self.0.len() as u64
            && tail.is_multiple_of(PAGE_BYTES)
            && tail < self.0.len() as u64;
        good.then_some(head)
    }

    /// The entry that begins at a sector, if it is complete and sound. Validates each sector before
    /// the checksum: then two candidates never share a sector, and all checksums together cover no
    /// more bytes than the log has.
    pub(crate) fn entry(&self, start: u64, guid: Uuid) -> Option<LogEntryHeader> {
        let head = self.head(start, guid)?;
        let mut data = 0;
        self.each_descriptor(start, &head, |descriptor| {
            data += u64::from(descriptor.signature == *DATA_DESCRIPTOR);
            is_sound(descriptor, head.sequence_number)
        })?;
        let first = descriptor_sectors(head.descriptor_count.into());
        if (first + data) * PAGE_BYTES != u64::from(head.entry_length) {
            return None;
        }
        for index in first..first + data {
            let sector: &DataSector = transmute_ref!(self.sector(start + index));
            let sequence = u64::from(sector.sequence_high) << 32 | u64::from(sector.sequence_low);
            if sector.signature != *DATA_SECTOR || head.sequence_number != sequence {
                return None;
            }
        }
        let mut sum = checksum(self.sector(start));
        for index in 1..first + data {
            sum = crc32c::crc32c_append(sum, self.sector(start + index));
        }
        (head.checksum == sum).then_some(head)
    }

    /// Calls `visit` for the descriptors of an entry in order until it returns false.
    fn each_descriptor(
        &self,
        start: u64,
        head: &LogEntryHeader,
        mut visit: impl FnMut(&Descriptor) -> bool,
    ) -> Option<()> {
        if descriptor_sectors(head.descriptor_count.into()) * PAGE_BYTES
            > u64::from(head.entry_length)
        {
            return None;
        }
        for index in 0..head.descriptor_count.get() as usize {
            // The header takes the place of the first ones.
            let place = HEADER_BYTES / DESCRIPTOR_BYTES + index;
            let sector = self.sector(start + (place / SECTOR_DESCRIPTORS) as u64);
            let descriptors: &[Descriptor; SECTOR_DESCRIPTORS] = transmute_ref!(sector);
            if !visit(&descriptors[place % SECTOR_DESCRIPTORS]) {
                return None;
            }
        }
        Some(())
    }

    /// The changes of a sound entry, in order.
    pub(crate) fn changes(&self, start: u64, head: &LogEntryHeader) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut data = start + descriptor_sectors(head.descriptor_count.into());
        let _ = self.each_descriptor(start, head, |descriptor| {
            let offset = descriptor.file_offset.get();
            if descriptor.signature == *ZERO_DESCRIPTOR {
                changes.push(Change::Zero(offset, descriptor.leading_bytes.get()));
                return true;
            }
            let sector: &DataSector = transmute_ref!(self.sector(data));
            let page = PageParts {
                leading_bytes: descriptor.leading_bytes,
                data: sector.data,
                trailing_bytes: descriptor.trailing_bytes,
            };
            changes.push(Change::Page(offset, Box::new(transmute!(page))));
            data += 1;
            true
        });
        changes
    }
}

fn is_sound(descriptor: &Descriptor, sequence: U64) -> bool {
    let known = descriptor.signature == *DATA_DESCRIPTOR
        || descriptor.signature == *ZERO_DESCRIPTOR
            && descriptor.leading_bytes.get().is_multiple_of(PAGE_BYTES);
    known
        && descriptor.file_offset.get().is_multiple_of(PAGE_BYTES)
        && descriptor.sequence_number == sequence
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> Box<[u8; PAGE]> {
        let mut page = Box::new([byte; PAGE]);
        page[0] = 1;
        page[PAGE - 1] = 2;
        page
    }

    #[test]
    fn what_is_encoded_is_found_also_across_the_end() {
        let guid = Uuid::from_bytes([7; 16]);
        for count in [0, 1, 126, 127, 200] {
            let pages: Vec<LoggedPage> =
                (0..count).map(|i| (i * PAGE_BYTES, page(i as u8))).collect();
            let entry = encode(guid, 1 << 40 | 5, 4096, (1 << 30, 2 << 30), &pages);
            assert_eq!(entry.len() as u64, entry_bytes(count));
            for start in [0, 100, 250] {
                let mut log = vec![0; 1 << 20];
                for (i, sector) in entry.chunks(PAGE).enumerate() {
                    put(&mut log, (start + i) % 256 * PAGE, sector);
                }
                let ring = Ring(&log);
                let head = ring.entry(start as u64, guid).expect("a sound entry");
                assert_eq!((head.sequence_number.get(), head.tail.get()), (1 << 40 | 5, 4096));
                let changes = ring.changes(start as u64, &head);
                let wanted: Vec<Change> =
                    pages.iter().map(|(at, page)| Change::Page(*at, page.clone())).collect();
                assert_eq!(changes, wanted);
                assert!(ring.entry(start as u64, Uuid::from_bytes([8; 16])).is_none());
                // Damage to any sector is detected.
                for i in 0..entry.len() / PAGE {
                    let mut torn = log.clone();
                    torn[(start + i) % 256 * PAGE + 2000] ^= 1;
                    assert!(Ring(&torn).entry(start as u64, guid).is_none(), "{i}");
                }
            }
        }
    }

    #[test]
    fn a_log_of_1_mib_takes_254_pages() {
        assert_eq!(pages_max(1 << 20), 254);
        assert!(entry_bytes(254) <= 1 << 20 && entry_bytes(255) > 1 << 20);
        assert_eq!(pages_max(0), 0);
    }
}
