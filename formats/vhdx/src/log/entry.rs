//! Encoding of log entries [2.3.1].

use crate::fields::{guid_at, put, seal};
use crate::layout::{PAGE, PAGE_BYTES, Page};
use uuid::Uuid;
use vdkit_block::bytes::{le32, le64};

const SIGNATURE: &[u8; 4] = b"loge";
const DATA_DESCRIPTOR: &[u8; 4] = b"desc";
const ZERO_DESCRIPTOR: &[u8; 4] = b"zero";
const DATA_SECTOR: &[u8; 4] = b"data";
const HEADER_BYTES: usize = 64;
const DESCRIPTOR_BYTES: usize = 32;
/// Bytes of a page in its data sector; the first 8 and the last 4 are in the descriptor.
const BODY_BYTES: usize = 4084;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHead {
    pub(crate) bytes: u64,
    /// Offset in the log of the oldest entry that must be replayed with this one.
    pub(crate) tail: u64,
    pub(crate) sequence: u64,
    pub(crate) guid: Uuid,
    /// Durable length of the file when the entry was written, at least.
    pub(crate) flushed_bytes: u64,
    /// Least length of the file after a replay of the entry.
    pub(crate) last_bytes: u64,
    descriptors: u32,
}

/// Encodes an entry of pages. `flushed` and `last` are [`EntryHead::flushed_bytes`] and
/// [`EntryHead::last_bytes`].
pub(crate) fn encode(
    guid: Uuid,
    sequence: u64,
    tail: u64,
    (flushed, last): (u64, u64),
    pages: &[LoggedPage],
) -> Vec<u8> {
    let descriptor_bytes = descriptor_sectors(pages.len() as u64) as usize * PAGE;
    let mut entry = vec![0; descriptor_bytes + pages.len() * PAGE];
    let len = entry.len() as u32;
    put(&mut entry, 0, SIGNATURE);
    put(&mut entry, 8, &len.to_le_bytes());
    put(&mut entry, 12, &(tail as u32).to_le_bytes());
    put(&mut entry, 16, &sequence.to_le_bytes());
    put(&mut entry, 24, &(pages.len() as u32).to_le_bytes());
    put(&mut entry, 32, &guid.to_bytes_le());
    put(&mut entry, 48, &flushed.to_le_bytes());
    put(&mut entry, 56, &last.to_le_bytes());
    for (index, (offset, page)) in pages.iter().enumerate() {
        let at = HEADER_BYTES + index * DESCRIPTOR_BYTES;
        put(&mut entry, at, DATA_DESCRIPTOR);
        put(&mut entry, at + 4, &page[PAGE - 4..]);
        put(&mut entry, at + 8, &page[..8]);
        put(&mut entry, at + 16, &offset.to_le_bytes());
        put(&mut entry, at + 24, &sequence.to_le_bytes());
        let at = descriptor_bytes + index * PAGE;
        put(&mut entry, at, DATA_SECTOR);
        put(&mut entry, at + 4, &((sequence >> 32) as u32).to_le_bytes());
        put(&mut entry, at + 8, &page[8..8 + BODY_BYTES]);
        put(&mut entry, at + PAGE - 4, &(sequence as u32).to_le_bytes());
    }
    seal(&mut entry);
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
    fn sector(&self, index: u64) -> &[u8] {
        let at = (index * PAGE_BYTES) as usize % self.0.len();
        &self.0[at..at + PAGE]
    }

    /// The header of the entry that begins at a sector, if it is plausible.
    pub(crate) fn head(&self, start: u64, guid: Uuid) -> Option<EntryHead> {
        let sector = self.sector(start);
        let head = EntryHead {
            bytes: le32(sector, 8).into(),
            tail: le32(sector, 12).into(),
            sequence: le64(sector, 16),
            descriptors: le32(sector, 24),
            guid: guid_at(sector, 32),
            flushed_bytes: le64(sector, 48),
            last_bytes: le64(sector, 56),
        };
        let good = sector.starts_with(SIGNATURE)
            && head.guid == guid
            && head.sequence > 0
            && head.bytes >= PAGE_BYTES
            && head.bytes.is_multiple_of(PAGE_BYTES)
            && head.bytes <= self.0.len() as u64
            && head.tail.is_multiple_of(PAGE_BYTES)
            && head.tail < self.0.len() as u64;
        good.then_some(head)
    }

    /// The entry that begins at a sector, if it is complete and sound. Validates each sector before
    /// the checksum: then two candidates never share a sector, and all checksums together cover no
    /// more bytes than the log has.
    pub(crate) fn entry(&self, start: u64, guid: Uuid) -> Option<EntryHead> {
        let head = self.head(start, guid)?;
        let mut data = 0;
        self.each_descriptor(start, &head, |descriptor| {
            data += u64::from(descriptor.starts_with(DATA_DESCRIPTOR));
            is_sound(descriptor, head.sequence)
        })?;
        let first = descriptor_sectors(head.descriptors.into());
        if (first + data) * PAGE_BYTES != head.bytes {
            return None;
        }
        for index in first..first + data {
            let sector = self.sector(start + index);
            let sequence = u64::from(le32(sector, 4)) << 32 | u64::from(le32(sector, PAGE - 4));
            if !sector.starts_with(DATA_SECTOR) || sequence != head.sequence {
                return None;
            }
        }
        let mut sum = crc32c::crc32c(&self.sector(start)[..4]);
        sum = crc32c::crc32c_append(sum, &[0; 4]);
        sum = crc32c::crc32c_append(sum, &self.sector(start)[8..]);
        for index in 1..head.bytes / PAGE_BYTES {
            sum = crc32c::crc32c_append(sum, self.sector(start + index));
        }
        (sum == le32(self.sector(start), 4)).then_some(head)
    }

    /// Calls `look` for the descriptors of an entry in order until it returns false.
    fn each_descriptor(
        &self,
        start: u64,
        head: &EntryHead,
        mut look: impl FnMut(&[u8]) -> bool,
    ) -> Option<()> {
        if descriptor_sectors(head.descriptors.into()) * PAGE_BYTES > head.bytes {
            return None;
        }
        for index in 0..u64::from(head.descriptors) {
            let at = HEADER_BYTES as u64 + index * DESCRIPTOR_BYTES as u64;
            let sector = self.sector(start + at / PAGE_BYTES);
            let at = (at % PAGE_BYTES) as usize;
            if !look(&sector[at..at + DESCRIPTOR_BYTES]) {
                return None;
            }
        }
        Some(())
    }

    /// The changes of a sound entry, in order.
    pub(crate) fn changes(&self, start: u64, head: &EntryHead) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut data = start + descriptor_sectors(head.descriptors.into());
        let _ = self.each_descriptor(start, head, |descriptor| {
            let offset = le64(descriptor, 16);
            if descriptor.starts_with(ZERO_DESCRIPTOR) {
                changes.push(Change::Zero(offset, le64(descriptor, 8)));
                return true;
            }
            let mut page = Box::new([0; PAGE]);
            page[..8].copy_from_slice(&descriptor[8..16]);
            page[8..8 + BODY_BYTES].copy_from_slice(&self.sector(data)[8..8 + BODY_BYTES]);
            page[PAGE - 4..].copy_from_slice(&descriptor[4..8]);
            changes.push(Change::Page(offset, page));
            data += 1;
            true
        });
        changes
    }
}

fn is_sound(descriptor: &[u8], sequence: u64) -> bool {
    let known = descriptor.starts_with(DATA_DESCRIPTOR)
        || descriptor.starts_with(ZERO_DESCRIPTOR)
            && le64(descriptor, 8).is_multiple_of(PAGE_BYTES);
    known && le64(descriptor, 16).is_multiple_of(PAGE_BYTES) && le64(descriptor, 24) == sequence
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
                assert_eq!((head.sequence, head.tail), (1 << 40 | 5, 4096));
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
