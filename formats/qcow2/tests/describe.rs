//! What `describe` reports for images of QEMU, and at what cost.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{assert_described_alike, create, describe, property, scratch};
use vdkit_block::{Error, FormatDriver, HostOffset, Limits, OpenRequest, Probe, Storage};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::header::Header;
use vdkit_storage::{FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::{CountingStorage, Counts, create_image, qemu, require_peer};

fn qemu_create(path: &Path, arguments: &[&str]) {
    let file = path.to_str().unwrap();
    qemu::img(["create", "-q", "-f", "qcow2", file].iter().chain(arguments)).ok();
}

/// Describes an image and counts its I/O.
fn cost(path: &Path) -> Counts {
    let file = FileStorage::open(path, &FileOptions::read_only()).unwrap();
    let storage = CountingStorage::new(Arc::new(file));
    let shared: Arc<dyn Storage> = storage.clone();
    Qcow2Driver.describe(&shared, &Limits::default()).unwrap();
    storage.counts()
}

#[test]
fn images_of_qemu_are_described_as_qemu_does() {
    if !require_peer("qemu-img") {
        return;
    }
    let (dir, path) = scratch("a.qcow2");
    std::fs::write(dir.path().join("base.raw"), vec![0; 4096]).unwrap();
    let data = format!("data_file={}", dir.path().join("d.raw").display());
    let raw = format!("{data},data_file_raw=on");
    let mut seen = 0;
    for options in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64",
        "lazy_refcounts=on",
        "extended_l2=on",
        "compression_type=zstd",
        "preallocation=metadata",
        &data,
        &raw,
    ] {
        for size in ["0", "1M", "10G"] {
            let _ = std::fs::remove_file(&path);
            qemu_create(&path, &["-o", options, size]);
            assert_described_alike(&path);
            assert_eq!(cost(&path).reads, 1);
            seen += 1;
        }
    }
    assert_eq!(seen, 36);
    for format in [&["-b", "base.raw", "-F", "raw"][..], &["-b", "json:{}", "-F", "raw", "-u"]] {
        let arguments: Vec<&str> = format.iter().copied().chain(["1M"]).collect();
        qemu_create(&path, &arguments);
        assert_described_alike(&path);
    }
    let info = describe(&path).unwrap();
    assert_eq!(info.backing().unwrap().name, "json:{}");
    assert_eq!(info.backing().unwrap().format.as_deref(), Some("raw"));
}

#[test]
fn marks_of_trouble_are_described() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("a.qcow2");
    let bit = |offset: usize, mask: u8| {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[offset] |= mask;
        std::fs::write(&path, bytes).unwrap();
    };
    create(&path, 1 << 20, "lazy_refcounts=on").unwrap();
    bit(79, 1); // dirty
    assert_described_alike(&path);
    assert!(describe(&path).unwrap().dirty);
    std::fs::remove_file(&path).unwrap();
    create(&path, 1 << 20, "").unwrap();
    bit(79, 2); // corrupt
    assert_described_alike(&path);
    assert!(describe(&path).unwrap().corrupt);
    std::fs::remove_file(&path).unwrap();
    create(&path, 1 << 20, "").unwrap();
    bit(80, 0x80); // compatible feature 63
    bit(88, 0x40); // autoclear feature 62
    assert_described_alike(&path);
    let info = describe(&path).unwrap();
    assert_eq!(property(&info, "unknown-compatible-features"), Some("bit 63"));
    assert_eq!(property(&info, "unknown-autoclear-features"), Some("bit 62"));
    bit(72, 0x20); // incompatible feature 61
    let error = describe(&path).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("bit 61"), "{error}");
}

#[test]
fn encrypted_images_are_described_and_not_opened_without_a_key() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("a.qcow2");
    for method in ["luks", "aes"] {
        let options = format!("encrypt.format={method},encrypt.key-secret=s");
        let mut arguments = vec!["--object", "secret,id=s,data=geheim", "-o", &options];
        if method == "luks" {
            arguments.extend(["-o", "encrypt.iter-time=10"]);
        }
        arguments.push("1M");
        let _ = std::fs::remove_file(&path);
        qemu_create(&path, &arguments);
        assert_described_alike(&path);
        assert_eq!(describe(&path).unwrap().encryption.as_deref(), Some(method));
        for writable in [false, true] {
            let options =
                if writable { FileOptions::read_write() } else { FileOptions::read_only() };
            let storage = Arc::new(FileStorage::open(&path, &options).unwrap());
            let request =
                OpenRequest { storage, files: Vec::new(), writable, limits: Limits::default() };
            let error = Qcow2Driver.open(request).unwrap_err();
            if method == "aes" && writable {
                assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            } else {
                assert!(matches!(error, Error::Key { .. }), "{error}");
            }
            assert!(error.to_string().to_lowercase().contains(method), "{error}");
        }
    }
}

#[test]
fn snapshots_and_bitmaps_cost_one_read_each() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("a.qcow2");
    qemu_create(&path, &["1G"]);
    let file = path.to_str().unwrap();
    let long = "n".repeat(1000);
    for name in ["one", "zwei", "第三", long.as_str()] {
        qemu::img(["snapshot", "-c", name, file]).ok();
    }
    assert_described_alike(&path);
    assert_eq!(cost(&path).reads, 2);
    qemu::img(["bitmap", "--add", file, "b0"]).ok();
    qemu::img(["bitmap", "--add", "--disable", "-g", "512", file, "b1"]).ok();
    qemu::img(["bitmap", "--add", "-g", "2G", file, "b2"]).ok();
    assert_described_alike(&path);
    let counts = cost(&path);
    assert_eq!(counts.reads, 3);
    assert!(counts.bytes_read < 256 << 10, "{counts:?}");
    let info = describe(&path).unwrap();
    assert_eq!(info.snapshots.len(), 4);
    assert_eq!(info.snapshots[2].name, "第三");
    assert_eq!(info.snapshots[0].disk_bytes, Some(1 << 30));
    assert_eq!(info.bitmaps[2].granularity, 2 << 30);
    // Software without bitmap support cleared their bit.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[95] &= !1;
    std::fs::write(&path, bytes).unwrap();
    let info = describe(&path).unwrap();
    assert!(info.bitmaps.is_empty());
    assert!(property(&info, "stale-bitmaps").unwrap().starts_with("3,"));
    assert_eq!(cost(&path).reads, 2);
}

#[test]
fn many_long_snapshots_cost_two_reads() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("a.qcow2");
    qemu_create(&path, &["1M"]);
    // A handmade table: 100 entries with names of 2000 bytes.
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.len().next_multiple_of(65536);
    bytes.resize(at, 0);
    let l1 = bytes[40..48].to_vec();
    for index in 0..100u32 {
        let start = bytes.len();
        bytes.extend_from_slice(&l1);
        bytes.extend_from_slice(&[0, 0, 0, 1, 0, 3, 7, 208]); // one L1 entry, id 3, name 2000
        bytes.extend_from_slice(&(1_700_000_000 + index).to_be_bytes());
        bytes.extend_from_slice(&[0; 16]);
        bytes.extend_from_slice(&[0, 0, 0, 16]);
        bytes.extend_from_slice(&(u64::from(index) << 33).to_be_bytes());
        bytes.extend_from_slice(&(1u64 << 20).to_be_bytes());
        bytes.extend_from_slice(format!("{:3}", index + 1).as_bytes());
        bytes.extend_from_slice(&[b'a' + (index % 26) as u8; 2000]);
        bytes.resize(start + (bytes.len() - start).next_multiple_of(8), 0);
    }
    bytes[60..64].copy_from_slice(&100u32.to_be_bytes());
    bytes[64..72].copy_from_slice(&(at as u64).to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    assert_described_alike(&path);
    assert_eq!(cost(&path).reads, 3);
    assert_eq!(describe(&path).unwrap().snapshots[99].vm_state_bytes, 99 << 33);
}

#[test]
fn the_price_does_not_grow_with_the_image() {
    let price = |guest_bytes: u64, text: &str| {
        let storage = CountingStorage::new(Arc::new(MemoryStorage::new("x")));
        let shared: Arc<dyn Storage> = storage.clone();
        create_image(&Qcow2Driver, shared.clone(), guest_bytes, text);
        storage.reset();
        let info = Qcow2Driver.describe(&shared, &Limits::default()).unwrap();
        assert_eq!(info.virtual_size, guest_bytes);
        let counts = storage.counts();
        (counts.reads, counts.bytes_read)
    };
    assert_eq!(price(1 << 20, ""), (1, 4096));
    assert_eq!(price(16 << 40, ""), (1, 4096));
    assert_eq!(price(256 << 30, "preallocation=metadata"), (1, 4096));
}

/// vdkit fills space with an extension of its own, for instance where it removed that of bitmaps.
#[test]
fn padding_is_no_unknown_extension() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("x"));
    create_image(&Qcow2Driver, storage.clone(), 1 << 20, "");
    let header = Header::read(&*storage, &Limits::default()).unwrap();
    let last = header.extensions.last().unwrap();
    let end = HostOffset(last.offset + (last.data.len() as u64).next_multiple_of(8));
    storage.write_at(&[0x76, 0x64, 0x70, 0x64, 0, 0, 0, 8], end).unwrap();
    let info = Qcow2Driver.describe(&storage, &Limits::default()).unwrap();
    assert_eq!(property(&info, "unknown-extensions"), None);
}

#[test]
fn probing_knows_the_magic_and_newer_versions() {
    let head = |version: u32| {
        let mut head = b"QFI\xfb".to_vec();
        head.extend_from_slice(&version.to_be_bytes());
        head
    };
    for (bytes, wanted) in [
        (head(2), Probe::Yes),
        (head(3), Probe::Yes),
        (head(4), Probe::Yes),
        (head(1), Probe::No), // the first qcow
        (head(0), Probe::No),
        (b"QFI\xfb\0\0\0".to_vec(), Probe::No),
        (b"".to_vec(), Probe::No),
        (vec![0; 512], Probe::No),
    ] {
        assert_eq!(Qcow2Driver.probe(&bytes, &[], 1 << 20), wanted, "{bytes:?}");
    }
    let future: Arc<dyn Storage> = Arc::new(MemoryStorage::with_len("x", 1 << 20));
    future.write_at(&head(4), HostOffset(0)).unwrap();
    let error = Qcow2Driver.describe(&future, &Limits::default()).unwrap_err();
    assert!(error.to_string().contains("version 4"), "{error}");
}
