//! VDI, VirtualBox's disk images: a header, a table of blocks, and blocks of 1 MiB.
//!
//! The map, its cache, and the order of writes are [`vdkit_blockmap`]'s; here is what stands around
//! them: the header with its count of blocks, making and resizing images, and the check. Byte layout:
//! `docs/formats/vdi.md`.
//!
//! # What is kept with care
//! VirtualBox and QEMU put a new block behind as many blocks as the header counts. So the count is
//! durable before the first entry that needs it, and no gap between blocks outlives a clean close.

mod check;
mod create;
mod driver;
mod envelope;
mod header;

pub use driver::VdiDriver;
pub use header::{Header, ImageType};
