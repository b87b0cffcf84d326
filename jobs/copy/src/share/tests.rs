//! Number of share requests, and fallback if sharing fails.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Monitor, Storage};
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{NoShare, SharingStorage, assert_sound, create_image, disk_on, noise};

use crate::mover::{MoveOptions, MovedBytes, Mover};
use crate::plan::{PlanOptions, Planner};
use crate::source::Source;

const CLUSTER: u64 = 64 << 10;
/// Number of pieces, and their distance.
const PIECES: u64 = 64;
const STEP: u64 = 4 * CLUSTER;
const GUEST_BYTES: u64 = PIECES * STEP;

fn qcow2(storage: Arc<dyn Storage>) -> Disk {
    create_image(&Qcow2Driver, storage.clone(), GUEST_BYTES, "");
    disk_on(&Qcow2Driver, storage)
}

/// A full disk, except for a cluster before each piece.
fn source() -> Source {
    let disk = qcow2(Arc::new(MemoryStorage::new("source")));
    for piece in 0..PIECES {
        let bytes = noise(piece + 1, (STEP - CLUSTER) as usize);
        disk.write_at(&bytes, GuestOffset(piece * STEP + CLUSTER)).unwrap();
    }
    disk.flush().unwrap();
    Source::new(vec![disk])
}

fn move_all(source: &Source, target: &Disk, grid: u64) -> vdkit_block::Result<MovedBytes> {
    let plan = PlanOptions {
        grid,
        chunk: 1 << 20,
        share: Some(4096),
        share_max: 256 << 20,
        zero_max: u64::MAX,
        layers: usize::MAX,
        ..PlanOptions::default()
    };
    let moving = MoveOptions {
        threads: Some(2),
        detect_zeroes: Some(4096),
        new: true,
        ..MoveOptions::default()
    };
    let monitor = Monitor::default();
    let mover = Mover::new(source, Some(target), Planner::new(source, plan), moving, &monitor);
    mover.run()?;
    Ok(mover.moved.report())
}

fn same(source: &Source, target: &Disk) {
    let (mut want, mut found) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    for at in (0..GUEST_BYTES).step_by(STEP as usize) {
        source.read_at(&mut want, at).unwrap();
        target.read_at(&mut found, GuestOffset(at)).unwrap();
        assert!(want == found, "the piece at {at:#x}");
    }
}

/// No corruption, no leak.
fn sound(storage: &Arc<dyn Storage>) {
    assert_sound(&Qcow2Driver, storage, false, "the target");
}

#[test]
fn pieces_side_by_side_in_both_files_are_shared_at_once() {
    let source = source();
    let sharing = SharingStorage::new(Arc::new(MemoryStorage::new("target")));
    let target = qcow2(sharing.clone());
    let moved = move_all(&source, &target, CLUSTER).unwrap();
    let requests = sharing.requests();
    // The first piece finds out whether it works; then requests are as long as both files are
    // contiguous.
    assert!(requests.len() <= 3, "{requests:x?}");
    let bytes = PIECES * (STEP - CLUSTER);
    assert_eq!(requests.iter().map(|(_, len)| len).sum::<u64>(), bytes);
    assert_eq!((moved.reflinked, moved.read, moved.zero_known), (bytes, 0, PIECES * CLUSTER));
    same(&source, &target);
    target.close().unwrap();
    sound(&(sharing as Arc<dyn Storage>));
}

#[test]
fn pieces_that_lie_apart_in_the_target_are_shared_one_by_one() {
    let source = source();
    let sharing = SharingStorage::new(Arc::new(MemoryStorage::with_len("target", GUEST_BYTES)));
    let target = disk_on(&RawDriver, sharing.clone());
    move_all(&source, &target, 4096).unwrap();
    assert_eq!(sharing.requests().len() as u64, PIECES);
    same(&source, &target);
}

#[test]
fn what_is_refused_is_copied() {
    for number in 0..3 {
        let source = source();
        let sharing = SharingStorage::new(Arc::new(MemoryStorage::new("target")));
        let target = qcow2(sharing.clone());
        sharing.limit(number, NoShare::Refuse);
        let moved = move_all(&source, &target, CLUSTER).unwrap();
        let bytes = PIECES * (STEP - CLUSTER);
        assert_eq!(moved.reflinked + moved.read, bytes, "from request {number} on");
        assert_eq!(moved.zero_known, PIECES * CLUSTER);
        same(&source, &target);
        target.close().unwrap();
        sound(&(sharing as Arc<dyn Storage>));
    }
}

#[test]
fn a_request_that_fails_leaves_nothing_reserved() {
    for number in 0..2 {
        let source = source();
        let sharing = SharingStorage::new(Arc::new(MemoryStorage::new("target")));
        let target = qcow2(sharing.clone());
        sharing.limit(number, NoShare::Fail);
        move_all(&source, &target, CLUSTER).unwrap_err();
        // Only shared data is present; the rest reads as zero.
        let first = if number == 0 { 0 } else { STEP };
        let mut found = vec![0; (GUEST_BYTES - first) as usize];
        target.read_at(&mut found, GuestOffset(first)).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
        target.write_at(&[1; 512], GuestOffset(GUEST_BYTES - STEP)).unwrap();
        target.close().unwrap();
        sound(&(sharing as Arc<dyn Storage>));
    }
}
