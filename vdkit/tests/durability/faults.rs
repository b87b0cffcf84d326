//! EIO and ENOSPC at each storage operation in turn.

use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{Disk, GuestOffset, HostOffset, Monitor, Storage};
use vdkit_block::NewSnapshot;
use vdkit_testkit::trials::FaultScript;
use vdkit_testkit::{CountingStorage, FaultKind, FaultPlan, FaultyStorage, LoggedOp};

use super::{SHAPES, Shape, audit, read_all};

#[test]
fn each_operation_may_fail_and_work_later() {
    for shape in SHAPES {
        FaultScript {
            name: &format!("{shape:?}"),
            driver: vdkit::format("qcow2").unwrap(),
            image: &|| shape.image(),
            open: &|storage| shape.open(storage),
            content: &shape.first_content(),
        }
        .each_operation_may_fail_and_work_later();
    }
}

/// Fault D: closing frees reserved clusters. If refcounts of a part could not be read, clusters
/// with refcount 0 were also returned to the allocator, which reused them without counting.
#[test]
fn a_close_that_cannot_read_refcounts_gives_no_cluster_away_uncounted() {
    // Refcounts of 64 clusters per slice: more slices than the cache holds.
    let shape = Shape { options: "cluster_size=512,refcount_bits=64", backing: None };
    let guest: u64 = 96 << 20;
    let mut fired = 0;
    for nth in [0, 1, 2, 5, 11, 40, 200, 600] {
        let memory = Arc::new(MemoryStorage::new("image"));
        let storage: Arc<dyn Storage> = memory.clone();
        shape.create_of(&storage, guest);
        let faulty = FaultyStorage::new(memory.clone());
        let disk = shape.open(faulty.clone()).unwrap();
        let mut model = vec![0; guest as usize];
        let mut write = |disk: &Disk, at: u64, byte: u8, len: usize| {
            disk.write_at(&vec![byte; len], GuestOffset(at)).unwrap();
            model[at as usize..][..len].fill(byte);
        };
        for piece in 0..48 {
            write(&disk, piece << 20, 1, 1 << 20);
            disk.flush().unwrap();
        }
        // Holes in the reserved range, and cached refcounts from all over the file.
        for piece in 0..24 {
            disk.write_zeroes(GuestOffset(piece * (2 << 20)), 4096, true).unwrap();
        }
        disk.flush().unwrap();
        let mut model_zero = Vec::new();
        for piece in 0..24u64 {
            model_zero.push((piece * (2 << 20)) as usize);
        }
        faulty.arm(FaultPlan::nth(&[FaultKind::Read], nth));
        let closed = disk.close();
        fired += faulty.fired();
        assert_eq!(closed.is_err(), faulty.fired() > 0, "read {nth}");
        faulty.heal();
        for piece in 0..24u64 {
            write(&disk, (48 + piece) << 20, 2, 1 << 20);
        }
        disk.flush().unwrap();
        audit(&storage, false, &format!("read {nth} of the close failed"));
        disk.close().unwrap();
        for at in model_zero {
            model[at..at + 4096].fill(0);
        }
        let what = format!("read {nth} of the close failed, closed again");
        audit(&storage, true, &what);
        assert!(read_all(&shape.open(storage).unwrap()) == model, "{what}: content");
    }
    assert!(fired > 0, "closing reads refcounts");
}

/// A compressed cluster continues from another one into a reserved cluster. The first one's
/// refcount was evicted and cannot be read: the second cluster is freed.
#[test]
fn space_of_a_compressed_cluster_that_cannot_be_counted_is_not_lost() {
    let shape = Shape { options: "cluster_size=512,refcount_bits=64", backing: None };
    let guest: u64 = 48 << 20;
    let full: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    shape.create_of(&full, guest);
    let disk = shape.open(full.clone()).unwrap();
    disk.write_at(&vec![1; 40 << 20], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let mut bytes = vec![0; full.len().unwrap() as usize];
    full.read_at(&mut bytes, HostOffset(0)).unwrap();
    for nth in 0.. {
        let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("image", &bytes));
        let faulty = FaultyStorage::new(memory.clone());
        let disk = shape.open(faulty.clone()).unwrap();
        disk.write_compressed(GuestOffset(44 << 20), &[[7; 300]]).unwrap();
        disk.flush().unwrap();
        // Refcounts from all over the file.
        disk.write_zeroes(GuestOffset(0), 40 << 20, true).unwrap();
        disk.flush().unwrap();
        disk.flush().unwrap();
        faulty.arm(FaultPlan::nth(&[FaultKind::Read], nth));
        let written = disk.write_compressed(GuestOffset((44 << 20) + 512), &[[8; 300]]);
        let fired = faulty.fired() > 0;
        faulty.heal();
        disk.close().unwrap();
        audit(&memory, true, &format!("read {nth} of a compressed write failed: {written:?}"));
        if !fired {
            assert!(nth > 0, "nothing was read");
            return;
        }
    }
}

/// A snapshot's header could be neither written nor reverted. It may refer to tables in space that
/// is free in memory, so any later change must revert the header first.
#[test]
fn a_resize_writes_nothing_before_a_header_in_doubt_is_taken_back() {
    let shape = Shape { options: "cluster_size=4K", backing: None };
    let monitor = Monitor::default();
    let new = |name: &str| NewSnapshot { name: name.to_owned(), ..NewSnapshot::default() };
    let mut doubts = 0;
    for nth in 0.. {
        let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        shape.create_of(&memory, (1 << 20) + 512);
        let faulty = FaultyStorage::new(memory.clone());
        let counting = CountingStorage::new(faulty.clone());
        let disk = shape.open(counting.clone()).unwrap();
        disk.write_at(&[1; 512], GuestOffset(1 << 20)).unwrap();
        let snapshots = disk.top().snapshots().unwrap();
        snapshots.create(&new("first"), &monitor).unwrap();
        counting.log_calls(true);
        faulty.arm(FaultPlan::nth(&[FaultKind::Write], nth).lasting());
        let created = snapshots.create(&new("second"), &monitor);
        faulty.heal();
        let is_header = |op: &LoggedOp| matches!(op, LoggedOp::Write(at, _) if *at < 512);
        let in_doubt = created.is_err() && counting.take_log().iter().any(is_header);
        disk.resize(2 << 20).unwrap();
        if in_doubt {
            doubts += 1;
            let log = counting.take_log();
            let first =
                log.iter().find(|op| matches!(op, LoggedOp::Write(..) | LoggedOp::Zero(..)));
            assert!(first.is_some_and(is_header), "write {nth}: {first:?} was first");
        }
        disk.close().unwrap();
        audit(&memory, true, &format!("write {nth} of a snapshot failed"));
        if created.is_ok() {
            assert!(doubts > 0, "no header was in doubt");
            return;
        }
    }
}
