//! The VHDX format driver.

use std::sync::Arc;

use vdkit_block::{
    AmendRequest, Amendment, CheckReport, CompactOptions, CompactReport, Compaction, CreateRequest,
    Creation, DriverInfo, Format, FormatDriver, ImageInfo, Limits, Measured, Monitor, OfflineImage,
    OpenRequest, OptionSpec, Options, Probe, Repair, Result, Storage,
};

use crate::image::Vhdx;
use crate::layout::FILE_SIGNATURE;
use crate::options::{NewImage, SPECS};
use crate::{amend, check, compact, create, describe};

/// VHDX images: fixed, dynamic and differencing.
#[derive(Clone, Copy, Debug, Default)]
pub struct VhdxDriver;

impl FormatDriver for VhdxDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "vhdx",
            aliases: &[],
            extensions: &["vhdx"],
            description: "Hyper-V's format: fixed, dynamic or on a parent, its metadata kept by a log",
        }
    }

    fn probe(&self, head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        if head.starts_with(FILE_SIGNATURE) { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        describe::describe(storage, limits)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Vhdx::open(request)?)
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image.storage, repair, &image.limits, &image.monitor)
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction, amendment: Amendment);
}

impl Creation for VhdxDriver {
    fn options(&self) -> &'static [OptionSpec] {
        SPECS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        create::create(request)
    }

    fn cluster_bytes(&self, options: &Options) -> Result<u64> {
        Ok(NewImage::new(options, 0, false)?.geometry.block_bytes())
    }

    fn measure(&self, guest_bytes: u64, options: &Options, data_clusters: u64) -> Result<Measured> {
        let new = NewImage::new(options, guest_bytes, false)?;
        let all = new.all_blocks_bytes();
        let fully_allocated = new.data_offset() + all;
        let blocks = data_clusters.saturating_mul(new.geometry.block_bytes()).min(all);
        let required = if new.fixed { fully_allocated } else { new.data_offset() + blocks };
        Ok(Measured { required, fully_allocated })
    }
}

impl Compaction for VhdxDriver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        compact::compact(image.storage, options, &image.limits, &image.monitor)
    }
}

impl Amendment for VhdxDriver {
    fn amends_backing(&self) -> bool {
        true
    }

    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        amend::amend(request, monitor)
    }
}
