//! Open virtual appliances: an OVF descriptor, disks and a manifest in one tar file (OVA).
//!
//! ```text
//!   appliance.ova ─► tar members ─► descriptor (XML) ─► disks ─► a Window (storage) each
//!                                   manifest ─► hashes to verify ──┘
//!
//!   disks, one pass each ─► sinks that write and hash ─► tar file, whose head is written last
//! ```
//!
//! Nothing is extracted: a disk is a [`Window`] over the bytes of the tar file, so several threads
//! can read several disks at once. Names from the file are compared and displayed but never used as
//! paths ([`PackagedDisk::safe_stem`] makes a safe file name).
//!
//! Sources: DMTF DSP0243 (Open Virtualization Format Specification) 1.1 and 2.1, DSP0004
//! (programmatic units), IEEE 1003.1 ("pax": ustar and pax headers), the GNU tar manual ("Basic Tar
//! Format"). `docs/formats/ova.md` has the layout.

mod descriptor;
mod machine;
mod manifest;
mod package;
mod tar;
mod units;
mod window;
mod writer;
mod xml;

pub use descriptor::{Descriptor, FileReference, VirtualDisk};
pub use machine::{Controller, Firmware, Machine, OPTIONS};
pub use manifest::{Manifest, ManifestEntry};
pub use package::{Package, PackageLimits, PackagedDisk};
pub use tar::{Member, members};
pub use window::Window;
pub use writer::{DiskSink, NewDisk, PackageWriter, WrittenDisk};
