//! Jobs on one image, in place: check, compact, resize, amend, keys, snapshots; and what can be said about it: map,
//! measure, what occupies a device.
//!
//! Each job reports to a [`vdkit_block::Monitor`] and returns a report that serializes to JSON.

mod amend;
mod check;
mod compact;
mod described;
mod keys;
mod map;
mod measure;
mod occupied;
mod resize;
mod snapshot;

pub use amend::{AmendReport, amend};
pub use check::{Checked, check};
pub use compact::{Compacted, compact};
pub use described::{Described, DiskImage, describe_disk};
pub use keys::{KeysAfter, ListedKeys, add_key, change_key, list_keys, remove_key};
pub use map::{Map, MapRow, map};
pub use measure::{MeasureReport, measure, measure_empty};
pub use occupied::{Occupied, occupied};
pub use resize::{Preallocation, ResizeOptions, SizeChange, resize};
pub use snapshot::{SnapshotAction, snapshot, snapshots};
