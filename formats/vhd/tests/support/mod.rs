//! Images in memory, and their bytes.

// Each test uses a part.
#![allow(dead_code)]

use std::sync::Arc;

use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, GuestOffset, HostOffset, Limits,
    OfflineImage, Options, Repair, Storage,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::read_all;
use vdkit_testbase::trials::Trial;
use vdkit_vhd::VhdDriver;

pub const DYNAMIC: Trial = Trial::new(&VhdDriver, "force_size=on", 16 << 20);
pub const FIXED: Trial =
    Trial { options: "force_size=on,subformat=fixed", guest_bytes: 2 << 20, ..DYNAMIC };

pub type Shared = Arc<dyn Storage>;

/// Offsets of the dynamic header, the table and the first block in vdkit's images.
pub const HEADER: u64 = 512;
pub const TABLE: u64 = 1536;
pub const BLOCKS: u64 = 2048;
pub const STRIDE: u64 = (2 << 20) + 512;

/// An image with blocks 5, 1, 6 and 2 written, in this order.
pub fn written() -> Shared {
    let storage: Shared = Arc::new(DYNAMIC.image());
    let disk = DYNAMIC.open(&storage, true).unwrap();
    for block in [5, 1, 6, 2] {
        let bytes = vec![block as u8 + 1; 700_000];
        disk.write_at(&bytes, GuestOffset((block << 21) + 1000)).unwrap();
    }
    disk.close().unwrap();
    storage
}

pub fn put(storage: &Shared, at: u64, word: u32) {
    storage.write_at(&word.to_be_bytes(), HostOffset(at)).unwrap();
}

pub fn get(storage: &Shared, at: u64) -> u32 {
    let mut bytes = [0; 4];
    storage.read_at(&mut bytes, HostOffset(at)).unwrap();
    u32::from_be_bytes(bytes)
}

/// Corrects the checksum of a structure of `len` bytes.
pub fn sum(storage: &Shared, at: u64, len: usize, field: u64) {
    put(storage, at + field, 0);
    let mut bytes = vec![0; len];
    storage.read_at(&mut bytes, HostOffset(at)).unwrap();
    put(storage, at + field, !bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>());
}

pub fn content(storage: &Shared) -> Vec<u8> {
    read_all(&DYNAMIC.open(storage, false).unwrap())
}

/// Damage and leaks that a check finds.
pub fn found(storage: &Shared, repair: Repair) -> (u64, u64) {
    let report = VhdDriver.check(&OfflineImage::new(storage), repair).unwrap();
    (report.corruptions, report.leaks)
}

pub fn copy_of(storage: &Shared) -> Shared {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    Arc::new(MemoryStorage::from_bytes("copy", &bytes))
}

/// Creates an image with a parent.
pub fn create_over(storage: &Shared, base: &Shared, name: &str) -> vdkit_block::Result<()> {
    let info = VhdDriver.describe(base, &Limits::default())?;
    VhdDriver.create(&CreateRequest {
        storage: storage.clone(),
        files: Vec::new(),
        guest_bytes: info.virtual_size,
        options: Options::default(),
        backing: Some(BackingRef {
            identity: info.identity,
            ..BackingRef::new(name, Some("vpc".to_owned()))
        }),
        backing_bytes: Some(info.virtual_size),
    })
}
