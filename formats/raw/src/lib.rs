//! Raw images: guest byte *n* is byte *n* of the file.
//!
//! The map is the identity, so nothing is reserved or published: writes go in place, even into a
//! hole of the host file, and the file system allocates. This crate reports holes
//! ([`Format::resolve`](vdkit_block::Format::resolve)), creates images and resizes them.
//!
//! # Size
//! A guest disk consists of 512-byte sectors. A file whose length is not a multiple of 512 is
//! rounded up, as in QEMU; the missing bytes read as zero, and writing them extends the file.
//!
//! # Holes
//! Holes are queried for maps and copies only, never for reads: see
//! [`Format::resolve_for_io`](vdkit_block::Format::resolve_for_io). They are queried only if the
//! file has fewer blocks than its length needs. A run of data is cached, so that a scan in small
//! steps makes one query per run.

mod driver;
mod format;

pub use driver::RawDriver;
pub use format::RawFormat;

/// Bytes of a sector, to which the guest disk is rounded up.
const SECTOR_BYTES: u64 = 512;
