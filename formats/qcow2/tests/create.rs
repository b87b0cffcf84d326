//! New images against QEMU's tools: for all options, `qemu-img check` finds no errors, `qemu-img
//! info` shows the requested properties, and the guest reads zeroes.

mod common;

use std::path::Path;
use std::sync::Arc;

use common::{assert_described_alike, create, new_file, options, scratch};
use vdkit_block::{
    BackingRef, CreateRequest, Creation, Format, FormatDriver, GuestOffset, Limits, OfflineImage,
    OpenRequest, Place, Storage,
};
use vdkit_qcow2::{Qcow2, Qcow2Driver};
use vdkit_storage::{FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::{CountingStorage, LoggedOp, create_image, qemu, require_peer};

const ALL: [&str; 4] = ["off", "metadata", "falloc", "full"];

/// Creates an image and checks it with QEMU.
fn prove(path: &Path, guest_bytes: u64, text: &str) {
    create(path, guest_bytes, text).unwrap_or_else(|e| panic!("{text} {guest_bytes}: {e}"));
    let checked = qemu::check(path, "qcow2", None);
    assert!(checked.clean(), "{text} {guest_bytes}: {}", checked.text);
    assert_described_alike(path);
    assert_eq!(
        qemu::info(path, "qcow2")["virtual-size"].as_u64(),
        Some(guest_bytes.next_multiple_of(512)),
        "{text}"
    );
    let mut end = 0;
    for extent in qemu::map(path, "qcow2") {
        assert_eq!(extent["start"], end, "{text}");
        end += extent["length"].as_u64().unwrap();
        // Written zeroes are data, as is reserved space on some file systems, and so are zeroes
        // that share a file system block with the tables.
        let written = ["full", "falloc", "data_file"].iter().any(|word| text.contains(word));
        if !written && (end > 4096 || extent["data"] == false) {
            assert_eq!(extent["zero"], guest_bytes > 0, "{text} {guest_bytes}: {extent}");
        }
    }
    assert_eq!(end, guest_bytes.next_multiple_of(512), "{text}");
    opens_and_reads_as_zero(path, text);
}

/// vdkit's own check and engine agree.
fn opens_and_reads_as_zero(path: &Path, text: &str) {
    let open = |path: &Path| -> Arc<dyn Storage> {
        Arc::new(FileStorage::open(path, &FileOptions::read_only()).unwrap())
    };
    let storage = open(path);
    let limits = Limits::default();
    let checked = OfflineImage::new(&storage);
    let report = Qcow2Driver.check(&checked, vdkit_block::Repair::Nothing).unwrap();
    assert!(report.findings.is_empty(), "{text}: {:?}", report.findings);
    let data_file = options(text).text("data_file").map(|name| open(&path.with_file_name(name)));
    let files = data_file.into_iter().collect();
    let image = Qcow2Driver.open(OpenRequest { storage, files, writable: false, limits }).unwrap();
    let mut at = 0;
    while at < image.guest_bytes() {
        let extent = image.resolve(GuestOffset(at), image.guest_bytes() - at).unwrap();
        match extent.place {
            Place::Hole | Place::Zero { .. } => {}
            Place::Data { file, offset, exclusive } => {
                assert!(exclusive, "{text}");
                // All data is one run of holes or zeroes.
                assert_eq!(extent.len, image.guest_bytes(), "{text}");
                let mut buf = vec![1; extent.len.min(1 << 20) as usize];
                image.file(file).read_padded(&mut buf, offset).unwrap();
                assert!(buf.iter().all(|&b| b == 0), "{text}");
            }
            other => panic!("{text}: {other:?}"),
        }
        at += extent.len;
    }
}

/// The cross product of version 3 for one cluster size.
fn cross(cluster_size: &str) {
    if !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut made = 0;
    for refcount_bits in [1, 2, 4, 8, 16, 32, 64] {
        for extended in ["off", "on"] {
            if extended == "on" && matches!(cluster_size, "512" | "4K") {
                continue;
            }
            for preallocation in ALL {
                // All sizes with one width, and all widths with one size that is not
                // cluster-aligned.
                let sizes: &[u64] = match (preallocation, refcount_bits) {
                    ("metadata", 16) => &[0, 512, (1 << 20) + 512, 1 << 30],
                    ("off", 16) => &[0, 512, 1 << 30, (1 << 36) + 1],
                    _ => &[(1 << 20) + 512],
                };
                for &size in sizes {
                    let text = format!(
                        "cluster_size={cluster_size},refcount_bits={refcount_bits},\
                         extended_l2={extended},preallocation={preallocation}"
                    );
                    made += 1;
                    prove(&dir.path().join(format!("{made}.qcow2")), size, &text);
                }
            }
        }
    }
    assert!(made > 30, "{made}");
}

#[test]
fn each_geometry_of_512_byte_clusters_is_clean_with_each_preallocation() {
    cross("512");
}

#[test]
fn each_geometry_of_4k_clusters_is_clean_with_each_preallocation() {
    cross("4K");
}

#[test]
fn each_geometry_of_64k_clusters_is_clean_with_each_preallocation() {
    cross("64K");
}

#[test]
fn each_geometry_of_2m_clusters_is_clean_with_each_preallocation() {
    cross("2M");
}

#[test]
fn each_version_2_geometry_is_clean_with_each_preallocation() {
    if !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (i, cluster_size) in ["512", "4K", "64K", "2M"].iter().enumerate() {
        for (j, preallocation) in ALL.iter().enumerate() {
            for (k, size) in [0, 512, (1 << 20) + 512].into_iter().enumerate() {
                let text = format!(
                    "compat=0.10,cluster_size={cluster_size},preallocation={preallocation}"
                );
                prove(&dir.path().join(format!("{i}{j}{k}.qcow2")), size, &text);
            }
        }
    }
}

#[test]
fn cluster_sizes_in_between_and_other_features() {
    if !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (i, text) in [
        "cluster_size=1K",
        "cluster_size=2K,preallocation=metadata",
        "cluster_size=8K,preallocation=metadata",
        "cluster_size=16K,preallocation=metadata,extended_l2=on",
        "cluster_size=32K,preallocation=falloc,extended_l2=on",
        "cluster_size=128K,preallocation=metadata",
        "cluster_size=1M,preallocation=metadata,refcount_bits=1",
        "lazy_refcounts=on",
        "lazy_refcounts=on,preallocation=metadata",
        "compression_type=zstd",
        "compression_type=zstd,extended_l2=on,lazy_refcounts=on,refcount_bits=64",
        "compat=v2",
        "compat=v3",
    ]
    .into_iter()
    .enumerate()
    {
        prove(&dir.path().join(format!("{i}.qcow2")), (100 << 20) + 1536, text);
    }
}

#[test]
fn data_files_hold_each_byte_at_its_own_offset() {
    if !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = (5 << 20) + 512;
    let mut made = 0;
    for raw in ["off", "on"] {
        for extended in ["off", "on"] {
            for preallocation in ALL {
                made += 1;
                let path = dir.path().join(format!("{made}.qcow2"));
                let data = dir.path().join(format!("{made}.raw"));
                // QEMU resolves a relative name against its working directory.
                let text = format!(
                    "data_file={},data_file_raw={raw},extended_l2={extended},\
                     preallocation={preallocation}",
                    data.display()
                );
                prove(&path, size, &text);
                assert_eq!(data.metadata().unwrap().len(), size, "{text}");
                // QEMU's writes through the image appear in the data file at the same offset, and a
                // raw data file reads as the disk.
                qemu::io(&path, "qcow2", &["write -P 7 1M 64k", "write -P 8 5M 512"]);
                qemu::io(&data, "raw", &["read -P 7 1M 64k", "read -P 8 5M 512"]);
                assert!(qemu::check(&path, "qcow2", None).clean(), "{text}");
                if raw == "on" {
                    assert!(qemu::same((&path, "qcow2"), (&data, "raw")), "{text}");
                    // Mapped from the start, so that writes to the raw file are visible too.
                    qemu::io(&data, "raw", &["write -P 9 3M 64k"]);
                    qemu::io(&path, "qcow2", &["read -P 9 3M 64k"]);
                }
            }
        }
    }
}

#[test]
fn qemu_writes_to_each_kind_and_it_stays_clean() {
    if !require_peer("qemu-io") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (i, text) in [
        "",
        "cluster_size=512",
        "cluster_size=2M,extended_l2=on",
        "preallocation=metadata",
        "preallocation=metadata,extended_l2=on",
        "preallocation=full,extended_l2=on",
        "preallocation=falloc,refcount_bits=1,cluster_size=4K",
        "compat=0.10,preallocation=metadata",
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join(format!("{i}.qcow2"));
        create(&path, 8 << 20, text).unwrap();
        qemu::io(&path, "qcow2", &["write -P 1 0 64k", "write -P 2 1M 3M", "write -P 3 8191k 512"]);
        qemu::io(
            &path,
            "qcow2",
            &["read -P 1 0 64k", "read -P 2 1M 3M", "read -P 0 64k 960k", "read -P 3 8191k 512"],
        );
        let checked = qemu::check(&path, "qcow2", None);
        assert!(checked.clean(), "{text}: {}", checked.text);
    }
}

#[test]
fn a_preallocated_overlay_with_subclusters_shows_its_backing_file() {
    if !require_peer("qemu-io") {
        return;
    }
    for preallocation in ["metadata", "falloc", "full"] {
        let (dir, path) = scratch("top.qcow2");
        let base = dir.path().join("base.raw");
        std::fs::write(&base, vec![5; 4 << 20]).unwrap();
        Qcow2Driver
            .create(&CreateRequest {
                storage: new_file(&path),
                files: Vec::new(),
                guest_bytes: 4 << 20,
                options: options(&format!("extended_l2=on,preallocation={preallocation}")),
                backing: Some(BackingRef::new("base.raw", Some("raw".into()))),
                backing_bytes: None,
            })
            .unwrap();
        assert_described_alike(&path);
        assert!(qemu::check(&path, "qcow2", None).clean());
        assert!(qemu::same((&path, "qcow2"), (&base, "raw")), "{preallocation}");
        qemu::io(&path, "qcow2", &["write -P 6 1M 1000", "read -P 5 1025k 3071k"]);
        assert!(qemu::check(&path, "qcow2", None).clean());
    }
}

#[test]
fn a_terabyte_of_metadata_is_a_few_large_writes_in_bounded_memory() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new("big"));
    let storage = CountingStorage::new(memory);
    storage.log_calls(true);
    create_image(&Qcow2Driver, storage.clone(), 1 << 40, "preallocation=metadata");
    let counts = storage.counts();
    let tables = (128 << 20) + (32 << 20); // L2 tables, refcounts
    assert!(counts.bytes_written < tables + (1 << 20), "{counts:?}");
    assert!(counts.writes <= tables / (1 << 20) + 8, "{counts:?}");
    assert_eq!((counts.syncs, counts.reads, counts.zeroes), (1, 0, 0));
    let largest = storage.take_log().into_iter().filter_map(|op| match op {
        LoggedOp::Write(_, len) => Some(len),
        _ => None,
    });
    assert!(largest.max() <= Some(1 << 20));
    // One run from the first guest byte to the last.
    let request = OpenRequest {
        storage: storage.clone(),
        files: Vec::new(),
        writable: false,
        limits: Limits::default(),
    };
    let image = Qcow2::open(request).unwrap();
    let (mut at, mut next) = (0, None);
    while at < 1 << 40 {
        let extent = image.resolve(GuestOffset(at), (1 << 40) - at).unwrap();
        let Place::Data { offset, .. } = extent.place else { panic!("{extent:?}") };
        assert!(next.is_none_or(|next| next == offset), "{at:#x}");
        next = Some(offset + extent.len);
        at += extent.len;
        if at == 1 << 30 {
            at = (1 << 40) - (1 << 30); // skip the uniform middle
            next = None;
        }
    }
}

#[test]
fn a_terabyte_is_clean() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("big.qcow2");
    create(&path, 1 << 40, "preallocation=metadata,cluster_size=2M").unwrap();
    let checked = qemu::check(&path, "qcow2", None);
    assert!(checked.clean(), "{}", checked.text);
    assert_described_alike(&path);
}

#[test]
fn a_small_image_takes_four_writes_and_one_sync_and_is_the_same_each_time() {
    let make = || {
        let memory = Arc::new(MemoryStorage::new("small"));
        let storage = CountingStorage::new(memory.clone());
        create_image(&Qcow2Driver, storage.clone(), 10 << 30, "");
        (storage.counts(), memory.to_vec())
    };
    let (counts, bytes) = make();
    assert!(counts.writes <= 4 && counts.syncs == 1 && counts.reads == 0, "{counts:?}");
    assert_eq!(bytes.len(), 4 << 16); // header, refcount table, refcount block, L1
    assert!(bytes == make().1);
}

#[test]
fn stale_bytes_of_a_device_never_show() {
    for text in [
        "",
        "preallocation=metadata",
        "preallocation=falloc,extended_l2=on",
        "preallocation=full",
        "cluster_size=512,refcount_bits=1",
    ] {
        let device = MemoryStorage::from_bytes("device", &vec![0xa5; 4 << 20]).fixed_len();
        let storage: Arc<dyn Storage> = Arc::new(device);
        let request = CreateRequest {
            storage: storage.clone(),
            files: Vec::new(),
            guest_bytes: 2 << 20,
            options: options(text),
            backing: None,
            backing_bytes: None,
        };
        Qcow2Driver.create(&request).unwrap();
        let limits = Limits::default();
        let checked = OfflineImage::new(&storage);
        let report = Qcow2Driver.check(&checked, vdkit_block::Repair::Nothing).unwrap();
        assert!(report.findings.is_empty(), "{text}: {:?}", report.findings);
        let open = OpenRequest { storage, files: Vec::new(), writable: false, limits };
        let image = Qcow2Driver.open(open).unwrap();
        let mut at = 0;
        while at < image.guest_bytes() {
            let extent = image.resolve(GuestOffset(at), image.guest_bytes() - at).unwrap();
            if let Place::Data { file, offset, .. } = extent.place {
                let mut buf = vec![1; extent.len as usize];
                image.file(file).read_at(&mut buf, offset).unwrap();
                assert!(buf.iter().all(|&b| b == 0), "{text}");
            }
            at += extent.len;
        }
        let small: Arc<dyn Storage> = Arc::new(MemoryStorage::with_len("device", 1000).fixed_len());
        let error = Qcow2Driver.create(&CreateRequest { storage: small, ..request }).unwrap_err();
        assert_eq!(error.kind(), vdkit_block::ErrorKind::NoSpace, "{text}: {error}");
    }
}

#[test]
fn what_was_in_the_file_is_gone() {
    let bytes = vec![0xa5; 8 << 20];
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("old", &bytes));
    create_image(&Qcow2Driver, storage.clone(), 1 << 20, "preallocation=metadata");
    let mut all = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut all, vdkit_block::HostOffset(0)).unwrap();
    assert!(!all.contains(&0xa5));
}

#[test]
fn sizes_that_cannot_be_are_refused_with_the_cluster_size_that_can() {
    let refusal = |size: u64, text: &str| {
        let storage = Arc::new(MemoryStorage::new("x"));
        let request = CreateRequest {
            storage: storage.clone(),
            files: Vec::new(),
            guest_bytes: size,
            options: options(text),
            backing: None,
            backing_bytes: None,
        };
        let error = Qcow2Driver.create(&request).unwrap_err();
        assert_eq!(error.kind(), vdkit_block::ErrorKind::Usage);
        assert_eq!(storage.len().unwrap(), 0, "{text}: something was written");
        error.to_string()
    };
    assert!(refusal(129 << 30, "cluster_size=512").contains("cluster_size=1K"));
    assert!(refusal(100 << 40, "cluster_size=512").contains("cluster_size=16K"));
    assert!(refusal(3 << 50, "").contains("cluster_size=128K"));
    assert!(refusal(5 << 50, "extended_l2=on").contains("cluster_size=256K"));
    assert!(refusal(i64::MAX as u64, "cluster_size=2M").contains("no cluster size"));
    let said = refusal(64 << 30, "cluster_size=512,refcount_bits=64,preallocation=metadata");
    assert!(said.contains("refcount table") && said.contains("refcount_bits"), "{said}");
    let said = refusal(1 << 58, "cluster_size=2M,preallocation=metadata");
    assert!(said.contains("host offsets"), "{said}");
    let said = refusal(1 << 20, "data_file=x");
    assert!(said.contains("'x'"), "{said}");
    // The largest disk that the L1 table can hold.
    let (_dir, path) = scratch("largest.qcow2");
    create(&path, 128 << 30, "cluster_size=512").unwrap();
    if require_peer("qemu-img") {
        assert!(qemu::check(&path, "qcow2", None).clean());
    }
}

#[test]
fn a_name_that_does_not_fit_is_refused() {
    let request = |bytes: usize, text: &str| CreateRequest {
        storage: Arc::new(MemoryStorage::new("x")),
        files: Vec::new(),
        guest_bytes: 1 << 20,
        options: options(text),
        backing: Some(BackingRef::new("n".repeat(bytes), Some("qcow2".into()))),
        backing_bytes: None,
    };
    Qcow2Driver.create(&request(1023, "")).unwrap();
    assert!(Qcow2Driver.create(&request(1024, "")).is_err());
    Qcow2Driver.create(&request(300, "cluster_size=512")).unwrap();
    let error = Qcow2Driver.create(&request(500, "cluster_size=512")).unwrap_err().to_string();
    assert!(error.contains("larger cluster_size"), "{error}");
}
