//! Fields of structures: GUIDs and checksums. Numbers are little-endian.

use uuid::Uuid;
use vdkit_block::bytes::{array, le32};

/// A stored GUID: three little-endian numbers and eight bytes.
pub(crate) fn guid_at(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(array(bytes, at))
}

/// A GUID from text, with or without hyphens and braces.
pub(crate) fn parse_guid(text: &str) -> Option<Uuid> {
    Uuid::try_parse(text.trim()).ok()
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// CRC-32C of a structure with its checksum field, at byte 4, taken as zero.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let head = crc32c::crc32c(&bytes[..4]);
    let head = crc32c::crc32c_append(head, &[0; 4]);
    crc32c::crc32c_append(head, &bytes[8..])
}

/// Writes a structure's checksum field.
pub(crate) fn seal(bytes: &mut [u8]) {
    let sum = checksum(bytes);
    put(bytes, 4, &sum.to_le_bytes());
}

/// Whether a structure has the signature and a correct checksum.
pub(crate) fn is_sealed(bytes: &[u8], signature: &[u8; 4]) -> bool {
    bytes.starts_with(signature) && le32(bytes, 4) == checksum(bytes)
}
