//! `qemu-img snapshot`: lists, makes, applies and deletes the snapshots within an image.

use vdkit::SnapshotInfo;

/// The table of snapshots, with its heading.
pub fn table(_snapshots: &[SnapshotInfo]) -> String {
    String::new()
}
