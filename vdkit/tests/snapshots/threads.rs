//! Snapshots while other threads write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vdkit_block::{Format, GuestOffset, Limits, Monitor, NewSnapshot, OpenRequest, Storage};
use vdkit_qcow2::Qcow2;
use vdkit_storage::MemoryStorage;

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

/// Each writer increments numbers at two offsets, one after the other, sometimes in place and
/// sometimes allocating. All snapshots must show the numbers in that order, and no write is lost.
#[test]
fn a_snapshot_beside_writers_is_one_moment() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let driver = vdkit::format("qcow2").unwrap();
    let options = vdkit::Options::parse("qcow2", driver.options(), ["cluster_size=4K"]).unwrap();
    driver
        .create(&vdkit::CreateRequest {
            storage: storage.clone(),
            files: Vec::new(),
            guest_bytes: GUEST_BYTES,
            options,
            backing: None,
            backing_bytes: None,
        })
        .unwrap();
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
    let places = |writer: u64| (writer * 8 + 64, GUEST_BYTES / 2 + writer * 8 + 64);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (disk, stop, count) = (&disk, &stop, &counts[writer as usize]);
            scope.spawn(move || {
                let (first, second) = places(writer);
                let mut n = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    // Writers share both clusters: copying one must not lose another writer's
                    // bytes.
                    disk.write_at(&n.to_le_bytes(), GuestOffset(first)).unwrap();
                    assert_eq!(number_at(disk, first), n);
                    disk.write_at(&n.to_le_bytes(), GuestOffset(second)).unwrap();
                    assert_eq!(number_at(disk, second), n);
                    if n.is_multiple_of(50) {
                        disk.flush().unwrap();
                    }
                    count.store(n, Ordering::Release);
                }
            });
        }
        // And one that frees space and allocates it again.
        let (disk_of, stop_of) = (&disk, &stop);
        scope.spawn(move || {
            let (at, len) = (GuestOffset(1 << 20), 64 << 10);
            while !stop_of.load(Ordering::Relaxed) {
                disk_of.write_at(&[7; 64 << 10], at).unwrap();
                disk_of.write_zeroes(at, len, true).unwrap();
                disk_of.write_at(&[8; 8 << 10], at).unwrap();
                disk_of.discard(at, len).unwrap();
                assert_eq!(number_at(disk_of, at.0), 0);
            }
        });
        // Even if an assertion fails: the writers would run for ever.
        let _end = Ends(&stop);
        for round in 0..60u64 {
            let name = format!("round {round}");
            let new = NewSnapshot { name: name.clone(), ..NewSnapshot::default() };
            let least: Vec<u64> = counts.iter().map(|c| c.load(Ordering::Acquire)).collect();
            snapshots(&disk).create(&new, &Monitor::default()).unwrap();
            let view = rig::disk(snapshots(&disk).view(&name).unwrap(), false);
            let look = || -> Vec<(u64, u64)> {
                (0..WRITERS)
                    .map(places)
                    .map(|(a, b)| (number_at(&view, a), number_at(&view, b)))
                    .collect()
            };
            let seen = look();
            for (writer, &(a, b)) in seen.iter().enumerate() {
                assert!(a == b || a == b + 1, "{name}: writer {writer} had {a} and {b}");
                assert!(
                    b >= least[writer],
                    "{name}: writer {writer} had {b}, was at {}",
                    least[writer]
                );
            }
            std::thread::yield_now();
            assert_eq!(look(), seen, "{name} changed after it was taken");
            if round.is_multiple_of(2) {
                snapshots(&disk).delete(&name, &Monitor::default()).unwrap();
            }
        }
    });
    for writer in 0..WRITERS {
        let (first, second) = places(writer);
        let n = counts[writer as usize].load(Ordering::Acquire);
        assert_eq!((number_at(&disk, first), number_at(&disk, second)), (n, n));
    }
    disk.close().unwrap();
    let report =
        driver.check(&storage, &[], vdkit::Repair::Nothing, &limits, &Monitor::default()).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{:#?}", report.findings);
}
