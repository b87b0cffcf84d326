//! From a file name to one flat disk.
//!
//! An image may have a backing image, which may have one in turn; its data may be in a further
//! file. This crate opens them all, as far as the caller's policy allows, and presents one
//! [`Disk`]: reads, writes, zeroes, discards, and a flattened map. Everything above (jobs, servers)
//! works with a `Disk` and never with a chain.
//!
//! ```text
//!   path ─► walk ──► reference (policy, race-free open) ──► storage
//!             │  └─► registry (probe) ──────────────────► driver
//!             ▼
//!   Disk { layers: [top, backing, …] }
//!     │ read.rs   resolve top ─► hole? ─► resolve next … ─► read the extents in one batch
//!     │ write.rs  resolve top ─► in place?  write
//!     │                       └► reserve ─► fill + write ─► publish
//!     │ extent.rs the flattened map: runs of data, zero, hole, compressed
//!     └ queue.rs  the same requests in the background, reaped when they are done
//! ```
//!
//! # What keeps a disk whole
//! | what | where |
//! |---|---|
//! | an image names only files that the policy allows, also when a link is swapped meanwhile | `reference` |
//! | no file is in a chain twice; no chain is longer than the limit | `walk` |
//! | bytes past the end of a shorter backing image read as zero, also after the overlay grew | `extent`, `resize` |
//! | nobody sees the new part of a disk before it is ready, nor one that could not be taken back | `resize`, `shown_size` |
//! | no block or table moves under a request | [`Gate`](vdkit_block::Gate), entered by all public methods of `disk`, `read`, `write` |
//! | freed clusters are not reused under a reader | guards of [`InFlight`](vdkit_block::InFlight), `read`, `write` |
//! | each layer's encrypted bytes use that layer's key; no plaintext is written to them | `crypto`, `read`, `write` |
//! | the cache never serves a decompressed unit that was replaced | `unit_cache` |
//! | while a served chain changes, no other process can write its images | `exchange`, `block::AccessExchange` |
//! | jobs that copy a whole disk do not read a truncated file as zeroes | `truncation` |
//! | a write that failed half-way changes nothing | dropped [`Reservation`](vdkit_block::Reservation)s, `write` |

mod crypto;
mod disk;
mod exchange;
mod extent;
mod nonblocking;
mod options;
mod queue;
mod read;
mod reference;
mod registry;
mod resize;
mod scratch;
mod shown_size;
mod split;
mod stream;
mod sync;
mod truncation;
mod unit_cache;
mod walk;
mod write;

pub use disk::{Disk, Layer, RequestGuard};
pub use extent::{DiskExtent, DiskPlace, Extents};
pub use nonblocking::Ready;
pub use options::{BackingChoice, BackingImage, OpenOptions};
pub use queue::{Completion, Queue, Request};
pub use registry::{Probed, Protocol, ReferenceNames, Registry, RejectedKind};
pub use resize::NewPart;
pub use split::{Split, links_down_to, open_split, same_file};
pub use stream::DiskStream;
pub use truncation::TruncationCheck;
pub use walk::{
    ChainLink, ChainReport, ChangedParent, HostInfo, OpenedImage, changed_parent, describe_chain,
    open_image,
};
