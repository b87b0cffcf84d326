//! Constants of the format and the arithmetic of its tables.
//!
//! Source: the qcow2 specification (QEMU, docs/interop/qcow2), sections "Header", "Host cluster
//! management", "Cluster mapping" and "Extended L2 Entries".

use std::mem::offset_of;

use vdkit_block::{GuestOffset, HostOffset};

use crate::structures::FixedHeader;

/// The first four bytes of each image: "QFI" and 0xfb.
pub const MAGIC: u32 = 0x5146_49fb;

/// Bytes of a version 2 header.
pub const V2_HEADER_BYTES: u32 = offset_of!(FixedHeader, incompatible_features) as u32;
/// Bytes of the smallest version 3 header.
pub const V3_HEADER_BYTES_MIN: u32 = offset_of!(FixedHeader, compression_type) as u32;
/// Bytes of the version 3 headers that vdkit writes (with compression type).
pub const V3_HEADER_BYTES: u32 = size_of::<FixedHeader>() as u32;

/// Bytes that a disk writes atomically.
pub(crate) const SECTOR: usize = 512;

/// Smallest and largest `cluster_bits`.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Smallest `cluster_bits` of an image with subclusters (16 KiB).
pub const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;
/// Subclusters in a cluster of an image with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;

/// Largest refcount table that is accepted, in bytes (QEMU's bound).
pub const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// Largest L1 table that is accepted, in bytes (QEMU's bound).
pub const L1_BYTES_MAX: u64 = 32 << 20;
/// Most snapshots that are accepted (QEMU's bound).
pub const SNAPSHOTS_MAX: u32 = 65536;
/// Longest backing file name, in bytes.
pub const BACKING_NAME_BYTES_MAX: u32 = 1023;
/// Table entries hold host offsets of 56 bits.
pub const HOST_OFFSET_END: u64 = 1 << 56;

/// Incompatible features: an image with an unknown bit must not be opened.
pub mod incompatible {
    /// Refcounts may be wrong; set while they are kept lazily.
    pub const DIRTY: u64 = 1 << 0;
    /// Metadata is damaged; the image must not be written to.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in another file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// The compression type field is not zlib.
    pub const COMPRESSION_TYPE: u64 = 1 << 3;
    /// L2 entries have 128 bits and subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// The bits that vdkit supports.
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;
}

/// Compatible features: unknown bits may be ignored and are kept.
pub mod compatible {
    /// A writer may leave refcounts out of date while the dirty bit is set.
    pub const LAZY_REFCOUNTS: u64 = 1 << 0;
}

/// Autoclear features: a writer clears unknown bits.
pub mod autoclear {
    /// The bitmaps extension agrees with the data.
    pub const BITMAPS: u64 = 1 << 0;
    /// The data file can be read as a raw image.
    pub const DATA_FILE_RAW: u64 = 1 << 1;
    /// The bits that vdkit maintains.
    pub(crate) const KNOWN: u64 = BITMAPS | DATA_FILE_RAW;
}

/// Header extension types.
pub mod extension {
    /// Ends the list.
    pub const END: u32 = 0;
    /// Format name of the backing file.
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    /// Names of feature bits.
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    /// Location of the bitmap directory.
    pub const BITMAPS: u32 = 0x2385_2875;
    /// Location of the LUKS header.
    pub const ENCRYPTION: u32 = 0x0537_be77;
    /// Name of the data file.
    pub const DATA_FILE: u32 = 0x4441_5441;
    /// vdkit's own type: fills space, or replaces a removed bitmaps extension. Other programs
    /// ignore unknown types.
    pub const PADDING: u32 = 0x7664_7064;
    /// The types that vdkit supports.
    pub(crate) const KNOWN: [u32; 6] =
        [BACKING_FORMAT, FEATURE_NAMES, BITMAPS, ENCRYPTION, DATA_FILE, PADDING];
}

/// Host offset bits of an L1 or standard L2 entry.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// The cluster (or L2 table) has one reference, so it may be written in place.
pub const COPIED: u64 = 1 << 63;
/// The L2 entry describes a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes (version 3, standard entries).
pub const ZERO: u64 = 1;
/// Bits of an L1 entry that must be 0.
pub const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);
/// Bits of a standard L2 entry of a plain cluster that must be 0.
pub const L2_RESERVED: u64 = !(OFFSET_MASK | COPIED | COMPRESSED | ZERO);

/// Sizes that follow from the header, all powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// log2 of the cluster size.
    pub cluster_bits: u32,
    /// L2 entries have two words.
    pub extended: bool,
    /// log2 of the width of a refcount in bits.
    pub refcount_order: u32,
}

impl Geometry {
    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry.
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// 64-bit words of an L2 entry.
    pub(crate) fn l2_entry_words(&self) -> usize {
        if self.extended { 2 } else { 1 }
    }

    /// log2 of the entries of an L2 table (one cluster).
    pub fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended { 4 } else { 3 }
    }

    /// Entries of an L2 table.
    pub fn l2_entries(&self) -> u64 {
        1 << self.l2_bits()
    }

    /// Guest bytes that one L2 table maps.
    pub fn l2_span(&self) -> u64 {
        1 << (self.l2_bits() + self.cluster_bits)
    }

    /// L1 entries that a disk of this size needs.
    pub fn l1_entries_for(&self, guest_bytes: u64) -> u64 {
        guest_bytes.div_ceil(self.l2_span())
    }

    /// The L1 index of a guest offset.
    pub fn l1_index(&self, at: GuestOffset) -> u64 {
        at.0 >> (self.l2_bits() + self.cluster_bits)
    }

    /// The L2 table index of a guest offset.
    pub fn l2_index(&self, at: GuestOffset) -> u64 {
        (at.0 >> self.cluster_bits) & (self.l2_entries() - 1)
    }

    /// The offset within its cluster of a guest offset.
    pub fn in_cluster(&self, at: GuestOffset) -> u64 {
        at.0 & (self.cluster_bytes() - 1)
    }

    /// The smallest unit that can be allocated or zeroed separately.
    pub fn subcluster_bytes(&self) -> u64 {
        if self.extended {
            self.cluster_bytes() / u64::from(SUBCLUSTERS)
        } else {
            self.cluster_bytes()
        }
    }

    /// Bits of one refcount.
    pub fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// The largest value of a refcount.
    pub fn refcount_max(&self) -> u64 {
        if self.refcount_order == 6 { u64::MAX } else { (1 << self.refcount_bits()) - 1 }
    }

    /// log2 of the refcounts in a block (one cluster).
    pub fn refcount_block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Refcounts in a block.
    pub fn refcount_block_entries(&self) -> u64 {
        1 << self.refcount_block_bits()
    }

    /// The host cluster number of a host offset.
    pub fn host_cluster(&self, at: HostOffset) -> u64 {
        at.0 >> self.cluster_bits
    }

    /// Bits of the host offset in the entry of a compressed cluster; the sector count is above
    /// them.
    pub fn compressed_offset_bits(&self) -> u32 {
        62 - (self.cluster_bits - 8)
    }
}
