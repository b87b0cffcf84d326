//! Jobs on virtual disks: plans, progress, cancel.
//!
//! Each job takes disks that the caller opened (or names that it opens under the caller's
//! policy), reports to a [`vdkit_block::Monitor`] and returns a report that serialises to JSON.

mod check;
mod compress;
pub mod convert;
mod create;
mod deflate;
mod mover;
mod plan;
mod resize;
mod source;
mod target;
mod turns;
mod verify;
mod watched;
pub mod zero;

pub use check::{Checked, check};
pub use compress::Compressor;
pub use convert::{Backing, ConvertOptions, ConvertReport, convert};
pub use create::{CreateOptions, Created, FoundBacking, NewBacking, create};
pub use mover::MovedBytes;
pub use resize::{Preallocation, ResizeOptions, resize};
pub use source::Source;
pub use target::{Destination, NewImage};
