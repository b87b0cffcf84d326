//! The structures of a qcow2 file as they are on disk, with the specification's field names.
//!
//! All numbers are big-endian and need no alignment, so bytes of the file are viewed as a structure
//! without a copy. Nothing is validated here.
//!
//! Source: the qcow2 specification (QEMU, docs/interop/qcow2).

use vdkit_block::{HostOffset, Result, Storage};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The header without extensions. A version 2 header ends before `incompatible_features`, the
/// smallest version 3 header before `compression_type`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct FixedHeader {
    pub magic: U32,
    pub version: U32,
    pub backing_file_offset: U64,
    pub backing_file_size: U32,
    pub cluster_bits: U32,
    pub size: U64,
    pub crypt_method: U32,
    pub l1_size: U32,
    pub l1_table_offset: U64,
    pub refcount_table_offset: U64,
    pub refcount_table_clusters: U32,
    pub nb_snapshots: U32,
    pub snapshots_offset: U64,
    pub incompatible_features: U64,
    pub compatible_features: U64,
    pub autoclear_features: U64,
    pub refcount_order: U32,
    pub header_length: U32,
    pub compression_type: u8,
    pub padding: [u8; 7],
}

impl FixedHeader {
    /// Reads the header of a valid image. In version 2, the last fields are not part of it.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Self> {
        let mut header = Self::default();
        storage.read_padded(header.as_mut_bytes(), HostOffset(0))?;
        Ok(header)
    }
}

/// Offset in the file of a field of [`FixedHeader`].
macro_rules! header_offset {
    ($field:ident) => {
        std::mem::offset_of!($crate::structures::FixedHeader, $field) as u64
    };
}
pub(crate) use header_offset;

/// What a header extension begins with. Its data follows, padded to a multiple of eight bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ExtensionHead {
    pub kind: U32,
    /// Bytes of the data.
    pub length: U32,
}

impl ExtensionHead {
    /// The head of an extension with `length` bytes of data.
    pub(crate) fn new(kind: u32, length: u64) -> Self {
        Self { kind: kind.into(), length: (length as u32).into() }
    }
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct BitmapsExtensionData {
    pub nb_bitmaps: U32,
    pub reserved: U32,
    pub bitmap_directory_size: U64,
    pub bitmap_directory_offset: U64,
}

impl BitmapsExtensionData {
    /// The data for `count` bitmaps and a directory of `bytes` bytes.
    pub(crate) fn new(count: u32, directory: HostOffset, bytes: u64) -> Self {
        Self {
            nb_bitmaps: count.into(),
            reserved: U32::ZERO,
            bitmap_directory_size: bytes.into(),
            bitmap_directory_offset: directory.0.into(),
        }
    }
}

/// The data of the encryption extension: the place of the LUKS header.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct EncryptionExtensionData {
    pub offset: U64,
    pub length: U64,
}

/// An entry of the feature name table.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct FeatureName {
    /// 0: incompatible, 1: compatible, 2: autoclear.
    pub kind: u8,
    pub bit: u8,
    /// Padded with zeroes.
    pub name: [u8; 46],
}

/// The fixed part of an entry of the snapshot table. Extra data, ID and name follow; entries begin
/// at multiples of eight bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct SnapshotTableEntry {
    pub l1_table_offset: U64,
    pub l1_size: U32,
    pub id_str_size: U16,
    pub name_size: U16,
    pub date_sec: U32,
    pub date_nsec: U32,
    pub vm_clock_nsec: U64,
    pub vm_state_size: U32,
    pub extra_data_size: U32,
}

impl SnapshotTableEntry {
    pub(crate) fn id_and_name_bytes(&self) -> usize {
        usize::from(self.id_str_size.get()) + usize::from(self.name_size.get())
    }
}

/// The known extra data of a snapshot. In the file it may end before any of these fields.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct SnapshotExtraData {
    pub vm_state_size_large: U64,
    pub disk_size: U64,
    pub icount: U64,
}

/// The fixed part of an entry of the bitmap directory. Extra data and name follow; entries begin at
/// multiples of eight bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct BitmapDirectoryEntry {
    pub bitmap_table_offset: U64,
    pub bitmap_table_size: U32,
    pub flags: U32,
    pub kind: u8,
    pub granularity_bits: u8,
    pub name_size: U16,
    pub extra_data_size: U32,
}

impl BitmapDirectoryEntry {
    /// Bytes of extra data and name.
    pub(crate) fn variable_bytes(&self) -> usize {
        self.extra_data_size.get() as usize + usize::from(self.name_size.get())
    }

    /// Bytes up to the next entry.
    pub(crate) fn bytes(&self) -> usize {
        (size_of::<Self>() + self.variable_bytes()).next_multiple_of(8)
    }
}

/// The structure at the start of `bytes`; fields beyond their end are zero.
pub(crate) fn padded<T: Default + FromBytes + IntoBytes>(bytes: &[u8]) -> T {
    let mut found = T::default();
    let there = bytes.len().min(size_of::<T>());
    found.as_mut_bytes()[..there].copy_from_slice(&bytes[..there]);
    found
}

/// The entries of a table; bytes after the last whole one are ignored.
pub(crate) fn entries<T: FromBytes + Immutable + Unaligned>(table: &[u8]) -> &[T] {
    <[T]>::ref_from_prefix(table).map_or(&[], |(entries, _)| entries)
}

/// As [`entries`], to be changed in place.
pub(crate) fn entries_mut<T: FromBytes + IntoBytes + Unaligned>(table: &mut [u8]) -> &mut [T] {
    <[T]>::mut_from_prefix(table).map_or(&mut [], |(entries, _)| entries)
}

/// The entries of a table of 64-bit words: L1, L2, refcount or bitmap table.
pub(crate) fn words(table: &[u8]) -> &[U64] {
    entries(table)
}

/// As [`words`], to be changed in place.
pub(crate) fn words_mut(table: &mut [u8]) -> &mut [U64] {
    entries_mut(table)
}

pub(crate) fn decode_words(table: &[u8]) -> Vec<u64> {
    words(table).iter().map(|word| word.get()).collect()
}

pub(crate) fn encode_words(words: &[u64]) -> Vec<u8> {
    let mut table = vec![0; words.len() * 8];
    for (out, &word) in words_mut(&mut table).iter_mut().zip(words) {
        out.set(word);
    }
    table
}
