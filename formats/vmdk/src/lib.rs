//! VMDK: VMware's disk format, as a map.
//!
//! A disk is a *descriptor*, a text, and *extents*. An extent is a file of plain bytes (flat), or a
//! sparse one with *grains* of 64 KiB, which are mapped by *grain tables*, which are listed in a
//! *grain directory*. The descriptor is a file of its own, or embedded in the single sparse extent.
//!
//! # Reading
//! [`Vmdk::open`] reads the descriptor and the directories. Tables are read for 512 MiB of the disk
//! at a time (`tables`) and kept in a bounded cache. Contiguous grains become one run, and absent
//! tables are skipped in one step (`map`).
//!
//! # Writing
//! Grains are allocated contiguously (`space`), filled by the caller, and linked (`write`); `flush`
//! defines the order in which that becomes durable. Each table has a copy, which is written with
//! it. Streams are written in one pass, by [`StreamWriter`] (`stream`).
//!
//! Byte layouts, sources and invariants: `docs/formats/vmdk.md`.

mod amend;
mod check;
mod cid;
mod copies;
mod create;
mod describe;
mod descriptor;
mod driver;
mod flush;
mod foreign;
pub mod header;
mod image;
mod map;
mod on_disk;
mod open;
mod options;
mod rewrite;
mod source;
mod space;
mod sparse;
mod stream;
mod survey;
mod unpack;
mod used;
mod write;
mod zero;

pub use driver::VmdkDriver;
pub use image::Vmdk;
pub use stream::StreamWriter;
