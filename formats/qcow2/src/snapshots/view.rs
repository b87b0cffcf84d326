//! Opens a snapshot as a read-only disk.

use std::sync::Arc;

use vdkit_block::{Error, Format, Remedy, Result};

use super::Snapshot;
use crate::header::DiskTables;
use crate::image::Qcow2;
use crate::layout::L1_BYTES_MAX;

impl Qcow2 {
    /// The disk of a snapshot.
    pub(super) fn open_view(&self, snapshot: &Snapshot) -> Result<Arc<dyn Format>> {
        self.check_snapshot(snapshot)?;
        Ok(self.reading(DiskTables {
            l1_offset: snapshot.l1_offset,
            l1_entries: snapshot.l1_entries,
            guest_bytes: snapshot.disk_bytes.unwrap_or_else(|| self.guest_len()),
        })?)
    }

    /// Checks that a snapshot's L1 table can be read, and that a disk can have its size.
    pub(super) fn check_snapshot(&self, snapshot: &Snapshot) -> Result<()> {
        let cluster = self.geometry.cluster_bytes();
        let bytes = u64::from(snapshot.l1_entries) * 8;
        let (offset, file_len) = (snapshot.l1_offset.0, self.storage.len()?);
        let end = offset.checked_add(bytes);
        let placed = offset & (cluster - 1) == 0 && end.is_some_and(|end| end <= file_len);
        let size = snapshot.disk_bytes.unwrap_or(0);
        let fits = size <= i64::MAX as u64 - cluster
            && self.geometry.l1_entries_for(size).saturating_mul(8) <= L1_BYTES_MAX;
        if fits && (bytes == 0 || (offset != 0 && bytes <= L1_BYTES_MAX && placed)) {
            return Ok(());
        }
        let file = self.storage.name();
        Err(Error::corrupt(
            file,
            offset,
            "snapshot L1 table",
            format!(
                "snapshot '{}' of a disk of {size} bytes with an L1 table of {bytes} bytes at \
                 {offset:#x}",
                String::from_utf8_lossy(&snapshot.name)
            ),
            "an L1 table at a cluster boundary within the file",
        )
        .with_remedy(Remedy::Check))
    }
}
