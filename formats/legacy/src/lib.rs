//! Read-only formats, which vdkit can convert to others.
//!
//! | module | format |
//! |---|---|
//! | `qcow1` | qcow version 1: two levels of tables, compressed clusters, backing files |
//! | `qed` | QED: two levels of tables, backing files |
//! | `parallels` | Parallels' disk images, both magic numbers |
//! | `bochs` | Bochs growing images: a catalog, and a bitmap per extent |
//! | `cloop` | compressed loopback images, version 2 |
//! | `dmg` | Apple's disk images (UDIF) |
//!
//! Each implements `Map`, which locates guest bytes. `read_only` makes a format and a check of a
//! map; `tables` caches pieces of tables. Byte layouts: `docs/formats/*.md`.

mod bochs;
mod cloop;
mod dmg;
mod inflate;
mod parallels;
mod property_list;
mod qcow1;
mod qed;
mod read_only;
mod tables;

pub use bochs::BochsDriver;
pub use cloop::CloopDriver;
pub use dmg::DmgDriver;
pub use parallels::ParallelsDriver;
pub use qcow1::QcowDriver;
pub use qed::QedDriver;
