//! From a file name to one flat disk.
//!
//! An image may stand on another, and that one on a third; its data may live in a further file.
//! This crate finds and opens them all, as far as the caller's policy allows, and presents one
//! [`Disk`]: reads, writes, zeroes, discards, and a flattened map. Everything above (jobs, servers)
//! works with a `Disk` and never with a chain.
//!
//! ```text
//!   path ─► walk ──► reference (policy, race-free open) ──► storage
//!             │  └─► registry (probe) ──────────────────► driver
//!             ▼
//!   Disk { layers: [top, backing, …] }
//!     │ read.rs   resolve top ─► hole? ─► resolve next … ─► read what was found, in one batch
//!     │ write.rs  resolve top ─► in place?  write
//!     │                       └► reserve ─► fill + write ─► publish
//!     │ extent.rs the flattened map: runs of data, zero, hole, packed
//! ```
//!
//! # What keeps a disk whole
//! | what | where |
//! |---|---|
//! | an image names only files that the policy allows, also when a link is swapped meanwhile | `reference` |
//! | no file is in a chain twice; no chain is longer than the limit | `walk` |
//! | bytes past the end of a shorter backing image read as zero, also after the overlay grew | `extent`, `Disk::resize` |
//! | freed clusters are not reused under a reader | guards of [`InFlight`](vdkit_block::InFlight), `read`, `write` |
//! | encrypted bytes are decrypted by the key of the layer they lie in; none go out in the clear | `seal`, `read`, `write` |
//! | an unpacked unit that was replaced is never served from the cache | `unit_cache` |
//! | a chain that changes while it is served: nobody else writes an image of it, at no moment | `exchange`, `Storage::reopen_for_writing` |
//! | a file that was cut is not taken for zeroes by who takes the whole disk | `missing` |
//! | a write that failed half-way changes nothing | dropped [`Reservation`](vdkit_block::Reservation)s, `write` |

mod disk;
mod exchange;
mod extent;
mod missing;
mod options;
mod prompt;
mod read;
mod reference;
mod registry;
mod scratch;
mod seal;
mod split;
mod unit_cache;
mod walk;
mod write;

pub use disk::{Disk, Layer, RequestGuard};
pub use extent::{DiskExtent, DiskPlace, Extents};
pub use missing::Missing;
pub use options::{BackingChoice, OpenOptions};
pub use prompt::Ready;
pub use registry::{Probed, Registry, Stranger};
pub use split::{Split, links_down_to, open_split, same_file};
pub use walk::{
    ChainLink, ChainReport, ChangedParent, HostInfo, OpenedImage, changed_parent, describe_chain,
    open_image,
};
