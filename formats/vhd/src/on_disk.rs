//! Structures as they are in the file: `docs/formats/vpc.md`.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawFooter {
    pub(crate) cookie: [u8; 8],
    pub(crate) features: U32,
    pub(crate) file_format_version: U32,
    pub(crate) data_offset: U64,
    pub(crate) time_stamp: U32,
    pub(crate) creator_application: [u8; 4],
    pub(crate) creator_version: U32,
    pub(crate) creator_host_os: [u8; 4],
    pub(crate) original_size: U64,
    pub(crate) current_size: U64,
    pub(crate) cylinders: U16,
    pub(crate) heads: u8,
    pub(crate) sectors_per_track: u8,
    pub(crate) disk_type: U32,
    pub(crate) checksum: U32,
    pub(crate) unique_id: [u8; 16],
    pub(crate) saved_state: u8,
    pub(crate) reserved: [u8; 427],
}

#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) cookie: [u8; 8],
    pub(crate) data_offset: U64,
    pub(crate) table_offset: U64,
    pub(crate) header_version: U32,
    pub(crate) max_table_entries: U32,
    pub(crate) block_size: U32,
    pub(crate) checksum: U32,
    pub(crate) parent_unique_id: [u8; 16],
    pub(crate) parent_time_stamp: U32,
    pub(crate) reserved: U32,
    pub(crate) parent_unicode_name: [U16; 256],
    pub(crate) parent_locators: [ParentLocator; 8],
    pub(crate) reserved_end: [u8; 256],
}

/// Place and platform of a stored name of the parent.
#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ParentLocator {
    pub(crate) platform_code: [u8; 4],
    /// In bytes, as in Windows; the specification says sectors.
    pub(crate) platform_data_space: U32,
    pub(crate) platform_data_length: U32,
    pub(crate) reserved: U32,
    pub(crate) platform_data_offset: U64,
}

/// The checksum of headers and footers: the complement of the sum of all bytes except its own.
pub(crate) fn checksum(bytes: &[u8], own: U32) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    !(sum(bytes) - sum(own.as_bytes()))
}
