//! The qcow2 format: the map, the allocator and the order of metadata writes.
//!
//! ```text
//!   driver ── create, describe, measure, check      the format driver
//!      │      options, bitmaps
//!   header ── layout, entry, structures      encoding of the bytes
//!      │
//!    image ── map ── slices      guest offset to host offset (cache of L2 tables)
//!      │
//!    write, compressed, zero         allocating and freeing space of guest clusters
//!      │
//!    allocator ── pool           host clusters: preallocated, freed late
//!      │  growth   refcounts     growing the file, and its refcount blocks
//!    flush ── switch             the order of writes
//!               │
//!           snapshots            internal snapshots of the disk
//! ```
//!
//! # The life of a host cluster
//!
//! free → reserved (refcount 1, durable before an L2 entry that refers to it) → referenced →
//! unlinked (removed from the map in memory) → released (removed on disk too) → reserved again,
//! after all requests that resolved it have ended. Closing the image frees reserved clusters. A
//! crash at any moment leaves a consistent image; reserved and unlinked clusters become leaks.
//!
//! Only `pool` hands clusters out, and each is in it at most once. A cluster enters the pool when its
//! refcount is raised from 0 (`reserve_run` in `allocator`, also for each run of a growing file), when
//! its last reference is gone (`drop_expired_references`), or when the caller that took it returns it
//! unused. It leaves by `Pool::take_at` and `Pool::drain` alone.
//!
//! The exception: where the file grows, at the *frontier*, `growth` takes clusters for new refcount
//! blocks and a larger refcount table itself, under the lock under which the pool grows from there.

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
mod metadata;
mod options;
mod pool;
mod refcounts;
mod resize;
mod slices;
#[cfg(test)]
mod slices_tests;
pub mod snapshots;
mod structures;
mod switch;
mod sync;
mod write;
mod zero;

pub use driver::Qcow2Driver;
pub use image::Qcow2;
