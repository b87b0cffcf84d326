//! Images in memory, and their bytes.

// Each test uses a part.
#![allow(dead_code)]

use std::sync::Arc;

use vdkit_block::{HostOffset, Storage};
use vdkit_testbase::trials::Trial;
use vdkit_vdi::VdiDriver;

pub const DYNAMIC: Trial = Trial::new(&VdiDriver, "", 8 << 20);

/// Offsets of header fields.
pub mod field {
    pub const VERSION: u64 = 68;
    pub const SIZE: u64 = 72;
    pub const TYPE: u64 = 76;
    pub const TABLE: u64 = 0x154;
    pub const DATA: u64 = 0x158;
    pub const DISK_BYTES: u64 = 0x170;
    pub const BLOCK_BYTES: u64 = 0x178;
    pub const EXTRA: u64 = 0x17c;
    pub const ENTRIES: u64 = 0x180;
    pub const ALLOCATED: u64 = 0x184;
    pub const UUID_LINK: u64 = 0x1a8;
}

pub type Shared = Arc<dyn Storage>;

/// An image with blocks 5, 1, 6 and 2 written, in this order.
pub fn written() -> Shared {
    DYNAMIC.written(1 << 20)
}

pub fn put(storage: &Shared, at: u64, word: u32) {
    storage.write_at(&word.to_le_bytes(), HostOffset(at)).unwrap();
}

pub fn get(storage: &Shared, at: u64) -> u32 {
    let mut bytes = [0; 4];
    storage.read_at(&mut bytes, HostOffset(at)).unwrap();
    u32::from_le_bytes(bytes)
}

/// Offset of a block's table entry.
pub fn entry(storage: &Shared, block: u64) -> u64 {
    u64::from(get(storage, field::TABLE)) + block * 4
}
