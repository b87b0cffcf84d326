//! What does not grow with the image: reads to open and to describe it, syncs of a long run.

use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{CreateRequest, Disk, GuestOffset, Limits, OpenOptions, OpenRequest, Options, Storage};
use vdkit_testkit::{CountingStorage, Counts};

/// An empty image in memory.
fn image(options: &str, guest_bytes: u64) -> Arc<dyn Storage> {
    let driver = vdkit::format("qcow2").unwrap();
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    driver
        .create(&CreateRequest {
            storage: storage.clone(),
            data_file: None,
            guest_bytes,
            options: Options::parse("qcow2", driver.options(), [options]).unwrap(),
            backing: None,
        })
        .unwrap();
    storage
}

fn open(storage: Arc<dyn Storage>, writable: bool) -> Disk {
    let (driver, limits) = (vdkit::format("qcow2").unwrap(), Limits::default());
    let info = driver.describe(&storage, &limits).unwrap();
    let format = driver.open(OpenRequest { storage, data_file: None, writable, limits }).unwrap();
    Disk::from_format(format, info, &OpenOptions { writable, ..OpenOptions::default() })
}

/// What it costs to describe an image and to open it.
fn counted(image: &Arc<dyn Storage>, what: impl FnOnce(Arc<dyn Storage>)) -> Counts {
    let counting = CountingStorage::new(image.clone());
    what(counting.clone());
    counting.counts()
}

/// Fills a part of an image, so that it has tables and refcount blocks.
fn fill(image: &Arc<dyn Storage>, step: u64, count: u64) {
    let disk = open(image.clone(), true);
    for i in 0..count {
        disk.write_at(&[1; 512], GuestOffset(i * step)).unwrap();
    }
    disk.close().unwrap();
}

#[test]
fn opening_reads_as_often_whatever_the_size() {
    for (options, step) in [
        ("cluster_size=512", 4096),
        ("cluster_size=4K", 65536),
        ("", 1 << 20),
        ("cluster_size=16K,extended_l2=on", 1 << 20),
        ("cluster_size=2M", 8 << 20),
    ] {
        for (count, size) in [(0, 1 << 20), (2000, step * 2000)] {
            let image = image(options, size);
            fill(&image, step, count);
            let driver = vdkit::format("qcow2").unwrap();
            let limits = Limits::default();
            let described = counted(&image, |s| drop(driver.describe(&s, &limits).unwrap()));
            let opened = |writable| {
                counted(&image, |storage| {
                    let request = OpenRequest { storage, data_file: None, writable, limits };
                    drop(driver.open(request).unwrap());
                })
            };
            let (reading, writing) = (opened(false), opened(true));
            let what = format!("'{options}', {count} clusters of {size} bytes");
            // The header; then the L1 table; then the refcount table.
            assert_eq!((described.reads, reading.reads, writing.reads), (1, 2, 3), "{what}");
            assert_eq!((writing.writes, writing.syncs, writing.set_lens), (0, 0, 0), "{what}");
            // An L1 entry maps 32 KiB at least, and the refcount table is one cluster.
            let most = (64 << 10) + size / 4096 + (2 << 20);
            assert!(writing.bytes_read <= most, "{what}: {} bytes read", writing.bytes_read);
        }
    }
}

/// Syncs of so many writes, each to a cluster of its own, and one flush.
fn syncs_of(
    disk: &Disk,
    counting: &CountingStorage,
    cluster: u64,
    writes: std::ops::Range<u64>,
) -> u64 {
    counting.reset();
    for i in writes {
        disk.write_at(&[1; 512], GuestOffset(i * cluster)).unwrap();
    }
    disk.flush().unwrap();
    counting.counts().syncs
}

#[test]
fn thousands_of_allocating_writes_and_one_flush_cost_two_syncs() {
    for (options, cluster) in [
        ("cluster_size=16K,extended_l2=on", 16384),
        ("cluster_size=32K", 32768),
        ("", 65536),
        ("compat=0.10", 65536),
        ("refcount_bits=1", 65536),
        ("cluster_size=2M", 2 << 20),
    ] {
        let counting = CountingStorage::new(image(options, 10_000 * cluster));
        let disk = open(counting.clone(), true);
        for run in [0..5000, 5000..10_000] {
            let syncs = syncs_of(&disk, &counting, cluster, run.clone());
            assert!(syncs <= 2, "'{options}', writes {run:?}: {syncs} syncs");
        }
    }
}

/// Small clusters need more refcount blocks than were made when the image was: one barrier each
/// time that the file grows (by twice as much as before) beyond those, and two for a larger
/// refcount table.
#[test]
fn thousands_of_small_clusters_cost_a_few_syncs() {
    for (options, cluster) in [
        ("cluster_size=512", 512),
        ("cluster_size=1K", 1024),
        ("cluster_size=4K", 4096),
        ("cluster_size=4K,refcount_bits=64", 4096),
    ] {
        let counting = CountingStorage::new(image(options, 20_000 * cluster));
        let disk = open(counting.clone(), true);
        for run in [0..5000, 5000..20_000] {
            let syncs = syncs_of(&disk, &counting, cluster, run.clone());
            assert!(syncs <= 6, "'{options}', writes {run:?}: {syncs} syncs");
        }
    }
}
