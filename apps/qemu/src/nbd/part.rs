//! `--offset`: the part of a disk of any format from an offset on.

use std::sync::Arc;

use vdkit::{Disk, OpenOptions, Storage};

use crate::failure::Failure;
use crate::open::registry;
use crate::storages::{DiskStorage, PartOf};

/// The disk from a byte on, as a disk of its own.
///
/// # Errors
/// The disk ends before that byte.
pub fn of(disk: Disk, offset: u64) -> Result<Disk, Failure> {
    let bytes = disk.guest_bytes();
    let past = || {
        let why = format!("Offset {offset} has to be smaller than the image size {bytes}");
        Failure::new(why)
    };
    if offset >= bytes {
        return Err(past());
    }
    let (writable, cache) = (disk.writable(), disk.cache());
    let whole: Arc<dyn Storage> = Arc::new(DiskStorage::new(disk));
    let part = PartOf::new(whole, offset, None)?.ok_or_else(past)?;
    let mut options = OpenOptions::read_only().format("raw").cache(cache);
    options.writable = writable;
    Ok(Disk::open_storage(&registry(), Arc::new(part), &options)?)
}
