//! Data that a map sends to where its file has ended: an image that was cut.
//!
//! Reading such bytes gives zeroes, as QEMU has it: after a power cut a guest may ask for what it never
//! made durable. A job that takes a whole disk somewhere else must not take them for the disk's.

use std::sync::Arc;

use vdkit_block::{Error, HostOffset, Result, Storage, align_down};

use crate::disk::Disk;
use crate::extent::{DiskExtent, DiskPlace};

/// Where the host file of the extents is that are walked, and where it ends.
#[derive(Debug, Default)]
pub struct Missing {
    asked: Option<(Arc<dyn Storage>, u64)>,
}

impl Missing {
    /// Passes what lies in its file.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where a cluster begins at the end of its file or behind it. (The last one may
    /// end with the file before it is full.)
    pub fn refuse(&mut self, disk: &Disk, extent: &DiskExtent<'_>) -> Result<()> {
        let Some(layer) = disk.layers().get(extent.depth) else { return Ok(()) };
        let format = layer.format();
        let caps = format.caps();
        // Where every byte has its own place the file's length is the disk's; and formats whose
        // clusters lie anywhere hold their maps against the file themselves.
        if caps.fill_bytes <= 1 || !caps.host_aligned {
            return Ok(());
        }
        let cluster = caps.cluster_bytes.max(1);
        // Where it begins on the host, and the last byte that the file must have.
        let (storage, first, last) = match extent.place {
            DiskPlace::Data { storage, offset } => {
                (storage, offset, align_down(offset.0.saturating_add(extent.len - 1), cluster))
            }
            // As a check has it: a unit may pass the end by less than a cluster. One that is not all
            // there does not unpack.
            DiskPlace::Packed { storage, packed } => {
                let end = packed.offset.0.saturating_add(packed.len.into());
                (storage, packed.offset, end.saturating_sub(cluster))
            }
            DiskPlace::Zero { .. } | DiskPlace::Hole => return Ok(()),
        };
        if last < self.len_of(storage)? {
            return Ok(());
        }
        // Another program may be writing it: the file grows before the map says so.
        self.asked = None;
        let len = self.len_of(storage)?;
        if last < len {
            return Ok(());
        }
        let (mut at, mut host) = (extent.at, first);
        if let DiskPlace::Data { .. } = extent.place {
            let lost = len.checked_next_multiple_of(cluster).unwrap_or(len).max(first.0);
            (at, host) = (at + (lost - first.0), HostOffset(lost));
        }
        let mend = match Arc::ptr_eq(storage, format.storage()) {
            true => format!("run: vdkit check {} --repair all", storage.name()),
            false => {
                format!("make that file as long as it was ('truncate -s'): {}", storage.name())
            }
        };
        Err(Error::corrupt(
            storage.name(),
            host.0,
            "guest data",
            format!("the end of the file, which has {len} bytes"),
            format!(
                "what the disk has at guest offset {at}: the file was cut. Bring it back whole; or, to \
                 do without what is lost, {mend}"
            ),
        ))
    }

    fn len_of(&mut self, storage: &Arc<dyn Storage>) -> Result<u64> {
        if let Some((asked, len)) = &self.asked
            && Arc::ptr_eq(asked, storage)
        {
            return Ok(*len);
        }
        let len = storage.len()?;
        self.asked = Some((storage.clone(), len));
        Ok(len)
    }
}
