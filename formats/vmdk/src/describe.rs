//! Describes an image.

use std::sync::Arc;

use vdkit_block::{ExtentInfo, ImageInfo, Limits, Result, Storage};

use crate::descriptor::{ExtentType, NO_PARENT};
use crate::header::{SECTOR, flag};
use crate::source::Source;
use crate::sparse::Flavor;

/// As [`vdkit_block::FormatDriver::describe`].
pub(crate) fn describe(storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
    let source = Source::read(storage, limits)?;
    let mut info = ImageInfo::new("vmdk", source.guest_bytes(storage.name())?);
    info.files = source.files();
    let mut properties: Vec<(String, String)> = Vec::new();
    let mut property = |key: &str, value: String| properties.push((key.to_owned(), value));
    if let Some(placed) = &source.placed {
        let descriptor = &placed.descriptor;
        info.identity = Some(format!("{:08x}", descriptor.cid));
        info.backing_file = descriptor.parent().map(str::to_owned);
        if info.backing_file.is_some() {
            info.backing_format = Some("vmdk".to_owned());
        }
        // Also without a file name: holes must then not read as zero.
        if info.backing_file.is_some() || descriptor.parent_cid != NO_PARENT {
            info.backing_identity = Some(format!("{:08x}", descriptor.parent_cid));
        }
        property("create-type", descriptor.create_type.clone());
        property("cid", format!("{:08x}", descriptor.cid));
        if descriptor.parent_cid != NO_PARENT {
            property("parent-cid", format!("{:08x}", descriptor.parent_cid));
        }
        for (field, key) in
            [("ddb.adapterType", "adapter-type"), ("ddb.virtualHWVersion", "hwversion")]
        {
            if let Some(value) = descriptor.field(field) {
                property(key, value.to_owned());
            }
        }
        if source.header.is_none() {
            property("extents", descriptor.extents.len().to_string());
        }
    }
    info.extents = extents(&source, info.virtual_size);
    if let Some(header) = &source.header {
        info.cluster_size = Some(header.grain_bytes());
        let kind = match header.flavor {
            Flavor::Hosted { .. } | Flavor::Stream { .. } => "hosted",
            Flavor::Cowd => "cowd",
            Flavor::Se { .. } => "sesparse",
        };
        property("extent-format", kind.to_owned());
    }
    if let Some(header) = source.header.as_ref().and_then(|header| header.hosted.as_ref()) {
        info.dirty = header.unclean;
        info.compression = header.is_compressed().then_some("zlib");
        property("header-version", header.version.to_string());
        property("zeroed-grain", header.has(flag::ZERO_GRAIN).to_string());
        property("redundant-directory", header.has(flag::REDUNDANT).to_string());
    }
    info.properties = properties;
    Ok(info)
}

/// The pieces of the disk.
fn extents(source: &Source, guest_bytes: u64) -> Vec<ExtentInfo> {
    if let Some(header) = &source.header {
        let compressed = matches!(header.flavor, Flavor::Stream { .. });
        return vec![ExtentInfo { guest_bytes, file: None, kind: "SPARSE", compressed }];
    }
    let lines = source.placed.iter().flat_map(|placed| &placed.descriptor.extents);
    lines
        .map(|line| ExtentInfo {
            guest_bytes: line.sectors.saturating_mul(SECTOR),
            file: (line.kind != ExtentType::Zero).then(|| line.name.clone()),
            kind: match line.kind {
                ExtentType::Flat => "FLAT",
                ExtentType::Sparse => "SPARSE",
                ExtentType::SeSparse => "SESPARSE",
                ExtentType::Zero => "ZERO",
            },
            compressed: false,
        })
        .collect()
}
