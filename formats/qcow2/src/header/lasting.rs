//! Header fields that stay constant while an image is open.

use vdkit_block::{Codec, HostOffset};

use super::Header;
use crate::layout::autoclear;

/// The header of an open image. Exposes only fields that no operation changes;
/// [`crate::image::Meta`] has sizes, tables, snapshots and bitmaps.
#[derive(Clone, Debug)]
pub(crate) struct LastingHeader(Header);

impl LastingHeader {
    pub(crate) fn new(header: Header) -> Self {
        Self(header)
    }

    pub(crate) fn version(&self) -> u32 {
        self.0.version
    }

    pub(crate) fn codec(&self) -> Codec {
        self.0.codec
    }

    pub(crate) fn has_data_file(&self) -> bool {
        self.0.has_data_file()
    }

    pub(crate) fn data_file_raw(&self) -> bool {
        self.0.data_file_raw()
    }

    pub(crate) fn lazy_refcounts(&self) -> bool {
        self.0.lazy_refcounts()
    }

    /// Incompatible feature bits, with the dirty bit as it was found.
    pub(crate) fn incompatible(&self) -> u64 {
        self.0.incompatible
    }

    /// Autoclear feature bits except the bitmaps bit, which changes.
    pub(crate) fn autoclear(&self) -> u64 {
        self.0.autoclear & !autoclear::BITMAPS
    }

    /// The header of a view: the constant fields, with other tables, and without snapshots of its
    /// own.
    pub(crate) fn with_disk(&self, disk: DiskTables) -> Header {
        Header {
            l1_offset: disk.l1_offset,
            l1_entries: disk.l1_entries,
            guest_bytes: disk.guest_bytes,
            snapshot_count: 0,
            snapshots_offset: HostOffset(0),
            ..self.0.clone()
        }
    }
}

/// The map and size of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskTables {
    pub(crate) l1_offset: HostOffset,
    pub(crate) l1_entries: u32,
    pub(crate) guest_bytes: u64,
}
