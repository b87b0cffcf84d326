//! Images that are a table of blocks: one 32-bit entry for each block of the guest disk, which says
//! where in the file that block is, if anywhere. VDI and dynamic VHD are this, with other things
//! around it: those are an [`Envelope`].
//!
//! # The life of an allocating write
//!
//! ```text
//!   reserve ──► no entry yet? ──► host blocks at the end of the file, made longer ahead of need
//!   (the caller writes its bytes; what was never written reads as zero)
//!   publish ──► Envelope::new_block (VHD: the sector bitmap) ──► entries change in the cached table
//!   flush   ──► Envelope::before_map (VDI: how many blocks there are) ──► sync
//!               ──► changed pieces of the table ──► sync
//! ```
//!
//! # What holds
//! - An entry is durable after its block's data, and after what the envelope says of the block.
//!   So a crash leaves blocks that nothing refers to, and never an entry without its block.
//! - A flush costs two syncs if blocks were allocated since the one before, else one.
//! - The table is read in pieces of 4 KiB as they are needed, of which as many are kept as
//!   [`Limits::cache_bytes`](vdkit_block::Limits) allows. Opening for writing reads all of it once,
//!   without keeping it: nothing else tells reliably where the file is free.
//! - Guest data never moves while an image is open but for resizing, which waits for all requests.
//!   A discarded block becomes a hole of the file and keeps its place: the makers of both formats put
//!   new blocks behind the last one and believe that there are no gaps. [`compact`] closes gaps.

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
pub use image::{BlockImage, Envelope, NewBlocks, Opening};
pub use table::{read_entries, write_entries, write_holes};
