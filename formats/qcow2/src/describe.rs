//! Describes an image.

use vdkit_block::{ImageInfo, KeyHeader, Limits, Result, Storage};

use crate::bitmaps::Bitmaps;
use crate::encrypted::luks_place;
use crate::header::{Encryption, Header};
use crate::layout::{autoclear, compatible, extension, incompatible};
use crate::snapshots::{Snapshot, SnapshotTable, TablePlace};

/// Describes an image with at most five reads: header (two if it exceeds 4 KiB), snapshot table
/// (two if its entries are unusually long) and bitmap directory. An encrypted image takes one more,
/// for the LUKS header.
///
/// # Errors
/// As [`Header::read`], and [`vdkit_block::Error::Corrupt`] for a damaged snapshot table or bitmap
/// directory.
pub(crate) fn describe(storage: &dyn Storage, limits: &Limits) -> Result<ImageInfo> {
    let header = Header::read(storage, limits)?;
    let snapshots = SnapshotTable::read(storage, TablePlace::of(&header), limits)?;
    let bitmaps = Bitmaps::read(storage, &header, limits)?;
    let mut properties = properties(&header, &bitmaps);
    let mut key_header = None;
    if header.encryption == Encryption::Luks {
        let (described, more) = key_header_of(&header, storage);
        key_header = described;
        properties.extend(more);
    }
    let mut info = ImageInfo::new("qcow2", header.guest_bytes);
    info.cluster_size = Some(header.geometry.cluster_bytes());
    info.compression = Some(compression(&header));
    info.encryption = match header.encryption {
        Encryption::None => None,
        Encryption::LegacyAes => Some("aes".to_owned()),
        Encryption::Luks => Some("luks".to_owned()),
    };
    info.dirty = header.has(incompatible::DIRTY);
    info.corrupt = header.has(incompatible::CORRUPT);
    info.backing_format = header.backing_name.as_ref().and_then(|_| header.backing_format());
    // Without the feature bit, the extension is meaningless.
    info.files = header.data_file_name().filter(|_| header.has_data_file()).into_iter().collect();
    info.data_file_unnamed = header.has_data_file() && header.data_file_name().is_none();
    info.data_file_raw = header.data_file_raw();
    info.snapshots = snapshots.snapshots.iter().map(Snapshot::info).collect();
    if let Bitmaps::Valid(bitmaps) = &bitmaps {
        info.bitmaps = bitmaps.iter().map(|b| b.info()).collect();
    }
    info.key_header = key_header;
    info.properties = properties;
    info.backing_file = header.backing_name;
    Ok(info)
}

/// The LUKS header and its properties. Damage is reported as a property; opening the image fails on it.
fn key_header_of(
    header: &Header,
    storage: &dyn Storage,
) -> (Option<KeyHeader>, Vec<(String, String)>) {
    match luks_place(header, storage).and_then(|place| vdkit_luks::Header::read(storage, place)) {
        Ok(luks) => (Some(luks.describe()), luks.properties()),
        Err(error) => (None, vec![("encryption-fault".to_owned(), error.to_string())]),
    }
}

fn compression(header: &Header) -> &'static str {
    match header.codec {
        vdkit_block::Codec::Zstd => "zstd",
        _ => "zlib",
    }
}

/// Properties without a field of their own, named as in `qemu-img info --output=json`, then unknown
/// features.
fn properties(header: &Header, bitmaps: &Bitmaps) -> Vec<(String, String)> {
    let mut list = Vec::new();
    let mut add = |key: &str, value: String| list.push((key.to_owned(), value));
    add("compat", if header.version >= 3 { "1.1" } else { "0.10" }.to_owned());
    add("refcount-bits", header.geometry.refcount_bits().to_string());
    if header.version >= 3 {
        add("lazy-refcounts", header.lazy_refcounts().to_string());
        add("extended-l2", header.geometry.extended.to_string());
    }
    if header.geometry.extended {
        add("subcluster-size", header.geometry.subcluster_bytes().to_string());
    }
    if header.has_data_file() && header.data_file_name().is_none() {
        add("data-file", "needed, but the image does not name it".to_owned());
    }
    if let Bitmaps::Stale(count) = bitmaps {
        add("stale-bitmaps", format!("{count}, not kept up to date by a later writer"));
    }
    let unknown = header.compatible & !compatible::LAZY_REFCOUNTS;
    if unknown != 0 {
        add("unknown-compatible-features", header.feature_names(1, unknown));
    }
    let unknown = header.autoclear & !autoclear::KNOWN;
    if unknown != 0 {
        add("unknown-autoclear-features", header.feature_names(2, unknown));
    }
    let unknown: Vec<String> = header
        .extensions
        .iter()
        .filter(|e| !extension::KNOWN.contains(&e.kind))
        .map(|e| format!("{:#010x} ({} bytes)", e.kind, e.data.len()))
        .collect();
    if !unknown.is_empty() {
        // Bounded, since an untrusted header can hold very many extensions of 8 bytes.
        const SHOWN: usize = 16;
        let more = unknown.len().saturating_sub(SHOWN);
        let mut text = unknown[..unknown.len() - more].join(", ");
        if more > 0 {
            text.push_str(&format!(" and {more} more"));
        }
        add("unknown-extensions", text);
    }
    list
}
