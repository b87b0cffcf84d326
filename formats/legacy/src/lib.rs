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

use std::marker::PhantomData;

use vdkit_block::FormatDriver;

use crate::read_only::ReadOnlyDriver;

/// qcow version 1.
pub const QCOW: &dyn FormatDriver = &ReadOnlyDriver::<qcow1::Qcow>(PhantomData);
/// QED.
pub const QED: &dyn FormatDriver = &ReadOnlyDriver::<qed::Qed>(PhantomData);
/// Parallels.
pub const PARALLELS: &dyn FormatDriver = &ReadOnlyDriver::<parallels::Parallels>(PhantomData);
/// UDIF.
pub const DMG: &dyn FormatDriver = &ReadOnlyDriver::<dmg::Dmg>(PhantomData);
/// cloop.
pub const CLOOP: &dyn FormatDriver = &ReadOnlyDriver::<cloop::Cloop>(PhantomData);
/// Bochs.
pub const BOCHS: &dyn FormatDriver = &ReadOnlyDriver::<bochs::Bochs>(PhantomData);
