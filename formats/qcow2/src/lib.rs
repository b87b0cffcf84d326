//! The qcow2 format: the map, the allocator and the order of metadata writes.
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
//! free → reserved (refcount 1, durable before its use) → referenced → unlinked (removed from the
//! map in memory) → released (removed on disk too) → reserved again or free, once no in-flight
//! request uses it. A crash at any moment leaves a consistent image; reserved and unlinked clusters
//! become leaks.

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
