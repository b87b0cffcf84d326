//! qcow2, whole: the map, the allocator and the order of metadata writes.
//!
//! ```text
//!   driver ── create, describe, measure, check      the front door
//!      │      options, bitmaps
//!   header ── layout, entry      what the bytes mean
//!      │
//!    image ── map ── slices      where guest bytes are (cache of L2 tables)
//!      │
//!    write, compressed, zero         space for new bytes, and giving it up
//!      │
//!    allocator ── pool           host clusters: reserved ahead, freed late
//!      │  growth   refcounts     a longer file, and what describes it
//!    flush ── switch             the order in which all that reaches the disk
//!               │
//!           snapshots            the disk as it was, kept inside the image
//! ```
//!
//! # One life for a host cluster
//!
//! free → reserved (refcount 1, durable ahead of its use) → referenced → unlinked (gone from the
//! map in memory) → released (gone on disk too) → reserved again or free, once no request that
//! resolved to it is in flight. A crash at any moment leaves an image that is consistent; reserved
//! and unlinked clusters are leaks then.

mod allocator;
mod amend;
pub mod bitmaps;
pub mod check;
pub mod codec;
mod compressed;
mod create;
mod describe;
mod driver;
mod empty;
mod encrypted;
pub mod entry;
mod flush;
mod growth;
pub mod header;
mod image;
mod l1;
pub mod layout;
mod map;
mod measure;
mod options;
mod pool;
mod refcounts;
mod resize;
mod slices;
#[cfg(test)]
mod slices_tests;
pub mod snapshots;
mod switch;
mod sync;
mod write;
mod zero;

pub use driver::Qcow2Driver;
pub use image::Qcow2;
