//! Disks in memory.

use std::sync::Arc;

use vdkit_block::{FormatDriver, HostOffset, Limits, OpenRequest, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;

/// A disk on an image of `len` bytes with some data; the rest is a hole. For raw images.
pub fn disk_of(driver: &dyn FormatDriver, len: u64, data: &[(u64, &[u8])]) -> Disk {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::with_len("memory", len));
    for (at, bytes) in data {
        storage.write_at(bytes, HostOffset(*at)).unwrap();
    }
    disk_on(driver, storage)
}

/// A disk on an image in a storage.
pub fn disk_on(driver: &dyn FormatDriver, storage: Arc<dyn Storage>) -> Disk {
    let info = driver.describe(&storage, &Limits::default()).unwrap();
    let writable = storage.caps().writable;
    let request = OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
    let options = OpenOptions { writable, ..OpenOptions::default() };
    Disk::from_format(driver.open(request).unwrap(), info, &options)
}

/// Pseudo-random bytes by seed.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    std::iter::repeat_with(step).take(len).collect()
}
