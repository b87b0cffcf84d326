//! Images in memory, and their bytes.

// Each test uses a part.
#![allow(dead_code)]

use std::sync::Arc;

use vdkit_block::{FormatDriver, HostOffset, OfflineImage, Repair, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::read_all;
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
    let storage: Shared = Arc::new(DYNAMIC.image());
    let disk = DYNAMIC.open(&storage, true).unwrap();
    for block in [5, 1, 6, 2] {
        let bytes = vec![block as u8 + 1; 700_000];
        disk.write_at(&bytes, vdkit_block::GuestOffset((block << 20) + 1000)).unwrap();
    }
    disk.close().unwrap();
    storage
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

/// The guest content.
pub fn content(storage: &Shared) -> Vec<u8> {
    read_all(&DYNAMIC.open(storage, false).unwrap())
}

/// Damage and leaks that a check finds.
pub fn found(storage: &Shared, repair: Repair) -> (u64, u64) {
    let report = VdiDriver.check(&OfflineImage::new(storage), repair).unwrap();
    (report.corruptions, report.leaks)
}

pub fn copy_of(storage: &Shared) -> Shared {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    Arc::new(MemoryStorage::from_bytes("copy", &bytes))
}
