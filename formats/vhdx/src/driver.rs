//! The VHDX format driver.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, DriverInfo, Format, FormatDriver, ImageInfo, Limits, OfflineImage, OpenRequest,
    Probe, Repair, Result, Storage,
};

use crate::image::Vhdx;
use crate::layout::FILE_SIGNATURE;
use crate::{check, describe};

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

    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        describe::describe(storage, limits)
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Vhdx::open(request)?)
    }

    fn check(&self, image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
        check::check(image, repair)
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction, amendment: Amendment);
}
