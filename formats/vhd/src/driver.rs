//! The VHD format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, Compaction, DriverInfo, Format, FormatDriver,
    ImageInfo, Limits, OfflineImage, OpenRequest, Probe, Repair, Result, Storage, compact_flat,
};
use vdkit_blockmap::{BlockImage, Opening, compact};

use crate::envelope::VhdEnvelope;
use crate::fixed::{self, FixedVhd};
use crate::footer::{COOKIE, DiskType, Footer};
use crate::header::DynamicHeader;
use crate::locate::Footers;
use crate::{check, parent};

/// VHD images.
#[derive(Clone, Copy, Debug, Default)]
pub struct VhdDriver;

/// The parts of an image with a table.
struct Dynamic {
    footer: Footer,
    header: DynamicHeader,
    warnings: Vec<String>,
}

impl Dynamic {
    fn read(storage: &dyn Storage, footers: &Footers) -> Result<Self> {
        let file = storage.name();
        let footer = footers.best(file)?.clone();
        let header = DynamicHeader::read(storage, footer.data_offset())?;
        header.judge_sum(file)?;
        check::judge_capacity(file, &footer, &header)?;
        Ok(Self { footer, header, warnings: footers.warning(file).into_iter().collect() })
    }

    fn over_parent(&self) -> bool {
        self.footer.disk_type == DiskType::Differencing
    }
}

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
            let Dynamic { header, .. } = Dynamic::read(&**storage, &footers)?;
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
        let footers = Footers::read(&*storage)?;
        let footer = footers.best(storage.name())?;
        if footer.disk_type == DiskType::Fixed {
            let image = FixedVhd::open(storage, footer.clone(), &footers, writable)?;
            return Ok(Arc::new(image));
        }
        let parts = Dynamic::read(&*storage, &footers)?;
        let over_parent = parts.over_parent();
        let opening = Opening {
            writable,
            limits,
            geometry: parts.header.geometry(),
            guest_bytes: parts.footer.disk_bytes(),
            has_parent: over_parent,
            sector_maps: true,
            warnings: parts.warnings,
            storage,
        };
        let envelope = VhdEnvelope::new(parts.footer, parts.header, over_parent);
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
        let parts = Dynamic::read(storage, &footers)?;
        let (geometry, over_parent) = (parts.header.geometry(), parts.over_parent());
        let envelope = VhdEnvelope::new(parts.footer, parts.header, over_parent);
        compact::compact(storage, &envelope, &geometry, options, &image.monitor)
    }
}
