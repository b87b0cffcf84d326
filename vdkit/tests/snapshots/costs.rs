//! Cost of snapshot operations: metadata only, whatever the amount of data.

use std::sync::Arc;

use vdkit_block::{
    Format, GuestOffset, HostOffset, Limits, Monitor, NewSnapshot, OpenRequest, Place, Snapshots,
    Storage,
};
use vdkit_qcow2::Qcow2;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CountingStorage, LoggedOp, assert_sound, create_image};

const CLUSTER: u64 = 64 << 10;
const GUEST_BYTES: u64 = 8 << 30;

/// A fully allocated image in memory.
fn full(options: &str) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create_image(vdkit::format("qcow2").unwrap(), storage.clone(), GUEST_BYTES, options);
    storage
}

fn open(storage: Arc<dyn Storage>) -> Arc<Qcow2> {
    let limits = Limits::default();
    Qcow2::open(OpenRequest { storage, files: Vec::new(), writable: true, limits }).unwrap()
}

fn new(name: &str) -> NewSnapshot {
    NewSnapshot { name: name.into(), ..NewSnapshot::default() }
}

#[test]
fn creating_reads_and_writes_no_data() {
    let counted = CountingStorage::new(full("preallocation=metadata"));
    let image = open(counted.clone() as Arc<dyn Storage>);
    // Metadata of 8 GiB in 64 KiB clusters: 16 L2 tables, and 4 refcount blocks.
    let clusters = GUEST_BYTES / CLUSTER;
    let (l2, refcounts) = (clusters * 8, clusters * 2);
    let monitor = Monitor::default();
    for (name, tables) in [("first", l2), ("second", 0)] {
        counted.reset();
        counted.log_calls(true);
        Snapshots::create(&*image, &new(name), &monitor).unwrap();
        counted.log_calls(false);
        let counts = counted.counts();
        // The tables twice if flags change, the refcounts twice, and a few single clusters.
        let few = 16 * CLUSTER;
        assert!(counts.bytes_read <= l2 + tables + 2 * refcounts + few, "{name}: {counts:?}");
        assert!(counts.bytes_written <= tables + refcounts + few, "{name}: {counts:?}");
        assert!(counts.reads < 100 && counts.writes < 30, "{name}: {counts:?}");
        for op in counted.take_log() {
            let (at, len) = match op {
                LoggedOp::Read(at, len) | LoggedOp::Write(at, len) => (at, len),
                _ => continue,
            };
            assert!(!holds_data(&image, at, len), "{name}: {len} bytes of data at {at:#x}");
        }
    }
    for (deed, what) in [("apply", "first"), ("delete", "second"), ("delete", "first")] {
        counted.reset();
        if deed == "apply" {
            Snapshots::apply(&*image, what, &monitor).unwrap();
        } else {
            Snapshots::delete(&*image, what, &monitor).unwrap();
        }
        let counts = counted.counts();
        let most = 4 * l2 + 4 * refcounts + 32 * CLUSTER;
        assert!(counts.bytes_read + counts.bytes_written <= most, "{deed} {what}: {counts:?}");
    }
    image.close().unwrap();
}

/// Whether a range of the file overlaps the guest's data.
fn holds_data(image: &Qcow2, at: u64, len: u64) -> bool {
    // Preallocated data is contiguous, or nearly so.
    let mut guest = 0;
    while guest < GUEST_BYTES {
        let extent = image.resolve(GuestOffset(guest), GUEST_BYTES - guest).unwrap();
        if let Place::Data { offset: HostOffset(start), .. } = extent.place
            && at < start + extent.len
            && start < at + len
        {
            return true;
        }
        guest += extent.len;
    }
    false
}

#[test]
fn as_many_snapshots_as_there_may_be() {
    // With 512-byte clusters the snapshot table and the refcount table take many clusters.
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let driver = vdkit::format("qcow2").unwrap();
    create_image(driver, storage.clone(), 1 << 20, "cluster_size=512");
    let image = open(storage.clone());
    let monitor = Monitor::default();
    for i in 0..1025 {
        let info = Snapshots::create(&*image, &new(&format!("number {i}")), &monitor).unwrap();
        assert_eq!(info.id, (i + 1).to_string());
    }
    assert_eq!(Snapshots::list(&*image).unwrap().len(), 1025);
    image.close().unwrap();
    drop(image);
    let check = || assert_sound(driver, &storage, false, "1025 snapshots");
    check();
    let image = open(storage.clone());
    for i in (0..1025).rev().step_by(2) {
        Snapshots::delete(&*image, &format!("number {i}"), &monitor).unwrap();
    }
    image.close().unwrap();
    drop(image);
    check();
}
