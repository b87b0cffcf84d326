//! Internal snapshots of an image: list, create, apply, delete, rename.

use vdkit_block::{Monitor, NewSnapshot, Result, SnapshotInfo};
use vdkit_chain::Disk;

/// The hint for formats without snapshots.
const HINT: &str = "convert it to qcow2, which has them";

/// A snapshot operation. Existing snapshots are given by name or id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotAction {
    /// Takes a snapshot with this name.
    Create(String),
    /// Reverts the disk to the snapshot.
    Apply(String),
    /// Deletes a snapshot.
    Delete(String),
    /// Renames a snapshot.
    Rename {
        /// The snapshot.
        which: String,
        /// Its new name.
        name: String,
    },
}

/// All snapshots of a disk's top image.
///
/// # Errors
/// [`vdkit_block::Error::Unsupported`] for a format without snapshots; a damaged list.
pub fn snapshots(disk: &Disk) -> Result<Vec<SnapshotInfo>> {
    disk.top().require_snapshots(HINT)?.list()
}

/// Runs a snapshot operation on a disk that is open for writing; durable on return. Returns the
/// snapshot as it is now, or as it was before deletion.
///
/// # Errors
/// [`vdkit_block::Error::Unsupported`] for a format without snapshots, and for refcounts too narrow for another
/// one; [`vdkit_block::Error::Invalid`] for an unknown or invalid name, and in a child of `fork` whose parent
/// opened the disk; errors of the format and its storages; [`vdkit_block::Error::Interrupted`]. The image is then
/// unchanged.
pub fn snapshot(
    disk: &Disk,
    action: &SnapshotAction,
    monitor: &Monitor<'_>,
) -> Result<SnapshotInfo> {
    let all = disk.top().require_snapshots(HINT)?;
    disk.refuse_in_child("change the snapshots of")?;
    if let SnapshotAction::Create(name) | SnapshotAction::Rename { name, .. } = action
        && all.list()?.iter().any(|other| other.name == *name)
    {
        // As in qemu-img, the first one with a name is found by it.
        monitor.progress.message(&format!(
            "{}: another snapshot is called '{name}' too; ids tell them apart",
            disk.name()
        ));
    }
    match action {
        SnapshotAction::Create(name) => all.create(&NewSnapshot::now(name), monitor),
        SnapshotAction::Apply(which) => all.apply(which, monitor),
        SnapshotAction::Delete(which) => all.delete(which, monitor),
        SnapshotAction::Rename { which, name } => all.rename(which, name),
    }
}
