//! VMDK: VMware's disk format, as a map.
//!
//! A disk is a *descriptor*, a text, and *extents*. An extent is a file of plain bytes (flat), or a
//! sparse one, with *grains* of 64 KiB that *grain tables* find, which a *grain directory* finds.
//! The descriptor is a file of its own, or stands in the one sparse extent that there is.
//!
//! # Reading
//! [`Vmdk::open`] reads the descriptor and the directories. Tables are read 512 MiB of the disk at a
//! time (`tables`) and kept in a bounded cache. Grains that lie side by side become one run, and
//! absent tables are skipped in one step (`map`).
//!
//! # Writing
//! Grains are taken behind each other (`space`), filled by the caller, and linked (`write`);
//! `flush` has the order in which that becomes durable. Each table has a copy, which is written with
//! it. Streams are written in one pass, by [`StreamWriter`] (`stream`).
//!
//! Byte layouts, sources and invariants: `docs/formats/vmdk.md`.

mod amend;
pub mod check;
mod cid;
mod create;
mod describe;
pub mod descriptor;
mod driver;
mod flush;
mod foreign;
pub mod header;
mod image;
mod map;
mod mend;
mod open;
mod options;
mod rewrite;
mod source;
mod space;
mod sparse;
mod stream;
mod unpack;
mod write;
mod zero;

pub use driver::VmdkDriver;
pub use image::Vmdk;
pub use stream::StreamWriter;
