//! Structures of hosted sparse extents as they are in the file. Source: VMware, "Virtual Disk
//! Format 5.0", "Hosted Sparse Extent Header", "Stream-Optimized Compressed Sparse Extents";
//! `docs/formats/vmdk.md`.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) magic: [u8; 4],
    pub(crate) version: U32,
    pub(crate) flags: U32,
    pub(crate) capacity: U64,
    pub(crate) grain_size: U64,
    pub(crate) descriptor_offset: U64,
    pub(crate) descriptor_size: U64,
    pub(crate) num_gtes_per_gt: U32,
    pub(crate) rgd_offset: U64,
    pub(crate) gd_offset: U64,
    pub(crate) overhead: U64,
    pub(crate) unclean_shutdown: u8,
    pub(crate) line_ends: [u8; 4],
    pub(crate) compress_algorithm: U16,
    pub(crate) pad: [u8; 433],
}

/// The marker before a compressed grain.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct GrainMarker {
    /// The grain's first sector on the disk.
    pub(crate) lba: U64,
    /// Bytes of the compressed grain, which follows.
    pub(crate) size: U32,
}

/// Kinds of markers before metadata.
pub(crate) mod mark {
    pub(crate) const END: u32 = 0;
    pub(crate) const TABLE: u32 = 1;
    pub(crate) const DIRECTORY: u32 = 2;
    pub(crate) const FOOTER: u32 = 3;
}

/// The marker before metadata.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct MetadataMarker {
    pub(crate) num_sectors: U64,
    pub(crate) size: U32,
    pub(crate) kind: U32,
    pub(crate) pad: [u8; 496],
}

/// The last sectors of a stream.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct StreamEnd {
    pub(crate) footer_marker: MetadataMarker,
    pub(crate) footer: RawHeader,
    pub(crate) end_marker: MetadataMarker,
}

/// The entries of a table or directory, of 4 or 8 bytes each.
pub(crate) fn entries(raw: &[u8], entry_bytes: u64) -> Vec<u64> {
    if entry_bytes == 8 {
        return raw.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    }
    raw.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word).into()).collect()
}
