//! Internal snapshots, which formats may support.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::driver::SnapshotInfo;
use crate::error::Result;
use crate::format::Format;
use crate::monitor::Monitor;

/// Name and time of a new snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Its name, at most 255 bytes. Names need not be unique, ids are.
    pub name: String,
    /// Seconds since 1970.
    pub date_seconds: u32,
    /// Nanoseconds part.
    pub date_nanoseconds: u32,
}

impl NewSnapshot {
    /// A snapshot that is taken now.
    pub fn now(name: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // The format's field ends in 2106.
        let date_seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        Self { name: name.to_owned(), date_seconds, date_nanoseconds: now.subsec_nanos() }
    }
}

/// The internal snapshots of an open image. A snapshot holds this image's data, without its backing
/// chain.
///
/// Changes wait for every request in flight (so the caller must not be in one) and block new
/// allocations. They are durable on return. A crash leaves the old or the new list of snapshots and
/// disk, at worst with leaks.
///
/// A snapshot is named by its id or its name. [`Snapshots::apply`] and [`Snapshots::view`] search
/// the ids first, [`Snapshots::delete`] and [`Snapshots::rename`] the names first, as `qemu-img`
/// does. Of several with one name, the first is used.
///
/// # Errors
/// [`crate::Error::Invalid`] if there is no such snapshot, or a name is too long;
/// [`crate::Error::ReadOnly`] for a change of an image that was opened for reading;
/// [`crate::Error::Corrupt`] for a damaged snapshot; I/O.
pub trait Snapshots: Send + Sync + fmt::Debug {
    /// All snapshots, in the order of the image.
    fn list(&self) -> Result<Vec<SnapshotInfo>>;

    /// Takes a snapshot of the disk. Only metadata is written.
    fn create(&self, new: &NewSnapshot, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Reverts the disk to the snapshot, including size and saved VM state. The current data is
    /// lost unless another snapshot holds it.
    fn apply(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Deletes a snapshot and frees the space that only it used. No [`Snapshots::view`] of it may
    /// be in use.
    fn delete(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Renames a snapshot and returns it with its new name.
    fn rename(&self, which: &str, name: &str) -> Result<SnapshotInfo>;

    /// A read-only view of the disk in a snapshot.
    fn view(&self, which: &str) -> Result<Arc<dyn Format>>;
}
