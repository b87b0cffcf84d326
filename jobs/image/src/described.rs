//! What an image's header says, as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use vdkit_block::{BitmapInfo, SnapshotInfo};
use vdkit_chain::ChainLink;

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

impl<'a> From<&'a ChainLink> for Described<'a> {
    fn from(link: &'a ChainLink) -> Self {
        let info = &link.info;
        Self {
            filename: link.path.display().to_string(),
            format: info.format,
            format_probed: link.probed,
            virtual_size: info.virtual_size,
            actual_size: link.host.allocated_bytes,
            file_length: link.host.file_bytes,
            device: link.host.device,
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
