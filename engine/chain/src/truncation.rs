//! Detects truncated images: data that the map places beyond the end of its file.
//!
//! Reading such bytes gives zeroes, as in QEMU: after a power cut a guest may read what it never
//! made durable. A job that copies a whole disk must not copy these zeroes as data.

use std::sync::Arc;

use vdkit_block::{Error, HostOffset, Remedy, Result, Storage, align_down};

use crate::disk::Disk;
use crate::extent::{DiskExtent, DiskPlace};

/// The host file of the walked extents, and its length.
#[derive(Debug, Default)]
pub struct TruncationCheck {
    known: Option<(Arc<dyn Storage>, u64)>,
}

impl TruncationCheck {
    /// Accepts extents within their file.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if a cluster begins at or beyond the end of its file. (The last cluster
    /// may be cut by the end of the file.)
    pub fn refuse(&mut self, disk: &Disk, extent: &DiskExtent<'_>) -> Result<()> {
        let Some(layer) = disk.layers().get(extent.depth) else { return Ok(()) };
        let format = layer.format();
        let caps = format.caps();
        // If every byte is allocated, the file's length is the disk's. Formats with unaligned
        // clusters check their maps against the file themselves.
        if caps.fill_bytes <= 1 || !caps.host_aligned {
            return Ok(());
        }
        let cluster = caps.cluster_bytes.max(1);
        // Its start on the host, and the last byte that the file must contain.
        let (storage, first, last) = match extent.place {
            DiskPlace::Data { storage, offset } => {
                (storage, offset, align_down(offset.0.saturating_add(extent.len - 1), cluster))
            }
            // As in a check, a unit may pass the end of the file by less than a cluster.
            // Decompression detects a truncated unit.
            DiskPlace::Compressed { storage, compressed } => {
                let end = compressed.offset.0.saturating_add(compressed.len.into());
                (storage, compressed.offset, end.saturating_sub(cluster))
            }
            DiskPlace::Zero { .. } | DiskPlace::Hole => return Ok(()),
        };
        if last < self.len_of(storage)? {
            return Ok(());
        }
        // Query the length again: another program may be writing the file, which grows before its
        // map.
        self.known = None;
        let len = self.len_of(storage)?;
        if last < len {
            return Ok(());
        }
        let (mut at, mut host) = (extent.at, first);
        if let DiskPlace::Data { .. } = extent.place {
            let lost = len.checked_next_multiple_of(cluster).unwrap_or(len).max(first.0);
            (at, host) = (at + (lost - first.0), HostOffset(lost));
        }
        let remedy = match Arc::ptr_eq(storage, format.storage()) {
            true => Remedy::REPAIR,
            false => {
                "to do without what is lost, make the file as long as it was (truncate -s)".into()
            }
        };
        Err(Error::corrupt(
            storage.name(),
            host.0,
            "guest data",
            format!("the end of the file, which has {len} bytes"),
            format!(
                "the data of guest offset {at}: the file was truncated. Restore it from a complete copy"
            ),
        )
        .with_remedy(remedy))
    }

    fn len_of(&mut self, storage: &Arc<dyn Storage>) -> Result<u64> {
        if let Some((known, len)) = &self.known
            && Arc::ptr_eq(known, storage)
        {
            return Ok(*len);
        }
        let len = storage.len()?;
        self.known = Some((storage.clone(), len));
        Ok(len)
    }
}
