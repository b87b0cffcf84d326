//! Little-endian numbers at places that lie within a buffer.

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// CRC-32C of a structure whose own checksum, at byte 4, counts as zero.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let head = crc32c::crc32c(&bytes[..4]);
    let head = crc32c::crc32c_append(head, &[0; 4]);
    crc32c::crc32c_append(head, &bytes[8..])
}

/// Puts a structure's checksum where it belongs.
pub(crate) fn seal(bytes: &mut [u8]) {
    let sum = checksum(bytes);
    put(bytes, 4, &sum.to_le_bytes());
}

/// Whether a structure has its signature and its checksum.
pub(crate) fn is_sealed(bytes: &[u8], signature: &[u8; 4]) -> bool {
    bytes.starts_with(signature) && u32_at(bytes, 4) == checksum(bytes)
}
