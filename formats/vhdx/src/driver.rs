//! The VHDX format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, DriverInfo, Format, FormatDriver, ImageInfo, Limits, OfflineImage, OpenRequest,
    Probe, Repair, Result, Storage,
};

use crate::check;
use crate::image::{Parts, Vhdx};
use crate::layout::FILE_SIGNATURE;

/// VHDX images: fixed, dynamic and differencing.
#[derive(Clone, Copy, Debug, Default)]
pub struct VhdxDriver;

impl FormatDriver for VhdxDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "vhdx",
            aliases: &[],
            extensions: &["vhdx", "avhdx"],
            description: "Hyper-V's format: fixed, dynamic or on a parent, its metadata kept by a log",
        }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        if head.starts_with(FILE_SIGNATURE) { Probe::Yes } else { Probe::No }
    }

    /// Takes five reads: headers, the log if used, two region tables, and the metadata table with
    /// its items. Takes six more if the items are elsewhere. All reads have bounded length.
    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        let parts = Parts::read(storage, false, limits)?;
        let (metadata, header) = (&parts.metadata, &parts.headers.current);
        let subformat = match (metadata.geometry.has_parent, metadata.fixed) {
            (true, _) => "differencing",
            (false, true) => "fixed",
            (false, false) => "dynamic",
        };
        let properties = [
            ("subformat", subformat.to_owned()),
            ("logical-sector-size", metadata.geometry.sector_bytes().to_string()),
            ("physical-sector-size", metadata.physical_sector_bytes.to_string()),
            ("log-size", header.log_bytes.to_string()),
            ("disk-id", metadata.disk_id.to_string()),
        ];
        let mut properties: Vec<(String, String)> =
            properties.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        if parts.log_entries > 0 {
            properties.push(("log-entries-to-replay".to_owned(), parts.log_entries.to_string()));
        }
        let backing = parts.backing()?;
        let mut info = ImageInfo::new(self.info().name, metadata.guest_bytes);
        info.cluster_size = Some(metadata.geometry.block_bytes());
        info.dirty = parts.log_entries > 0;
        info.identity = Some(header.data_write.to_string());
        if let Some(backing) = backing {
            info.backing_file = Some(backing.name);
            info.backing_format = backing.format;
            info.backing_identity = backing.identity;
        }
        info.properties = properties;
        Ok(info)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Vhdx::open(request)?)
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image, repair)
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction, amendment: Amendment);
}
