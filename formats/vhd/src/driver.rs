//! The VHD format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, Compaction, DriverInfo, Format, FormatDriver,
    HostOffset, ImageInfo, Limits, OfflineImage, OpenRequest, Probe, Repair, Result, Storage,
    compact_flat,
};
use vdkit_blockmap::{BlockImage, Envelope, Opening, compact};

use crate::envelope::{Parts, VhdEnvelope};
use crate::fixed::{self, FixedVhd};
use crate::footer::{COOKIE, DiskType, Footer, SECTOR};
use crate::locate::Footers;
use crate::{check, parent};

/// VHD images.
#[derive(Clone, Copy, Debug, Default)]
pub struct VhdDriver;

impl FormatDriver for VhdDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "vpc",
            aliases: &["vhd"],
            extensions: &["vhd", "vpc", "avhd"],
            description: "VHD, the disk images of Virtual PC, Hyper-V and Azure: fixed, dynamic, differencing",
        }
    }

    /// Detects images by the footer copy at the start; fixed and damaged ones by a valid footer at
    /// the end.
    fn probe(&self, head: &[u8], tail: &[u8], _len: u64) -> Probe {
        let front = Footer::parse(head.get(..512).unwrap_or(head));
        let not_fixed = |footer: &Footer| footer.disk_type != DiskType::Fixed;
        if front.as_ref().is_ok_and(not_fixed) {
            return Probe::Yes;
        }
        let shifted = tail.get(1..).filter(|tail| tail.starts_with(COOKIE));
        let back =
            Footer::parse(tail).is_ok() || shifted.is_some_and(|tail| Footer::parse(tail).is_ok());
        if back { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, _limits: &Limits) -> Result<ImageInfo> {
        let footers = Footers::read(&**storage)?;
        let footer = footers.best(storage.name())?;
        let mut info = ImageInfo::new(self.info().name, footer.disk_bytes());
        info.identity = Some(footer.uuid().to_string());
        let chs = footer.geometry();
        let mut properties = vec![
            ("subformat", footer.disk_type.name().to_owned()),
            ("creator", footer.creator().trim_end().to_owned()),
            ("size-by", if footer.sized_by_geometry() { "geometry" } else { "size" }.to_owned()),
            ("current-size", footer.current_size().to_string()),
            ("geometry", format!("{}/{}/{}", chs.cylinders, chs.heads, chs.sectors)),
            ("uuid", footer.uuid().to_string()),
            ("time", footer.time().to_string()),
        ];
        if footer.disk_type == DiskType::Fixed {
            fixed::judge_size(storage.name(), footer.disk_bytes(), footers.back_at)?;
        } else {
            let Parts { header, .. } = Parts::read(&**storage, &footers)?;
            info.cluster_size = Some(header.block_bytes());
            properties.push(("blocks", header.entries().to_string()));
            if footer.disk_type == DiskType::Differencing {
                let name = parent::name(&**storage, &header)?;
                info.backing_file = (!name.is_empty()).then_some(name);
                info.backing_format = Some(self.info().name.to_owned());
                info.backing_time = parent::noted_time(&header);
                info.backing_identity = Some(header.parent_uuid().to_string());
                properties.push(("parent-uuid", header.parent_uuid().to_string()));
                properties.push(("parent-time", header.parent_time().to_string()));
                properties.push(("parent-name", header.parent_name()));
            }
        }
        info.properties =
            properties.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(info)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        let OpenRequest { storage, writable, limits, .. } = request;
        let mut footers = Footers::read(&*storage)?;
        let footer = footers.best(storage.name())?;
        if footer.disk_type == DiskType::Fixed {
            let image = FixedVhd::open(storage, footer.clone(), &footers, writable)?;
            return Ok(Arc::new(image));
        }
        let parts = Parts::read(&*storage, &footers)?;
        if writable && footers.front.is_err() && parts.header.at >= SECTOR {
            // New blocks overwrite the footer at the end.
            storage.write_at(parts.footer.bytes(), HostOffset(0))?;
            storage.sync()?;
            footers.front = Ok(parts.footer.clone());
        }
        let (geometry, guest_bytes) = (parts.header.geometry(), parts.footer.disk_bytes());
        let envelope = VhdEnvelope::new(storage.clone(), parts);
        let opening = Opening {
            writable,
            limits,
            geometry,
            guest_bytes,
            has_parent: envelope.over_parent(),
            sector_maps: true,
            warnings: footers.warning(storage.name()).into_iter().collect(),
            storage,
        };
        Ok(Arc::new(BlockImage::open(envelope, opening)?))
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image, repair)
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction, amendment: Amendment);
}

impl Compaction for VhdDriver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        let storage = &**image.storage;
        let footers = Footers::read(storage)?;
        if footers.best(storage.name())?.disk_type == DiskType::Fixed {
            return compact_flat(storage, options, &image.monitor);
        }
        let parts = Parts::read(storage, &footers)?;
        let geometry = parts.header.geometry();
        let envelope = VhdEnvelope::new(image.storage.clone(), parts);
        compact::compact(storage, &envelope, &geometry, options, &image.monitor)
    }
}
