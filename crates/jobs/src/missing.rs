//! Data that a map sends to where its file has ended: an image that was cut.
//!
//! Reading such bytes gives zeroes, as QEMU has it: after a power cut a guest may ask for what it never
//! made durable. A job that takes a whole disk somewhere else must not take them for the disk's.

use std::sync::Arc;

use vdkit_block::{Error, Result, Storage, align_down};
use vdkit_chain::{Disk, DiskExtent, DiskPlace};

/// Where host files end, in the order in which a map is walked. Each is asked once.
#[derive(Debug, Default)]
pub(crate) struct Missing {
    asked: Option<(Arc<dyn Storage>, u64)>,
}

impl Missing {
    /// Passes what lies in its file.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where a cluster begins at the end of its file or behind it. (The last one may
    /// end with the file before it is full.)
    pub(crate) fn refuse(&mut self, disk: &Disk, extent: &DiskExtent<'_>) -> Result<()> {
        // Where every byte has its own place the file's length is the disk's.
        let Some(layer) = disk.layers().get(extent.depth) else { return Ok(()) };
        let caps = layer.format().caps();
        if caps.fill_bytes <= 1 {
            return Ok(());
        }
        let (storage, offset, last) = match extent.place {
            DiskPlace::Data { storage, offset } => {
                // Where the last cluster begins, for the guest and on the host.
                let last = align_down(extent.end().0 - 1, caps.cluster_bytes.max(1));
                let last = i128::from(last) - i128::from(extent.at.0) + i128::from(offset.0);
                (storage, offset, last)
            }
            DiskPlace::Packed { storage, packed } => {
                (storage, packed.offset, i128::from(packed.offset.0))
            }
            DiskPlace::Zero { .. } | DiskPlace::Hole => return Ok(()),
        };
        let len = self.len_of(storage)?;
        if last < i128::from(len) {
            return Ok(());
        }
        // The first cluster that is not there.
        let cluster = i128::from(caps.cluster_bytes.max(1));
        let ended = i128::from(extent.at.0) + i128::from(len) - i128::from(offset.0);
        let lost = (ended + cluster - 1).div_euclid(cluster) * cluster;
        let inside = (lost - i128::from(extent.at.0)).clamp(0, i128::from(extent.len)) as u64;
        let (at, host) = (extent.at + inside, offset + inside);
        let (name, image) = (storage.name(), layer.format().storage().name());
        Err(Error::corrupt(
            name,
            host.0,
            "guest data",
            format!("the end of the file, which has {len} bytes"),
            format!(
                "what the disk has at guest offset {at}: the file was cut. Bring it back whole; or, \
                 to take zeroes for what is lost, run: vdkit check {image} --repair all"
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
