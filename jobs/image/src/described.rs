//! What an image's header says, as JSON.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_block::{BitmapInfo, ImageInfo, Result, SnapshotInfo};
use vdkit_chain::{ChainLink, Disk, Registry};

/// An image as JSON. Keys that qemu-img also has keep its names.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Described<'a> {
    filename: String,
    format: &'a str,
    format_probed: bool,
    virtual_size: u64,
    actual_size: u64,
    file_length: u64,
    device: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compression_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encryption: Option<&'a str>,
    dirty_flag: bool,
    corrupt_flag: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_filename_format: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_file: Option<&'a str>,
    data_file_raw: bool,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    files: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    identity: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing_identity: Option<&'a str>,
    snapshots: &'a [SnapshotInfo],
    bitmaps: &'a [BitmapInfo],
    properties: BTreeMap<&'a str, &'a str>,
}

/// An image of an open disk; see [`describe_disk`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiskImage {
    /// The path by which it was opened.
    pub path: PathBuf,
    /// What its header says now.
    pub info: ImageInfo,
    /// Its format was probed.
    pub probed: bool,
    host: Host,
}

/// What the host says of a file: length and allocated bytes, and whether it is a device.
#[derive(Clone, Copy, Debug)]
struct Host {
    file_bytes: u64,
    allocated_bytes: u64,
    device: bool,
}

/// Describes the images of an open disk, top first, by the files that the disk has open, whatever has
/// their names by now. What is not flushed may be missing.
///
/// # Errors
/// Damaged headers; errors of the storages.
pub fn describe_disk(registry: &Registry, disk: &Disk) -> Result<Vec<DiskImage>> {
    let describe = |layer: &vdkit_chain::Layer| {
        let storage = layer.format().storage();
        let driver = registry.driver(layer.info().format)?;
        Ok(DiskImage {
            path: layer.path().to_owned(),
            info: driver.describe(storage, disk.limits())?,
            probed: layer.probed(),
            host: Host {
                file_bytes: storage.len()?,
                allocated_bytes: storage.allocated_bytes()?,
                device: storage.caps().device,
            },
        })
    };
    disk.layers().iter().map(describe).collect()
}

impl<'a> From<&'a DiskImage> for Described<'a> {
    fn from(image: &'a DiskImage) -> Self {
        Self::new(&image.path, &image.info, image.probed, image.host)
    }
}

impl<'a> From<&'a ChainLink> for Described<'a> {
    fn from(link: &'a ChainLink) -> Self {
        let host = Host {
            file_bytes: link.host.file_bytes,
            allocated_bytes: link.host.allocated_bytes,
            device: link.host.device,
        };
        Self::new(&link.path, &link.info, link.probed, host)
    }
}

impl<'a> Described<'a> {
    fn new(path: &Path, info: &'a ImageInfo, probed: bool, host: Host) -> Self {
        Self {
            filename: path.display().to_string(),
            format: info.format,
            format_probed: probed,
            virtual_size: info.virtual_size,
            actual_size: host.allocated_bytes,
            file_length: host.file_bytes,
            device: host.device,
            cluster_size: info.cluster_size,
            compression_type: info.compression,
            encryption: info.encryption.as_deref(),
            dirty_flag: info.dirty,
            corrupt_flag: info.corrupt,
            backing_filename: info.backing_file.as_deref(),
            backing_filename_format: info.backing_format.as_deref(),
            data_file: match &info.files[..] {
                [name] => Some(name),
                _ => None,
            },
            data_file_raw: info.data_file_raw,
            files: &info.files,
            identity: info.identity.as_deref(),
            backing_identity: info.backing_identity.as_deref(),
            snapshots: &info.snapshots,
            bitmaps: &info.bitmaps,
            properties: info
                .properties
                .iter()
                .map(|(key, value)| (key.as_ref(), value.as_str()))
                .collect(),
        }
    }
}
