//! Snapshots while other threads write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vdkit_block::{Format, GuestOffset, Limits, Monitor, NewSnapshot, OpenRequest, Storage};
use vdkit_qcow2::Qcow2;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{assert_sound, create_image};

use super::support::rig;
use super::world::snapshots;

const GUEST_BYTES: u64 = 4 << 20;
const WRITERS: u64 = 3;

/// Stops the writers when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn number_at(disk: &vdkit_chain::Disk, at: u64) -> u64 {
    let mut bytes = [0; 8];
    disk.read_at(&mut bytes, GuestOffset(at)).unwrap();
    u64::from_le_bytes(bytes)
}

/// The two offsets of a writer's numbers.
fn places(writer: u64) -> (u64, u64) {
    (writer * 8 + 64, GUEST_BYTES / 2 + writer * 8 + 64)
}

/// The numbers of all writers.
fn numbers(disk: &vdkit_chain::Disk) -> Vec<(u64, u64)> {
    (0..WRITERS).map(places).map(|(a, b)| (number_at(disk, a), number_at(disk, b))).collect()
}

/// Increments the numbers of a writer until it is stopped; `count` is what both have reached.
fn increment_numbers(disk: &vdkit_chain::Disk, writer: u64, stop: &AtomicBool, count: &AtomicU64) {
    let (first, second) = places(writer);
    let mut n = 0u64;
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        // Writers share both clusters: copying one must not lose another writer's bytes.
        disk.write_at(&n.to_le_bytes(), GuestOffset(first)).unwrap();
        assert_eq!(number_at(disk, first), n);
        disk.write_at(&n.to_le_bytes(), GuestOffset(second)).unwrap();
        assert_eq!(number_at(disk, second), n);
        if n.is_multiple_of(50) {
            disk.flush().unwrap();
        }
        count.store(n, Ordering::Release);
    }
}

/// Frees space and allocates it again until it is stopped.
fn free_and_allocate(disk: &vdkit_chain::Disk, stop: &AtomicBool) {
    let (at, len) = (GuestOffset(1 << 20), 64 << 10);
    while !stop.load(Ordering::Relaxed) {
        disk.write_at(&[7; 64 << 10], at).unwrap();
        disk.write_zeroes(at, len, true).unwrap();
        disk.write_at(&[8; 8 << 10], at).unwrap();
        disk.discard(at, len).unwrap();
        assert_eq!(number_at(disk, at.0), 0);
    }
}

/// Takes a snapshot while the writers run, and asserts that it shows one moment and stays so.
fn snapshot_beside_writers(disk: &vdkit_chain::Disk, round: u64, counts: &[AtomicU64]) {
    let name = format!("round {round}");
    let new = NewSnapshot { name: name.clone(), ..NewSnapshot::default() };
    let least: Vec<u64> = counts.iter().map(|c| c.load(Ordering::Acquire)).collect();
    snapshots(disk).create(&new, &Monitor::default()).unwrap();
    let view = rig::disk(snapshots(disk).view(&name).unwrap(), false);
    let seen = numbers(&view);
    for (writer, &(a, b)) in seen.iter().enumerate() {
        assert!(a == b || a == b + 1, "{name}: writer {writer} had {a} and {b}");
        assert!(b >= least[writer], "{name}: writer {writer} had {b}, was at {}", least[writer]);
    }
    std::thread::yield_now();
    assert_eq!(numbers(&view), seen, "{name} changed after it was taken");
    if round.is_multiple_of(2) {
        snapshots(disk).delete(&name, &Monitor::default()).unwrap();
    }
}

/// Each writer increments numbers at two offsets, one after the other, sometimes in place and
/// sometimes allocating. All snapshots must show the numbers in that order, and no write is lost.
#[test]
fn a_snapshot_beside_writers_is_one_moment() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let driver = vdkit::format("qcow2").unwrap();
    create_image(driver, storage.clone(), GUEST_BYTES, "cluster_size=4K");
    let limits = Limits::default();
    let format: Arc<dyn Format> = Qcow2::open(OpenRequest {
        storage: storage.clone(),
        files: Vec::new(),
        writable: true,
        limits,
    })
    .unwrap();
    let disk = rig::disk(format.clone(), true);
    let stop = AtomicBool::new(false);
    let counts: Vec<AtomicU64> = (0..WRITERS).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let (disk, stop) = (&disk, &stop);
        for (writer, count) in (0..WRITERS).zip(&counts) {
            scope.spawn(move || increment_numbers(disk, writer, stop, count));
        }
        scope.spawn(move || free_and_allocate(disk, stop));
        // Even if an assertion fails: the writers would run for ever.
        let _end = Ends(stop);
        for round in 0..60u64 {
            snapshot_beside_writers(disk, round, &counts);
        }
    });
    for (number, count) in numbers(&disk).into_iter().zip(&counts) {
        let n = count.load(Ordering::Acquire);
        assert_eq!(number, (n, n));
    }
    disk.close().unwrap();
    assert_sound(driver, &storage, false, "the end");
}
