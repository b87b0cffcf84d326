//! The raw driver, which matches any file.

use std::sync::Arc;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, Compaction, CreateRequest, Creation, DriverInfo,
    Error, Format, FormatDriver, HostOffset, ImageInfo, Limits, Measured, OfflineImage,
    OpenRequest, OptionKind, OptionSpec, Options, Probe, Repair, Result, Storage, compact_flat,
    in_steps,
};

use crate::SECTOR_BYTES;
use crate::format::{GUEST_BYTES_MAX, RawFormat, guest_bytes_of, whole_sectors};

const OPTIONS: &[OptionSpec] = &[OptionSpec {
    key: "preallocation",
    kind: OptionKind::Word(&["off", "falloc", "full"]),
    default: "off",
    help: "off: a sparse file; falloc: space is reserved; full: zeroes are written",
}];

/// Bytes per write of `preallocation=full`.
const FULL_STEP: u64 = 1 << 20;

/// Raw images.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawDriver;

impl FormatDriver for RawDriver {
    fn info(&self) -> DriverInfo {
        DriverInfo {
            name: "raw",
            aliases: &[],
            extensions: &["raw", "img"],
            description: "the guest's bytes as they are, in a file or on a block device",
        }
    }

    fn probe(&self, _head: &[u8], _tail: &[u8], _len: u64) -> Probe {
        Probe::Fallback
    }

    fn describe(&self, storage: &Arc<dyn Storage>, _limits: &Limits) -> Result<ImageInfo> {
        Ok(ImageInfo::new(self.info().name, guest_bytes_of(&**storage)?))
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        Ok(Arc::new(RawFormat::new(request.storage, request.writable)?))
    }

    fn check(&self, image: &OfflineImage<'_>, _repair: Repair) -> Result<CheckReport> {
        // There is no metadata to check; only the length is known.
        Ok(CheckReport { image_end_offset: image.storage.len()?, ..CheckReport::default() })
    }

    vdkit_block::capabilities!(creation: Creation, compaction: Compaction);
}

impl Creation for RawDriver {
    fn options(&self) -> &'static [OptionSpec] {
        OPTIONS
    }

    fn create(&self, request: &CreateRequest) -> Result<()> {
        let storage = &*request.storage;
        let remedy = "raw has no place for its name; create a qcow2 image";
        request.refuse_backing("a raw image", remedy)?;
        let bytes = whole_sectors(request.guest_bytes).ok_or_else(|| {
            Error::limit(storage.name(), "size", request.guest_bytes, GUEST_BYTES_MAX)
        })?;
        storage.make_room(bytes, bytes)?;
        if !storage.caps().growable {
            return Ok(());
        }
        match request.options.text("preallocation") {
            Some("falloc") if bytes > 0 => storage.allocate(HostOffset(0), bytes),
            Some("full") => write_all_zeroes(storage, bytes),
            _ => Ok(()),
        }
    }

    fn writes_in_order(&self, options: &Options) -> bool {
        options.text("preallocation").is_none_or(|mode| mode == "off")
    }

    fn cluster_bytes(&self, _options: &Options) -> Result<u64> {
        Ok(SECTOR_BYTES)
    }

    /// The file's length, whatever its content: a device for it needs this size.
    fn measure(&self, guest_bytes: u64, _: &Options, _data_clusters: u64) -> Result<Measured> {
        let bytes = whole_sectors(guest_bytes).ok_or_else(|| {
            Error::invalid(format!("a raw image of {guest_bytes} bytes is too large"))
        })?;
        Ok(Measured { required: bytes, fully_allocated: bytes })
    }
}

impl Compaction for RawDriver {
    fn compact(&self, image: &OfflineImage<'_>, options: CompactOptions) -> Result<CompactReport> {
        compact_flat(&**image.storage, options, &image.monitor)
    }
}

fn write_all_zeroes(storage: &dyn Storage, bytes: u64) -> Result<()> {
    let zeroes = vec![0; FULL_STEP.min(bytes) as usize];
    in_steps(HostOffset(0), HostOffset(bytes), FULL_STEP, |at, len| {
        storage.write_at(&zeroes[..len as usize], at)
    })
}
