//! Jobs that make and copy images: convert, create, copy parts, commit, rebase, compare.
//!
//! Each job takes disks that the caller opened (or names that it opens under the caller's policy),
//! reports to a [`vdkit_block::Monitor`] and returns a report that serializes to JSON.

mod bitmap;
mod cancellable;
mod commit;
mod compare;
mod convert;
mod create;
mod crew;
mod dd;
mod holes;
mod incoming;
mod mover;
mod new_files;
mod plan;
mod queue;
mod rebase;
pub mod runs;
mod sequencer;
mod share;
mod source;
mod target;
mod units;
mod verify;
mod zero;

pub use bitmap::{BrokenBitmaps, bitmaps, merge_bitmap};
pub use commit::{CommitOptions, CommitReport, commit, commit_disks};
pub use compare::{CompareOptions, CompareReport, compare};
pub use convert::{
    Backing, ConvertOptions, ConvertReport, Converted, LeftBehind, convert, convert_uncommitted,
};
pub use create::{CreateOptions, Created, FoundBacking, NewBacking, create};
pub use crew::default_threads;
pub use dd::{DdOptions, DdPlan, DdReport, dd_new};
pub use incoming::{Incoming, RawStream, convert_stream, receive};
pub use mover::MovedBytes;
pub use new_files::{refuse_protocol_name, replaced_files};
pub use rebase::{RebaseOptions, RebaseReport, find_backing, rebase, take_over};
pub use source::Source;
pub use target::{Destination, ExistingImage, NewImage, commit_options, new_file_options};
pub use verify::verify;
