//! Raw images: guest byte *n* is byte *n* of the file.
//!
//! The map is the identity, so nothing is ever reserved or published: a write goes in place, also
//! into a hole of the host file, and the file system finds the space. What is left for this crate
//! is to say where holes are ([`Format::resolve`](vdkit_block::Format::resolve)), to make an image
//! and to change its size.
//!
//! # Size
//! A guest disk is made of 512-byte sectors. A file whose length is not a multiple of 512 is shown
//! rounded up, as QEMU does; the missing bytes read as zero, and writing them makes the file
//! longer.
//!
//! # Holes
//! The file system's word on holes is a hint and is asked for maps and copies only, never for
//! reads: see [`Format::resolve_for_io`](vdkit_block::Format::resolve_for_io). It is asked only
//! where the file has fewer blocks than its length needs, and a run of data, once found, is
//! remembered, so that a scan in small steps asks once a run.

mod driver;
mod format;

pub use driver::RawDriver;
pub use format::RawFormat;

/// Bytes of a sector, to which the guest disk is rounded up.
const SECTOR_BYTES: u64 = 512;
