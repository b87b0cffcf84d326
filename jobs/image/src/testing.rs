//! In-memory disks for tests.

use std::sync::Arc;

use vdkit_block::{FormatDriver, HostOffset, Limits, OpenRequest, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_raw::RawDriver;
use vdkit_storage::MemoryStorage;

/// A raw disk of `len` bytes with some data; the rest is a hole.
pub(crate) fn raw_disk(len: u64, data: &[(u64, &[u8])]) -> Disk {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::with_len("memory", len));
    for (at, bytes) in data {
        storage.write_at(bytes, HostOffset(*at)).unwrap();
    }
    disk_on(&RawDriver, storage)
}

/// A disk on an image in a storage.
pub(crate) fn disk_on(driver: &dyn FormatDriver, storage: Arc<dyn Storage>) -> Disk {
    let info = driver.describe(&storage, &Limits::default()).unwrap();
    let writable = storage.caps().writable;
    let request = OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
    let options = OpenOptions { writable, ..OpenOptions::default() };
    Disk::from_format(driver.open(request).unwrap(), info, &options)
}
