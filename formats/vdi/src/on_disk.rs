//! The header as it is in the file: `docs/formats/vdi.md`.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version 1. All fields that change are in this first sector.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) text: [u8; 64],
    pub(crate) magic: U32,
    pub(crate) version: U32,
    /// Bytes of the header from this field on.
    pub(crate) header_bytes: U32,
    pub(crate) image_type: U32,
    pub(crate) flags: U32,
    pub(crate) comment: [u8; 256],
    pub(crate) table_offset: U32,
    pub(crate) data_offset: U32,
    pub(crate) geometry: [U32; 3],
    pub(crate) sector_bytes: U32,
    pub(crate) unused: U32,
    pub(crate) disk_bytes: U64,
    pub(crate) block_bytes: U32,
    pub(crate) block_extra: U32,
    pub(crate) blocks: U32,
    pub(crate) blocks_allocated: U32,
    pub(crate) uuid: [u8; 16],
    pub(crate) uuid_modify: [u8; 16],
    pub(crate) uuid_link: [u8; 16],
    pub(crate) uuid_parent: [u8; 16],
    pub(crate) rest: [u8; 56],
}

/// Version 0.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader0 {
    pub(crate) text: [u8; 64],
    pub(crate) magic: U32,
    pub(crate) version: U32,
    pub(crate) image_type: U32,
    pub(crate) flags: U32,
    pub(crate) comment: [u8; 256],
    pub(crate) geometry: [U32; 3],
    pub(crate) sector_bytes: U32,
    pub(crate) disk_bytes: U64,
    pub(crate) block_bytes: U32,
    pub(crate) blocks: U32,
    pub(crate) blocks_allocated: U32,
    pub(crate) uuid: [u8; 16],
    pub(crate) uuid_modify: [u8; 16],
    pub(crate) uuid_link: [u8; 16],
    /// The table begins here; the blocks follow it.
    pub(crate) table: [u8; 92],
}
