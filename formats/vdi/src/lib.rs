//! VDI, VirtualBox's disk images: a header, a table of blocks, and blocks of 1 MiB.
//!
//! [`vdkit_blockmap`] has the map, its cache, and the order of writes. This crate has the rest: the
//! header with its block count, creating and resizing images, and the check. Byte layout:
//! `docs/formats/vdi.md`.
//!
//! # Invariants
//! VirtualBox and QEMU append a new block after as many blocks as the header counts. So the count
//! is durable before the first entry that needs it, and a clean close leaves no gap between blocks.

mod check;
mod create;
mod driver;
mod envelope;
mod header;
mod on_disk;

pub use driver::VdiDriver;
