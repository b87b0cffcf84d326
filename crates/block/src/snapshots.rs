//! Snapshots that an image holds inside itself: an optional side of a format.

use std::fmt;
use std::sync::Arc;

use crate::driver::SnapshotInfo;
use crate::error::Result;
use crate::format::Format;
use crate::monitor::Monitor;

/// What a new snapshot is called, and when it was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    /// Its name, 1 to 255 bytes. Names need not be unique, ids are.
    pub name: String,
    /// Seconds since 1970.
    pub date_seconds: u32,
    /// Nanoseconds beyond them.
    pub date_nanoseconds: u32,
}

/// The internal snapshots of an open image. A snapshot holds what the guest's disk was, without
/// the images beneath it.
///
/// Changes wait for every request in flight (so the caller must not be in one) and keep new ones
/// that need space waiting. They are durable when they return; a crash in the middle leaves the
/// old list of snapshots and the old disk, or the new ones, at worst with leaks.
///
/// A snapshot is named by its id or its name. [`Snapshots::apply`] and [`Snapshots::view`] look
/// for an id first, [`Snapshots::delete`] and [`Snapshots::rename`] for a name first, as
/// `qemu-img` does; of several with one name the first one is meant.
pub trait Snapshots: Send + Sync + fmt::Debug {
    /// All snapshots, in the order of the image.
    fn list(&self) -> Result<Vec<SnapshotInfo>>;

    /// Keeps the disk as it is now. Costs metadata only.
    fn create(&self, new: &NewSnapshot, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Makes the disk what the snapshot holds, size and saved VM state included. What the disk
    /// held is lost unless another snapshot holds it.
    fn apply(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Removes a snapshot and gives back what only it needed. No [`Snapshots::view`] of it may be
    /// in use.
    fn delete(&self, which: &str, monitor: &Monitor<'_>) -> Result<SnapshotInfo>;

    /// Gives a snapshot another name; returns it under its new one.
    fn rename(&self, which: &str, name: &str) -> Result<SnapshotInfo>;

    /// The disk as a snapshot holds it, for reading.
    fn view(&self, which: &str) -> Result<Arc<dyn Format>>;
}
