//! The qcow2 format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, Compaction, DriverInfo, Format, FormatDriver,
    ImageInfo, KeySlots, KeyedImages, Limits, OfflineImage, OpenRequest, Probe, Repair, Result,
    Secret, Storage,
};
use vdkit_luks::LuksSlots;

use crate::header::{Encryption, Header};
use crate::{Qcow2, check, describe, encrypted, layout};

/// qcow2 images, versions 2 and 3.
#[derive(Clone, Copy, Debug, Default)]
pub struct Qcow2Driver;

impl FormatDriver for Qcow2Driver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "qcow2",
            aliases: &[],
            extensions: &["qcow2"],
            description: "QEMU's own format: sparse, on backing files, compressed, with snapshots",
        }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        // The first qcow format has the same magic number, with version 1. Newer, unknown versions
        // are claimed too: an error about the version is better than opening a raw disk.
        let magic = head.get(..4) == Some(&layout::MAGIC.to_be_bytes());
        let version = head.get(4..8).is_some_and(|v| v > &[0, 0, 0, 1][..]);
        if magic && version { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        describe::describe(&**storage, limits)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Qcow2::open(request)?)
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image.storage, image.files.first(), repair, &image.limits, &image.monitor)
    }

    vdkit_block::capabilities! {
        creation: Creation, keyed_images: KeyedImages, compaction: Compaction, amendment: Amendment
    }
}

impl KeyedImages for Qcow2Driver {
    fn open_with_keys(&self, request: OpenRequest, keys: &[Secret]) -> Result<Arc<dyn Format>> {
        Ok(Qcow2::open_with_keys(request, keys)?)
    }

    fn key_slots(
        &self,
        storage: &Arc<dyn Storage>,
        limits: &Limits,
    ) -> Result<Option<Box<dyn KeySlots>>> {
        let header = Header::read(&**storage, limits)?;
        if header.encryption != Encryption::Luks {
            return Ok(None);
        }
        let place = encrypted::luks_place(&header, &**storage)?;
        Ok(Some(Box::new(LuksSlots::read(storage.clone(), place, limits)?)))
    }
}

impl Compaction for Qcow2Driver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        check::compact(image.storage, image.files.first(), options, &image.limits, &image.monitor)
    }
}
