//! Internal snapshots of an image: list, create, apply, delete, rename.

use std::time::{SystemTime, UNIX_EPOCH};

use vdkit_block::{Error, Monitor, NewSnapshot, Result, SnapshotInfo, Snapshots};
use vdkit_chain::Disk;

/// What is done with a snapshot. Those that exist are named by name or id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotAction {
    /// Keeps the disk as it is now, under this name.
    Create(String),
    /// Makes the disk what the snapshot holds.
    Apply(String),
    /// Removes a snapshot.
    Delete(String),
    /// Gives a snapshot another name.
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
/// [`Error::Unsupported`] for a format without snapshots; a damaged list.
pub fn snapshots(disk: &Disk) -> Result<Vec<SnapshotInfo>> {
    side(disk)?.list()
}

/// Does something with a snapshot of a disk that is open for writing; it is durable afterwards.
/// Returns the snapshot as it is now, or was when it was removed.
///
/// # Errors
/// [`Error::Unsupported`] for a format without snapshots, and for refcounts too narrow to count one
/// more; [`Error::Invalid`] for a name that no snapshot has, or none can have; what the format
/// and its storages return; [`Error::Interrupted`]. The image is then as it was.
pub fn snapshot(
    disk: &Disk,
    action: &SnapshotAction,
    monitor: &Monitor<'_>,
) -> Result<SnapshotInfo> {
    let side = side(disk)?;
    if let SnapshotAction::Create(name) | SnapshotAction::Rename { name, .. } = action
        && side.list()?.iter().any(|other| other.name == *name)
    {
        // As with qemu-img, where the first one of a name is found by it.
        monitor.progress.message(&format!(
            "{}: another snapshot is called '{name}' too; ids tell them apart",
            disk.name()
        ));
    }
    match action {
        SnapshotAction::Create(name) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let new = NewSnapshot {
                name: name.clone(),
                // The format's field ends in 2106.
                date_seconds: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
                date_nanoseconds: now.subsec_nanos(),
            };
            side.create(&new, monitor)
        }
        SnapshotAction::Apply(which) => side.apply(which, monitor),
        SnapshotAction::Delete(which) => side.delete(which, monitor),
        SnapshotAction::Rename { which, name } => side.rename(which, name),
    }
}

fn side(disk: &Disk) -> Result<&dyn Snapshots> {
    disk.top().snapshots().ok_or_else(|| {
        Error::unsupported(
            disk.name(),
            format!("not supported: snapshots inside a {} image", disk.top().name()),
            "convert it to qcow2, which has them",
        )
    })
}
