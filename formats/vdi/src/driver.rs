//! The VDI format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, Compaction, DriverInfo, Format, FormatDriver,
    ImageInfo, Limits, OfflineImage, OpenRequest, Probe, Repair, Result, Storage,
};
use vdkit_blockmap::{BlockImage, Opening, compact};

use crate::check;
use crate::envelope::VdiEnvelope;
use crate::header::{Header, is_vdi};

/// VDI images.
#[derive(Clone, Copy, Debug, Default)]
pub struct VdiDriver;

impl FormatDriver for VdiDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "vdi",
            aliases: &[],
            extensions: &["vdi"],
            description: "VirtualBox's disk images: dynamic and static; differencing ones for reading",
        }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        if is_vdi(head) { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, _limits: &Limits) -> Result<ImageInfo> {
        let header = Header::read(&**storage)?;
        let mut info = ImageInfo::new(self.info().name, header.disk_bytes);
        info.cluster_size = Some(header.block_bytes.into());
        info.identity = Some(format!("{} {}", header.uuid, header.uuid_modify));
        if header.has_parent() {
            // VDI identifies its parent only by these UUIDs.
            info.backing_identity = Some(format!("{} {}", header.uuid_link, header.uuid_parent));
        }
        let (major, minor) = header.version;
        let mut add = |key: &str, value: String| info.properties.push((key.to_owned(), value));
        add("version", format!("{major}.{minor}"));
        add("image-type", header.image_type.name().to_owned());
        add("blocks", header.entries.to_string());
        add("blocks-allocated", header.allocated.to_string());
        add("uuid", header.uuid.to_string());
        add("uuid-modify", header.uuid_modify.to_string());
        if header.has_parent() {
            add("parent-uuid", header.uuid_link.to_string());
            add("parent-uuid-modify", header.uuid_parent.to_string());
        }
        Ok(info)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        let OpenRequest { storage, writable, limits, .. } = request;
        let header = Header::read(&*storage)?;
        if writable {
            let hint = "convert it to a new image";
            header.refuse_version_0(storage.name(), "writing to", hint)?;
        }
        let envelope = VdiEnvelope::new(storage.clone(), &header);
        let opening = Opening {
            writable,
            limits,
            geometry: header.geometry(),
            guest_bytes: header.disk_bytes,
            has_parent: header.has_parent(),
            sector_maps: false,
            warnings: Vec::new(),
            storage,
        };
        Ok(Arc::new(BlockImage::open(envelope, opening)?))
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image, repair)
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction);
}

impl Compaction for VdiDriver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        let storage = &**image.storage;
        let header = Header::read(storage)?;
        let hint = "convert it to a new image, which has no free space in it";
        header.refuse_version_0(storage.name(), "compacting", hint)?;
        let envelope = VdiEnvelope::new(image.storage.clone(), &header);
        compact::compact(storage, &envelope, &header.geometry(), options, &image.monitor)
    }
}
