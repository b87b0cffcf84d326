//! What QEMU's answers say of a format alone (`format-specific`).

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{ChainLink, ExtentInfo, ImageInfo, KeyHeader, Limits, Storage};

use crate::json::Dict;

/// The members of `format-specific.data`; `None` for formats that have none.
pub fn of(link: &ChainLink, extents: &[ExtentFile]) -> Option<Dict> {
    match link.info.format {
        "qcow2" => Some(qcow2(link)),
        "luks" => link.info.key_header.as_ref().map(luks),
        "vmdk" => Some(vmdk(link, extents)),
        _ => None,
    }
}

#[derive(Clone, Debug, Default)]
pub struct ExtentFile {
    /// Its path; `None` if the extent is in the image's own file, or has no file.
    pub path: Option<PathBuf>,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes that it takes.
    pub allocated: u64,
    /// Bytes of a cluster, if it is sparse.
    pub cluster: Option<u64>,
}

/// The files of an image's extents, which are opened for that.
pub fn extent_files(link: &ChainLink) -> vdkit::Result<Vec<ExtentFile>> {
    let of = |extent: &ExtentInfo| {
        let Some(name) = &extent.file else {
            return Ok(ExtentFile { cluster: link.info.cluster_size, ..ExtentFile::default() });
        };
        let path = match link.path.parent() {
            Some(folder) => folder.join(name),
            None => PathBuf::from(name),
        };
        let options = FileOptions::read_only().lock(LockMode::Off);
        let file = FileStorage::open(&path, &options)?;
        let (bytes, allocated) = (file.len()?, (&file as &dyn Storage).allocated_bytes()?);
        let sparse = extent.kind != "FLAT";
        let info = sparse.then(|| describe(Arc::new(file))).transpose()?;
        let cluster = info.and_then(|info| info.cluster_size);
        Ok(ExtentFile { path: Some(path), bytes, allocated, cluster })
    };
    link.info.extents.iter().map(of).collect()
}

fn describe(file: Arc<dyn Storage>) -> vdkit::Result<ImageInfo> {
    vdkit::format("vmdk")?.describe(&file, &Limits::default())
}

fn vmdk(link: &ChainLink, files: &[ExtentFile]) -> Dict {
    let id = |key: &str| link.info.property(key).and_then(|hex| u64::from_str_radix(hex, 16).ok());
    let extents: Vec<Value> = link
        .info
        .extents
        .iter()
        .zip(files)
        .map(|(extent, file)| {
            let own = file.path.is_none();
            let path = file.path.as_deref().unwrap_or(&link.path);
            Dict::default()
                .with_some("compressed", extent.compressed.then_some(true))
                .with("virtual-size", extent.guest_bytes)
                .with("filename", path.display().to_string())
                .with_some("cluster-size", file.cluster)
                .with("format", if own { "" } else { extent.kind })
                .into()
        })
        .collect();
    Dict::default()
        .with("cid", id("cid").unwrap_or(0))
        .with("parent-cid", id("parent-cid").unwrap_or(u64::from(u32::MAX)))
        .with("create-type", link.info.property("create-type").unwrap_or_default())
        .with("extents", extents)
}

/// The members that describe a LUKS header.
fn luks(header: &KeyHeader) -> Dict {
    // `xts-plain64`, or `cbc-essiv:sha256`.
    let (mode, iv) = header.mode.split_once('-').unwrap_or((&header.mode, ""));
    let (iv, iv_hash) = match iv.split_once(':') {
        Some((iv, hash)) => (iv, Some(hash)),
        None => (iv, None),
    };
    // XTS takes two keys of half the length.
    let bits = if mode == "xts" { header.key_bits / 2 } else { header.key_bits };
    let slots: Vec<Value> = header
        .slots
        .iter()
        .map(|slot| {
            Dict::default()
                .with("active", slot.active)
                .with_some("iters", slot.active.then_some(slot.iterations))
                .with("key-offset", slot.material_offset)
                .with_some("stripes", slot.active.then_some(slot.stripes))
                .into()
        })
        .collect();
    Dict::default()
        .with("ivgen-alg", iv)
        .with_some("ivgen-hash-alg", iv_hash)
        .with("detached-header", false)
        .with("hash-alg", header.hash.as_str())
        .with("cipher-alg", format!("{}-{bits}", header.cipher))
        .with("uuid", header.uuid.as_str())
        .with("cipher-mode", mode)
        .with("slots", slots)
        .with("payload-offset", header.payload_offset)
        .with("master-key-iters", header.digest_iterations)
}

fn switch(link: &ChainLink, key: &str) -> Option<bool> {
    link.info.property(key).map(|value| value == "true")
}

fn qcow2(link: &ChainLink) -> Dict {
    let info = &link.info;
    let version3 = link.info.property("compat") == Some("1.1");
    let bits = link.info.property("refcount-bits").and_then(|bits| bits.parse::<u64>().ok());
    let bitmaps: Vec<Value> = info
        .bitmaps
        .iter()
        .map(|bitmap| {
            let flags = [(bitmap.in_use, "in-use"), (bitmap.enabled, "auto")];
            let flags: Vec<Value> =
                flags.iter().filter(|(on, _)| *on).map(|(_, name)| (*name).into()).collect();
            Dict::default()
                .with("name", bitmap.name.as_str())
                .with("granularity", bitmap.granularity)
                .with("flags", flags)
                .into()
        })
        .collect();
    let mut dict = Dict::default()
        .with_some("compat", link.info.property("compat"))
        .with("compression-type", info.compression.unwrap_or("zlib"));
    if !version3 {
        return dict.with_some("refcount-bits", bits).with_some("encrypt", encrypt(info));
    }
    dict = dict.with_some("lazy-refcounts", switch(link, "lazy-refcounts"));
    if !bitmaps.is_empty() {
        dict.put("bitmaps", bitmaps);
    }
    dict.with_some("refcount-bits", bits)
        .with("corrupt", info.corrupt)
        .with_some("extended-l2", switch(link, "extended-l2"))
        .with_some("encrypt", encrypt(info))
        .with_some("data-file", info.files.first().map(String::as_str))
        .with_some("data-file-raw", (!info.files.is_empty()).then_some(info.data_file_raw))
}

/// The member `encrypt` of an encrypted qcow2 image.
fn encrypt(info: &ImageInfo) -> Option<Dict> {
    let method = info.encryption.as_deref()?;
    let dict = info.key_header.as_ref().map(luks).unwrap_or_default();
    Some(dict.with("format", method))
}
