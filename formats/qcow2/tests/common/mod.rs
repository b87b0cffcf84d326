//! Helpers of the integration tests: create images with vdkit, and compare its descriptions with
//! QEMU's.

#![allow(dead_code)] // each test program uses a part

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use vdkit_block::{
    BackingRef, CacheMode, CreateRequest, Creation, FileIndex, Format, FormatDriver, GuestOffset,
    HostOffset, ImageInfo, Limits, OpenRequest, Options, Result, SnapshotInfo, Storage,
};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::layout::OFFSET_MASK;
use vdkit_storage::{CreateMode, FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::qemu;

pub fn options(text: &str) -> Options {
    Options::parse("qcow2", Qcow2Driver.options(), [text]).unwrap()
}

/// Opens an image for writing.
pub fn open(storage: &Arc<dyn Storage>) -> Arc<dyn Format> {
    let (storage, limits) = (storage.clone(), Limits::default());
    Qcow2Driver.open(OpenRequest { storage, files: Vec::new(), writable: true, limits }).unwrap()
}

/// An image in memory with a backing file.
pub fn image(guest_bytes: u64, text: &str) -> Vec<u8> {
    let memory = Arc::new(MemoryStorage::new("image"));
    let request = CreateRequest {
        storage: memory.clone(),
        files: Vec::new(),
        guest_bytes,
        options: options(text),
        backing: Some(BackingRef::new("base.raw", Some("raw".into()))),
        backing_bytes: None,
    };
    Qcow2Driver.create(&request).unwrap();
    memory.to_vec()
}

/// Writes one cluster of `byte` at guest offset `at`.
pub fn write_cluster(image: &dyn Format, at: u64, byte: u8) -> Result<()> {
    let bytes = vec![byte; image.caps().cluster_bytes as usize];
    let place = image.reserve(GuestOffset(at), bytes.len() as u64)?.expect("a new cluster");
    image.file(FileIndex(0)).write_at(&bytes, place.host_of(at))?;
    place.publish()
}

/// Host offset of the first L2 table. The header's bytes 40 to 47 name the L1 table.
pub fn first_l2(storage: &dyn Storage) -> u64 {
    let entry = |at: u64| {
        let mut bytes = [0; 8];
        storage.read_at(&mut bytes, HostOffset(at)).unwrap();
        u64::from_be_bytes(bytes) & OFFSET_MASK
    };
    entry(entry(40))
}

pub fn new_file(path: &Path) -> Arc<dyn Storage> {
    // No power cut is simulated here.
    let writable = FileOptions::read_write().cache(CacheMode::Unsafe);
    let new = writable.create(CreateMode::New);
    Arc::new(FileStorage::open(path, &new).unwrap())
}

/// Creates an image with vdkit, and its data file (named in the options) in the same folder.
pub fn create(path: &Path, guest_bytes: u64, text: &str) -> Result<()> {
    let options = options(text);
    let data_file = options.text("data_file").map(|name| new_file(&path.with_file_name(name)));
    Qcow2Driver.create(&CreateRequest {
        storage: new_file(path),
        files: data_file.into_iter().collect(),
        guest_bytes,
        options,
        backing: None,
        backing_bytes: None,
    })
}

pub fn describe(path: &Path) -> Result<ImageInfo> {
    let storage: Arc<dyn Storage> =
        Arc::new(FileStorage::open(path, &FileOptions::read_only()).unwrap());
    Qcow2Driver.describe(&storage, &Limits::default())
}

pub fn property<'a>(info: &'a ImageInfo, key: &str) -> Option<&'a str> {
    info.properties.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
}

/// Compares vdkit's description with QEMU's, field by field.
#[track_caller]
pub fn assert_described_alike(path: &Path) {
    let ours = describe(path).unwrap();
    let theirs = qemu::info(path, "qcow2");
    let fields = theirs.as_object().unwrap();
    for (key, value) in fields {
        let found: Value = match key.as_str() {
            "filename" | "actual-size" | "children" | "full-backing-filename" => continue,
            "format" => ours.format.into(),
            "virtual-size" => ours.virtual_size.into(),
            "cluster-size" => ours.cluster_size.into(),
            "dirty-flag" => ours.dirty.into(),
            "encrypted" => ours.encryption.is_some().into(),
            "backing-filename" => ours.backing_file.clone().into(),
            "backing-filename-format" => ours.backing_format.clone().into(),
            "snapshots" => {
                assert_snapshots_alike(&ours.snapshots, value.as_array().unwrap());
                continue;
            }
            "format-specific" => {
                assert_specifics_alike(&ours, &value["data"]);
                continue;
            }
            other => panic!("QEMU says {other}: {value}"),
        };
        assert_eq!(found, *value, "{key} of {}", path.display());
    }
    let has = |key: &str| fields.contains_key(key);
    assert_eq!(ours.backing_file.is_some(), has("backing-filename"));
    assert_eq!(ours.backing_format.is_some(), has("backing-filename-format"));
    assert_eq!(ours.snapshots.is_empty(), !has("snapshots"));
    assert_eq!(ours.encryption.is_some(), has("encrypted"));
}

#[track_caller]
fn assert_specifics_alike(ours: &ImageInfo, data: &Value) {
    let text = |key: &str| -> Value {
        ours.properties.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str()).into()
    };
    let parsed = |key: &str| -> Value {
        text(key).as_str().and_then(|t| serde_json::from_str(t).ok()).unwrap_or(Value::Null)
    };
    for (key, value) in data.as_object().unwrap() {
        let found: Value = match key.as_str() {
            "compat" => text(key),
            "compression-type" => ours.compression.into(),
            "lazy-refcounts" | "refcount-bits" | "extended-l2" => parsed(key),
            "corrupt" => ours.corrupt.into(),
            "data-file" => ours.files[0].clone().into(),
            "data-file-raw" => ours.data_file_raw.into(),
            "encrypt" => {
                assert_eq!(ours.encryption.as_deref(), value["format"].as_str());
                continue;
            }
            "bitmaps" => {
                assert_bitmaps_alike(ours, value.as_array().unwrap());
                continue;
            }
            other => panic!("QEMU says {other}: {value}"),
        };
        assert_eq!(found, *value, "{key}");
    }
    let has = |key: &str| data.get(key).is_some();
    assert_eq!(!ours.files.is_empty(), has("data-file"));
    assert_eq!(ours.bitmaps.is_empty(), !has("bitmaps"));
    assert_eq!(ours.encryption.is_some(), has("encrypt"));
}

#[track_caller]
fn assert_bitmaps_alike(ours: &ImageInfo, theirs: &[Value]) {
    assert_eq!(ours.bitmaps.len(), theirs.len());
    for (a, b) in ours.bitmaps.iter().zip(theirs) {
        let flags: Vec<&str> =
            b["flags"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
        assert_eq!(a.name, b["name"]);
        assert_eq!(a.granularity, b["granularity"].as_u64().unwrap());
        assert_eq!(a.in_use, flags.contains(&"in-use"));
        assert_eq!(a.enabled, flags.contains(&"auto"));
    }
}

#[track_caller]
fn assert_snapshots_alike(ours: &[SnapshotInfo], theirs: &[Value]) {
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(theirs) {
        assert_eq!(a.id, b["id"]);
        // QEMU shows the first 255 bytes.
        assert_eq!(a.name[..a.name.len().min(255)], b["name"]);
        assert_eq!(a.vm_state_bytes, b["vm-state-size"].as_u64().unwrap());
        assert_eq!(u64::from(a.date_seconds), b["date-sec"].as_u64().unwrap());
        assert_eq!(u64::from(a.date_nanoseconds), b["date-nsec"].as_u64().unwrap());
        let clock = b["vm-clock-sec"].as_u64().unwrap() * 1_000_000_000
            + b["vm-clock-nsec"].as_u64().unwrap();
        assert_eq!(a.vm_clock_nanoseconds, clock);
        assert_eq!(a.icount, b["icount"].as_u64());
    }
}

/// A fresh folder, and a path in it.
pub fn scratch(name: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    (folder, path)
}
