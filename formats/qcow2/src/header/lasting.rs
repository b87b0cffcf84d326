//! What a header says for as long as an image is open.

use vdkit_block::{Codec, HostOffset};

use super::Header;
use crate::layout::autoclear;

/// The header of an open image, of which only what no operation changes can be asked for. Sizes,
/// tables, snapshots and bitmaps change; [`crate::image::Meta`] knows them.
#[derive(Clone, Debug)]
pub(crate) struct LastingHeader(Header);

impl LastingHeader {
    /// Of a header as it was read.
    pub(crate) fn new(header: Header) -> Self {
        Self(header)
    }

    /// 2 or 3.
    pub(crate) fn version(&self) -> u32 {
        self.0.version
    }

    /// How compressed clusters are compressed.
    pub(crate) fn codec(&self) -> Codec {
        self.0.codec
    }

    /// See [`Header::has_data_file`].
    pub(crate) fn has_data_file(&self) -> bool {
        self.0.has_data_file()
    }

    /// See [`Header::data_file_raw`].
    pub(crate) fn data_file_raw(&self) -> bool {
        self.0.data_file_raw()
    }

    /// See [`Header::lazy_refcounts`].
    pub(crate) fn lazy_refcounts(&self) -> bool {
        self.0.lazy_refcounts()
    }

    /// Incompatible feature bits, with the dirty bit as it was found.
    pub(crate) fn incompatible(&self) -> u64 {
        self.0.incompatible
    }

    /// Autoclear feature bits other than that of the bitmaps, which comes and goes.
    pub(crate) fn autoclear(&self) -> u64 {
        self.0.autoclear & !autoclear::BITMAPS
    }

    /// The header of a view: what lasts, with other tables, and without snapshots of its own.
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

/// Where a disk's map is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskTables {
    /// Host offset of its L1 table.
    pub(crate) l1_offset: HostOffset,
    /// Entries of that.
    pub(crate) l1_entries: u32,
    /// Bytes of the disk.
    pub(crate) guest_bytes: u64,
}
