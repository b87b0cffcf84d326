//! A storage and a format for the tests of the flat disk.
#![allow(dead_code)] // each test binary uses a part of it

pub mod map;
pub mod memory;

use std::sync::Arc;

use vdkit_block::{Format, FormatDriver, Limits, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_raw::{RawDriver, RawFormat};

#[allow(unused_imports)] // likewise
pub use map::{MapDriver, MapFormat, pack};
#[allow(unused_imports)] // likewise
pub use memory::Memory;

/// A disk of one raw layer.
pub fn raw_disk(storage: Arc<dyn Storage>, writable: bool) -> Disk {
    let info = RawDriver.describe(&storage, &Limits::default()).unwrap();
    let format = Arc::new(RawFormat::new(storage, writable).unwrap());
    let options = OpenOptions::default().writable(writable);
    Disk::from_format(format, info, &options)
}

/// A disk of one layer of the test format.
pub fn map_disk(format: &Arc<MapFormat>, options: &OpenOptions) -> Disk {
    let info = map::info(format.guest_bytes(), None, None);
    Disk::from_format(format.clone(), info, options)
}
