//! Disks over a storage, for tests above the formats.

use std::sync::Arc;

use vdkit_block::{CacheMode, FormatDriver, Limits, OpenRequest, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::Qcow2Driver;
use vdkit_testbase::create_image;
pub use vdkit_testbase::units::MIB;

/// An empty qcow2 image, open for writing; `options` as in `create -o`.
///
/// # Panics
/// If it cannot be made.
pub fn qcow2(storage: Arc<dyn Storage>, guest_bytes: u64, options: &str) -> Disk {
    create_image(&Qcow2Driver, storage.clone(), guest_bytes, options);
    reopen(storage, true)
}

/// Opens it again.
///
/// # Panics
/// If it cannot be opened.
pub fn reopen(storage: Arc<dyn Storage>, writable: bool) -> Disk {
    reopen_in(CacheMode::Writeback, storage, writable)
}

/// Opens it again in a cache mode.
///
/// # Panics
/// If it cannot be opened.
pub fn reopen_in(cache: CacheMode, storage: Arc<dyn Storage>, writable: bool) -> Disk {
    let (driver, limits) = (Qcow2Driver, Limits::default());
    let info = driver.describe(&storage, &limits).unwrap();
    let format = driver.open(OpenRequest { storage, files: Vec::new(), writable, limits }).unwrap();
    Disk::from_format(format, info, &OpenOptions::default().writable(writable).cache(cache))
}
