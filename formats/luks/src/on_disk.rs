//! The header as it is in the file: LUKS1 on-disk format specification, section 3.

use std::mem::offset_of;

use zerocopy::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::header::{SECTOR_BYTES, SLOTS};

/// The state of a key slot.
pub(crate) const ACTIVE: u32 = 0x00ac_71f3;
pub(crate) const INACTIVE: u32 = 0x0000_dead;

#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawHeader {
    pub(crate) magic: [u8; 6],
    pub(crate) version: U16,
    pub(crate) cipher_name: [u8; 32],
    pub(crate) cipher_mode: [u8; 32],
    pub(crate) hash_spec: [u8; 32],
    /// Sectors from the start of the header to the encrypted disk.
    pub(crate) payload_offset: U32,
    pub(crate) key_bytes: U32,
    pub(crate) mk_digest: [u8; 20],
    pub(crate) mk_digest_salt: [u8; 32],
    pub(crate) mk_digest_iterations: U32,
    pub(crate) uuid: [u8; 40],
    pub(crate) key_slots: [Slot; SLOTS],
}

#[derive(Clone, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Slot {
    pub(crate) active: U32,
    pub(crate) iterations: U32,
    pub(crate) salt: [u8; 32],
    /// Sectors from the start of the header to the key material.
    pub(crate) key_material_offset: U32,
    pub(crate) stripes: U32,
}

impl Slot {
    pub(crate) fn is_active(&self) -> bool {
        self.active == ACTIVE
    }

    /// Bytes from the start of the header to the key material.
    pub(crate) fn material_offset(&self) -> u64 {
        u64::from(self.key_material_offset) * SECTOR_BYTES
    }
}

/// The offset of a key slot in the header.
pub(crate) fn slot_at(number: usize) -> usize {
    offset_of!(RawHeader, key_slots) + number * size_of::<Slot>()
}
