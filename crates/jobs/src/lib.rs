//! Jobs on virtual disks: plans, progress, cancel.
//!
//! Each job takes disks that the caller opened (or names that it opens under the caller's
//! policy), reports to a [`vdkit_block::Monitor`] and returns a report that serialises to JSON.

mod compress;
pub mod convert;
mod deflate;
mod mover;
mod plan;
mod source;
mod target;
mod turns;
mod verify;
pub mod zero;

pub use compress::Compressor;
pub use convert::{Backing, ConvertOptions, ConvertReport, convert};
pub use mover::MovedBytes;
pub use source::Source;
pub use target::{Destination, NewImage};
