//! Images and disks in memory: made, opened, read, checked.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use vdkit_block::{
    CreateRequest, FormatDriver, GuestOffset, HostOffset, Limits, OfflineImage, OpenRequest,
    Options, Repair, Result, Storage,
};
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
    let writable = storage.caps().writable;
    let request = OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
    open_image(driver, request).unwrap()
}

/// Creates an image of one file; `options` as in `create -o`.
pub fn create_image(
    driver: &dyn FormatDriver,
    storage: Arc<dyn Storage>,
    guest_bytes: u64,
    options: &str,
) {
    let options = Options::parse(driver.name(), driver.options(), [options]).unwrap();
    driver.create(&CreateRequest::new(storage, guest_bytes, options)).unwrap();
}

/// Opens an image without its backing image.
///
/// # Errors
/// Those of the driver.
pub fn open_image(driver: &dyn FormatDriver, request: OpenRequest) -> Result<Disk> {
    let info = driver.describe(&request.storage, &request.limits)?;
    let options = OpenOptions::default().writable(request.writable);
    Ok(Disk::from_format(driver.open(request)?, info, &options))
}

/// Index of the first byte that differs in slices of one length. Slices are compared at once; byte by
/// byte, most of a test's time would go into this.
pub fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

/// The content of the whole disk.
pub fn read_all(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0xee; disk.guest_bytes() as usize];
    disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
    bytes
}

/// A copy of a storage in memory.
pub fn copy_of(storage: &Arc<dyn Storage>) -> Arc<dyn Storage> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    Arc::new(MemoryStorage::from_bytes("copy", &bytes))
}

/// A raw image of `len` bytes, no sector of which is zero.
pub fn backing_image(len: u64) -> Arc<dyn Storage> {
    let bytes: Vec<u8> = (0..len).map(|i| (i / 512 % 255 + 1) as u8).collect();
    Arc::new(MemoryStorage::from_bytes("base", &bytes).read_only())
}

/// The content of an empty disk of `guest_bytes` on a raw backing image.
pub fn content_over(base: Option<Arc<dyn Storage>>, guest_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![0; guest_bytes as usize];
    if let Some(base) = base {
        base.read_padded(&mut bytes, HostOffset(0)).unwrap();
    }
    bytes
}

/// Asserts that a check finds no damage, and no leak unless `leaks_allowed`.
#[track_caller]
pub fn assert_sound(
    driver: &dyn FormatDriver,
    storage: &Arc<dyn Storage>,
    leaks_allowed: bool,
    what: &str,
) {
    let report = driver
        .check(&OfflineImage::new(storage), Repair::Nothing)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(report.corruptions, 0, "{what}: {:#?}", report.findings);
    assert!(leaks_allowed || report.leaks == 0, "{what}: {:#?}", report.findings);
}

/// Saves a storage's content as a sparse file.
pub fn save_sparse(storage: &dyn Storage, path: &Path) {
    let file = File::create(path).unwrap();
    let len = storage.len().unwrap();
    file.set_len(len).unwrap();
    let mut at = 0;
    while at < len {
        let extent = storage.extent_at(HostOffset(at), len - at).unwrap();
        if extent.data {
            let mut bytes = vec![0; extent.len as usize];
            storage.read_at(&mut bytes, HostOffset(at)).unwrap();
            file.write_all_at(&bytes, at).unwrap();
        }
        at += extent.len;
    }
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
