//! Cost of opening, describing, mapping and flushing.

use std::sync::Arc;

use vdkit_block::{FormatDriver, GuestOffset, Limits, OpenRequest, Storage};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, create_image};
use vdkit_vmdk::VmdkDriver;

const GIB: u64 = 1 << 30;

fn create(storage: &Arc<dyn Storage>, bytes: u64) {
    create_image(&VmdkDriver, storage.clone(), bytes, "");
}

fn open(storage: Arc<dyn Storage>, writable: bool) -> Disk {
    super::open(&VmdkDriver, storage, &[], writable, Limits::default()).unwrap()
}

#[test]
fn allocating_writes_and_a_flush_cost_two_syncs_at_most() {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = counting.clone();
    create(&storage, 4 * GIB);
    let disk = open(storage, true);
    for round in 0..4u64 {
        counting.reset();
        for i in 0..50 {
            let at = (i * 977 + round * 13) % 60000 * 65536;
            disk.write_at(&[1; 4096], GuestOffset(at)).unwrap();
        }
        disk.flush().unwrap();
        let counts = counting.counts();
        assert!(counts.syncs <= 2, "round {round}: {counts:?}");
        // 50 pieces of data; tables and their copies, each sector at most once.
        assert!(counts.writes <= 50 + 2 * 50 + 4, "round {round}: {counts:?}");
    }
    // In place, only data is written.
    counting.reset();
    disk.write_at(&[2; 4096], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    let counts = counting.counts();
    assert!(counts.syncs <= 2 && counts.writes <= 2, "{counts:?}");
    counting.reset();
    disk.write_at(&[3; 4096], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    let counts = counting.counts();
    assert!(counts.syncs == 1 && counts.writes == 1, "{counts:?}");
    disk.close().unwrap();
}

#[test]
fn describing_and_opening_read_little_and_a_full_map_is_few_runs() {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = counting.clone();
    create(&storage, 2 * GIB);
    let disk = open(storage.clone(), true);
    // Every grain in order, as in a job.
    for at in (0..2 * GIB).step_by(2 << 20) {
        let mut at = at;
        let end = at + (2 << 20);
        while at < end {
            let space = disk.top().reserve(GuestOffset(at), end - at).unwrap().unwrap();
            at = space.guest.end;
            space.publish().unwrap();
        }
    }
    disk.close().unwrap();
    drop(disk);
    counting.reset();
    let driver = VmdkDriver;
    driver.describe(&storage, &Limits::default()).unwrap();
    let counts = counting.counts();
    assert!(counts.reads <= 4 && counts.bytes_read <= 64 << 10, "{counts:?}");
    counting.reset();
    let request = OpenRequest {
        storage: storage.clone(),
        files: Vec::new(),
        writable: false,
        limits: Limits::default(),
    };
    let format = driver.open(request).unwrap();
    let counts = counting.counts();
    assert!(counts.reads <= 6 && counts.bytes_read <= 64 << 10, "{counts:?}");
    counting.reset();
    let info = driver.describe(&storage, &Limits::default()).unwrap();
    let disk = Disk::from_format(format, info, &OpenOptions::default());
    let runs: Vec<_> = disk
        .extents(GuestOffset(0), 2 * GIB)
        .unwrap()
        .map(|run| run.map(|run| run.len))
        .collect::<vdkit_block::Result<_>>()
        .unwrap();
    assert_eq!(runs, [2 * GIB]);
    // 64 tables of 2 KiB, 32 KiB at a time; and the reads of describing.
    let counts = counting.counts();
    assert!(counts.reads <= 4 + 4, "{counts:?}");
}

/// A disk of 64 TiB: its directory is read; a range without a table costs one step.
#[test]
fn the_largest_disk_opens_in_little_memory() {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = counting.clone();
    create(&storage, 64 << 40);
    let disk = open(storage.clone(), true);
    disk.write_at(&[1; 512], GuestOffset((64 << 40) - 512)).unwrap();
    disk.write_at(&[2; 512], GuestOffset(32 << 40)).unwrap();
    disk.close().unwrap();
    drop(disk);
    counting.reset();
    let disk = open(storage, false);
    let counts = counting.counts();
    assert!(counts.bytes_read <= 17 << 20, "{counts:?}");
    let mut byte = [0];
    disk.read_at(&mut byte, GuestOffset((64 << 40) - 1)).unwrap();
    assert_eq!(byte, [1]);
}
