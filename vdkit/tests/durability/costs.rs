//! Costs that do not grow with the image: reads to open and describe it, syncs of a long run.

use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{Disk, GuestOffset, Limits, OpenRequest, Storage};
use vdkit_testkit::disks::reopen;
use vdkit_testkit::{CountingStorage, Counts, create_image};

/// An empty image in memory.
fn image(options: &str, guest_bytes: u64) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create_image(vdkit::format("qcow2").unwrap(), storage.clone(), guest_bytes, options);
    storage
}

/// Counts the cost of `what` on an image.
fn counted(image: &Arc<dyn Storage>, what: impl FnOnce(Arc<dyn Storage>)) -> Counts {
    let counting = CountingStorage::new(image.clone());
    what(counting.clone());
    counting.counts()
}

/// Fills a part of an image, so that it has tables and refcount blocks.
fn fill(image: &Arc<dyn Storage>, step: u64, count: u64) {
    let disk = reopen(image.clone(), true);
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
                    let request = OpenRequest { storage, files: Vec::new(), writable, limits };
                    drop(driver.open(request).unwrap());
                })
            };
            let (reading, writing) = (opened(false), opened(true));
            let what = format!("'{options}', {count} clusters of {size} bytes");
            // The header; then the L1 table; then the refcount table.
            assert_eq!((described.reads, reading.reads, writing.reads), (1, 2, 3), "{what}");
            assert_eq!((writing.writes, writing.syncs, writing.set_lens), (0, 0, 0), "{what}");
            // An L1 entry maps at least 32 KiB, and the refcount table is one cluster.
            let most = (64 << 10) + size / 4096 + (2 << 20);
            assert!(writing.bytes_read <= most, "{what}: {} bytes read", writing.bytes_read);
        }
    }
}

/// Syncs of writes to separate clusters, and one flush.
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

/// All cluster sizes with narrow, ordinary and wide refcounts: options, and cluster size in bytes.
fn geometries() -> Vec<(String, u64)> {
    let mut all = vec![
        ("compat=0.10".to_owned(), 65536),
        ("cluster_size=512,compat=0.10".to_owned(), 512),
        ("cluster_size=16K,extended_l2=on".to_owned(), 16384),
    ];
    for bits in 9..=21 {
        for refcount_bits in [1, 16, 64] {
            let cluster = 1u64 << bits;
            all.push((format!("cluster_size={cluster},refcount_bits={refcount_bits}"), cluster));
        }
    }
    all
}

#[test]
fn thousands_of_allocating_writes_and_one_flush_cost_two_syncs() {
    for (options, cluster) in geometries() {
        let counting = CountingStorage::new(image(&options, 30_000 * cluster));
        let mut disk = reopen(counting.clone(), true);
        for run in [0..6000, 6000..12_000, 12_000..18_000, 18_000..24_000] {
            let syncs = syncs_of(&disk, &counting, cluster, run.clone());
            assert!(syncs <= 2, "'{options}', writes {run:?}: {syncs} syncs");
            if run.start == 6000 {
                // Preallocated refcount blocks stay usable after reopening.
                disk.close().unwrap();
                disk = reopen(counting.clone(), true);
            }
        }
    }
}

/// A quarter of the file's size is preallocated, whatever the cluster size.
#[test]
fn a_large_file_may_grow_by_a_quarter_at_the_cost_of_two_syncs() {
    for options in ["cluster_size=512", "cluster_size=2K,refcount_bits=64", "cluster_size=4K"] {
        let storage = image(options, 512 << 20);
        let counting = CountingStorage::new(storage);
        let disk = reopen(counting.clone(), true);
        let piece = vec![1; 1 << 20];
        let mut at = 0;
        let mut write = |bytes: u64| {
            counting.reset();
            for _ in 0..bytes >> 20 {
                disk.write_at(&piece, GuestOffset(at)).unwrap();
                at += 1 << 20;
            }
            disk.flush().unwrap();
            counting.counts().syncs
        };
        // Sixteen times what a new file with 512-byte clusters has preallocated costs a barrier now
        // and then.
        let first = write(200 << 20);
        assert!(first <= 8, "'{options}': {first} syncs");
        let second = write(50 << 20);
        assert!(second <= 2, "'{options}', a quarter more: {second} syncs");
    }
}

/// An image with minimal refcount blocks, as made by other programs: one barrier for blocks, and
/// one more for a larger refcount table.
#[test]
fn growing_the_image_of_another_program_costs_two_syncs_more_once() {
    for (options, cluster) in geometries() {
        let storage = image(&options, 30_000 * cluster);
        super::compact(&storage);
        let counting = CountingStorage::new(storage);
        let disk = reopen(counting.clone(), true);
        let syncs = [0..6000, 6000..12_000, 12_000..18_000]
            .map(|run| syncs_of(&disk, &counting, cluster, run));
        assert!(syncs.iter().sum::<u64>() <= 3 * 2 + 2, "'{options}': {syncs:?} syncs");
    }
}

/// Preallocated refcounts take no space if one block suffices, little otherwise, and never more
/// than the fully allocated disk needs.
#[test]
fn a_new_image_is_small() {
    for (options, cluster) in geometries() {
        for guest in [1 << 20, 1 << 30, 64 << 30] {
            let l2_span = cluster * cluster / if options.contains("extended") { 16 } else { 8 };
            if guest / l2_span > (32 << 20) / 8 {
                continue;
            }
            let l1 = (guest.div_ceil(l2_span) * 8).div_ceil(cluster);
            let len = image(&options, guest).len().unwrap();
            let smallest = (3 + l1) * cluster;
            let room = if cluster < 65536 { 128 << 10 } else { 0 };
            // The refcounts of a large L1 table.
            let room = room + l1 * 9;
            assert!(len >= smallest && len <= smallest + room, "'{options}', {guest}: {len} bytes");
        }
    }
}
