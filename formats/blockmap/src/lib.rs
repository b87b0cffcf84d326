//! Images that are a table of blocks: one 32-bit entry for each block of the guest disk, which
//! holds the block's place in the file, if any. VDI and dynamic VHD are such images, each with
//! other structures around the table: those are an [`Envelope`].
//!
//! # The life of an allocating write
//!
//! ```text
//!   reserve ──► no entry yet? ──► host blocks at the end of the file, which grows in advance
//!   (the caller writes its bytes; unwritten bytes read as zero)
//!   publish ──► Envelope::new_block (VHD: the sector bitmap) ──► entries change in the cached table
//!   flush   ──► Envelope::before_map (VDI: the block count) ──► sync
//!               ──► changed pages of the table ──► sync
//! ```
//!
//! # Invariants
//! - An entry is durable after its block's data, and after the envelope's record of the block. So a
//!   crash leaves unreferenced blocks, and never an entry without its block.
//! - A flush costs two syncs if blocks were allocated since the previous flush, else one.
//! - The table is read on demand in pieces of 4 KiB; as many are cached as
//!   [`Limits::cache_bytes`](vdkit_block::Limits) allows. Opening for writing reads all of it once,
//!   without caching it: nothing else shows reliably where the file is free.
//! - Guest data never moves while an image is open, except in a resize, which waits for all
//!   requests. A discarded block becomes a hole of the file and keeps its place: other programs
//!   append new blocks after the last one and assume that there are no gaps. [`compact`] closes
//!   gaps.

pub mod compact;
mod flush;
mod geometry;
mod image;
mod resize;
mod sectors;
pub mod survey;
mod table;
mod write;

pub use geometry::{ByteOrder, Geometry, Slot};
pub use image::{BlockImage, Envelope, Opening};
pub use table::{copy_entries, write_blocks, write_holes};
