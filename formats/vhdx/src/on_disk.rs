//! Structures as they are in the file, and their checksums.

use vdkit_block::bytes::le32;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A header [2.2.2].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) signature: [u8; 4],
    pub(crate) checksum: U32,
    pub(crate) sequence_number: U64,
    pub(crate) file_write_guid: [u8; 16],
    pub(crate) data_write_guid: [u8; 16],
    pub(crate) log_guid: [u8; 16],
    pub(crate) log_version: U16,
    pub(crate) version: U16,
    pub(crate) log_length: U32,
    pub(crate) log_offset: U64,
    pub(crate) reserved: [u8; 4016],
}

/// A region table [2.2.3].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RegionTable {
    pub(crate) signature: [u8; 4],
    pub(crate) checksum: U32,
    pub(crate) entry_count: U32,
    pub(crate) reserved: U32,
    pub(crate) entries: [RegionEntry; 2047],
    pub(crate) reserved_end: [u8; 16],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RegionEntry {
    pub(crate) guid: [u8; 16],
    pub(crate) file_offset: U64,
    pub(crate) length: U32,
    pub(crate) required: U32,
}

/// The table of the metadata region [2.6.1].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct MetadataTable {
    pub(crate) signature: [u8; 8],
    pub(crate) reserved: U16,
    pub(crate) entry_count: U16,
    pub(crate) reserved_end: [u8; 20],
    pub(crate) entries: [MetadataEntry; 2047],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct MetadataEntry {
    pub(crate) item_id: [u8; 16],
    pub(crate) offset: U32,
    pub(crate) length: U32,
    pub(crate) flags: U32,
    pub(crate) reserved: U32,
}

/// The head of a parent locator [2.6.2.6.1]; entries and texts follow it.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct LocatorHeader {
    pub(crate) locator_type: [u8; 16],
    pub(crate) reserved: U16,
    pub(crate) key_value_count: U16,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct LocatorEntry {
    pub(crate) key_offset: U32,
    pub(crate) value_offset: U32,
    pub(crate) key_length: U16,
    pub(crate) value_length: U16,
}

/// The header of a log entry [2.3.1.1].
#[derive(Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct LogEntryHeader {
    pub(crate) signature: [u8; 4],
    pub(crate) checksum: U32,
    pub(crate) entry_length: U32,
    /// Offset in the log of the oldest entry that must be replayed with this one.
    pub(crate) tail: U32,
    pub(crate) sequence_number: U64,
    pub(crate) descriptor_count: U32,
    pub(crate) reserved: U32,
    pub(crate) log_guid: [u8; 16],
    /// Durable length of the file when the entry was written, at least.
    pub(crate) flushed_file_offset: U64,
    /// Least length of the file after a replay of the entry.
    pub(crate) last_file_offset: U64,
}

/// A zero or data descriptor [2.3.1.2, 2.3.1.3].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub(crate) signature: [u8; 4],
    pub(crate) trailing_bytes: [u8; 4],
    /// Of a zero descriptor: the length of the range.
    pub(crate) leading_bytes: U64,
    pub(crate) file_offset: U64,
    pub(crate) sequence_number: U64,
}

/// A data sector [2.3.1.4].
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct DataSector {
    pub(crate) signature: [u8; 4],
    pub(crate) sequence_high: U32,
    pub(crate) data: [u8; 4084],
    pub(crate) sequence_low: U32,
}

/// The parts of a logged page: all but `data` are in its descriptor.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct PageParts {
    pub(crate) leading_bytes: U64,
    pub(crate) data: [u8; 4084],
    pub(crate) trailing_bytes: [u8; 4],
}

/// CRC-32C of a structure with its checksum field, at byte 4, taken as zero.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let head = crc32c::crc32c(&bytes[..4]);
    let head = crc32c::crc32c_append(head, &[0; 4]);
    crc32c::crc32c_append(head, &bytes[8..])
}

/// Whether a structure has the signature and a correct checksum.
pub(crate) fn is_sealed(bytes: &[u8], signature: &[u8; 4]) -> bool {
    bytes.starts_with(signature) && le32(bytes, 4) == checksum(bytes)
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
