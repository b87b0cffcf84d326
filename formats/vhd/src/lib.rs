//! VHD, which QEMU calls vpc: Virtual PC's, Hyper-V's and Azure's disk images. Fixed ones are the disk's
//! bytes and a footer; dynamic ones a table of blocks, each with a bitmap of its sectors;
//! differencing ones are dynamic over a parent. Byte layout: `docs/formats/vpc.md`.
//!
//! The map, its cache, and the order of writes of the latter two are [`vdkit_blockmap`]'s.
//!
//! # How large is the disk?
//! Virtual PC and QEMU (without `force_size`) take cylinders × heads × sectors for it, all others the
//! size field: [`Footer::disk_bytes`]. Our own images give everyone the same answer.

mod amend;
mod azure;
mod check;
mod create;
mod driver;
mod envelope;
mod fixed;
mod footer;
mod header;
mod locate;
mod parent;

pub use azure::azure_faults;
pub use driver::VhdDriver;
pub use footer::{DiskGeometry, DiskType, Footer};
