//! Jobs on virtual disks, with progress and cancellation.
//!
//! Each job takes disks that the caller opened (or names that it opens under the caller's policy),
//! reports to a [`vdkit_block::Monitor`] and returns a report that serialises to JSON.

mod amend;
mod appliance;
mod bitmap;
mod cancellable;
mod check;
mod codes;
mod commit;
mod compact;
mod compare;
mod compress;
pub mod convert;
mod create;
mod crew;
mod dd;
mod deflate;
mod dependents;
mod doctor;
mod holes;
mod incoming;
pub mod inspect;
mod keys;
pub mod libvirt;
mod map;
mod measure;
mod mover;
mod new_files;
mod occupied;
mod plan;
mod preset;
mod queue;
mod rebase;
mod resize;
mod runs;
mod sequencer;
mod share;
mod snapshot;
mod source;
mod target;
#[cfg(test)]
mod testing;
mod tree;
mod validate;
mod verify;
pub mod zero;

pub use amend::{AmendReport, amend};
pub use appliance::{
    ApplianceDisk, ApplianceReport, Extraction, NewAppliance, describe_packaged, extract,
    open_packaged, pack,
};
pub use bitmap::{BrokenBitmaps, bitmaps, merge_bitmap};
pub use check::{Checked, check};
pub use commit::{CommitOptions, CommitReport, commit, commit_disks};
pub use compact::{Compacted, compact};
pub use compare::{CompareOptions, CompareReport, compare};
pub use compress::Compressor;
pub use convert::{Backing, ConvertOptions, ConvertReport, LeftBehind, convert};
pub use create::{CreateOptions, Created, FoundBacking, NewBacking, create};
pub use dd::{DdOptions, DdPlan, DdReport, dd_new};
pub use dependents::{Dependents, dependents, refuse_dependents};
pub use doctor::{
    Allocation, DoctorCode, DoctorEvidence, DoctorFinding, DoctorImage, DoctorOptions,
    DoctorReport, DoctorSeverity, doctor,
};
pub use incoming::{Incoming, RawStream, convert_stream, receive};
pub use keys::{KeysAfter, ListedKeys, add_key, change_key, list_keys, remove_key};
pub use map::{Map, MapRow, map};
pub use measure::{MeasureReport, measure, measure_empty};
pub use mover::MovedBytes;
pub use new_files::replaced_files;
pub use occupied::{Occupied, occupied};
pub use preset::{Preset, Use};
pub use rebase::{RebaseOptions, RebaseReport, rebase, take_over};
pub use resize::{Preallocation, ResizeOptions, resize};
pub use snapshot::{SnapshotAction, snapshot, snapshots};
pub use source::Source;
pub use target::{Destination, NewImage};
pub use tree::{ReferenceStatus, TreeBacking, TreeFault, TreeImage, TreeOptions, TreeReport, tree};
pub use validate::{Objection, Rule, ValidateReport, validate};
