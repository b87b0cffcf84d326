//! VHD, which QEMU calls vpc: disk images of Virtual PC, Hyper-V and Azure. Fixed images are the
//! bytes of the disk and a footer. Dynamic images are a table of blocks, each with a sector bitmap.
//! Differencing images are dynamic ones with a parent. Byte layout: `docs/formats/vpc.md`.
//!
//! [`vdkit_blockmap`] has the map, its cache, and the order of writes of the latter two kinds.
//!
//! # How large is the disk?
//! Virtual PC and QEMU (without `force_size`) use cylinders × heads × sectors, all others the size
//! field: `Footer::disk_bytes`. In images that vdkit creates, both are equal.

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
mod on_disk;
mod parent;

pub use azure::azure_faults;
pub use driver::VhdDriver;
