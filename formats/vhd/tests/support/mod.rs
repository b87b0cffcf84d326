//! Images in memory, and their bytes.

// Each test uses a part.
#![allow(dead_code)]

use std::sync::Arc;

use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, HostOffset, Limits, Options, Storage,
};
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
    DYNAMIC.written(2 << 20)
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

/// Creates an image with a parent.
pub fn create_over(storage: &Shared, base: &Shared, name: &str) -> vdkit_block::Result<()> {
    let info = VhdDriver.describe(base, &Limits::default())?;
    let backing =
        BackingRef { identity: info.identity, ..BackingRef::new(name, Some("vpc".to_owned())) };
    VhdDriver.create(&CreateRequest {
        backing: Some(backing),
        backing_bytes: Some(info.virtual_size),
        ..CreateRequest::new(storage.clone(), info.virtual_size, Options::default())
    })
}
