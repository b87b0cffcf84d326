//! A full disk makes the guest's disk slow, and breaks nothing.

use std::sync::Arc;
use std::time::Duration;

use vdkit_serve::OnNoSpace;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultyStorage, eventually};

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::MIB;

fn full(on_nospace: OnNoSpace) -> (Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let rig = Rig::with(faulty.clone(), 64 * MIB, |export| export.on_nospace = on_nospace);
    (faulty, rig)
}

fn wait_for(rig: &Rig, requests: u64) {
    eventually("parked", || rig.export.parked().requests == requests);
}

#[test]
fn writes_wait_and_go_on_when_there_is_space() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut guest = rig.boot(2);
    guest.write(0, 0, &[1; 4096]);
    guest.flush(0);
    faulty.fill();
    // More than the threads, and one of several pieces.
    let slots: Vec<u16> = (0..40)
        .map(|i| guest.submit(0, WRITE, (2 + i) * 2048, Data::Out(&[i as u8 + 1; 4096])))
        .collect();
    let zeroes = [range(100, 3, 0), range(200, 3, 0)].concat();
    let zeroes = guest.submit(1, WRITE_ZEROES, 0, Data::Out(&zeroes));
    wait_for(&rig, 41);
    assert_eq!(guest.collect(0), 0, "a write that found no space was answered");
    // Reads continue, here and elsewhere.
    assert_eq!(guest.read(0, 0, 512), [1; 512]);
    assert_eq!(guest.read(1, 1, 512), [1; 512]);
    faulty.heal();
    rig.export.resume();
    for (i, slot) in slots.into_iter().enumerate() {
        assert_eq!(guest.finish(0, slot).0, 0);
        assert_eq!(guest.read(0, (2 + i as u64) * 2048, 512), [i as u8 + 1; 512]);
    }
    assert_eq!(guest.finish(1, zeroes).0, 0);
    rig.end();
}

/// A flush that finds no space for metadata.
fn waiting_flush() -> (Arc<FaultyStorage>, Rig, Guest, u16) {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut guest = rig.boot(1);
    guest.write(0, 2048, &[1; 4096]);
    faulty.fill();
    let slot = guest.submit(0, FLUSH, 0, Data::None);
    wait_for(&rig, 1);
    assert_eq!(guest.collect(0), 0, "a flush that found no space was answered");
    assert_eq!(guest.read(0, 2048, 512), [1; 512]);
    (faulty, rig, guest, slot)
}

#[test]
fn a_flush_waits_for_space() {
    let (faulty, rig, mut guest, slot) = waiting_flush();
    faulty.heal();
    rig.export.resume();
    assert_eq!(guest.finish(0, slot).0, 0);
    assert_eq!(rig.export.parked().requests, 0);
    rig.end();
}

/// A withdrawn flush is repeated when the queue resumes.
#[test]
fn stopping_does_not_wait_for_a_flush() {
    let (faulty, rig, mut guest, slot) = waiting_flush();
    guest.stop_queue(0);
    faulty.heal();
    guest.start_queue(0, 0);
    assert_eq!(guest.finish(0, slot).0, 0);
    rig.end();
}

#[test]
fn a_report_is_an_error() {
    let (faulty, rig) = full(OnNoSpace::Report);
    let mut guest = rig.boot(1);
    faulty.fill();
    assert_eq!(guest.run(0, WRITE, 2048, Data::Out(&[1; 4096])).0, 1);
    faulty.heal();
    guest.write(0, 2048, &[1; 4096]);
    rig.end();
}

/// The monitor stops the queue while a write waits, which must not block. The write stays in flight
/// and runs when the queue resumes. The older attempt never runs, or it would overwrite newer data.
#[test]
fn stopping_does_not_wait_for_space() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut guest = rig.boot(2);
    faulty.fill();
    let slot = guest.submit(0, WRITE, 2048, Data::Out(&[1; 4096]));
    wait_for(&rig, 1);
    // (A guest without an answer times out after a while.)
    let base = guest.stop_queue(0);
    assert_eq!((base, guest.collect(0)), (1, 0));
    faulty.heal();
    guest.start_queue(0, 0);
    assert_eq!(guest.finish(0, slot).0, 0);
    guest.write(0, 2048, &[2; 4096]);
    // Time for the first attempt to run, if it still existed.
    rig.export.resume();
    wait_for(&rig, 0);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(guest.read(0, 2048, 512), [2; 512]);
    rig.end();
}

/// Without in-flight records, a waiting write must fail.
#[test]
fn a_monitor_without_notes_is_told() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut guest = Guest::new(1).without_notes();
    guest.connect(&rig.socket);
    guest.start();
    faulty.fill();
    let slot = guest.submit(0, WRITE, 2048, Data::Out(&[1; 4096]));
    wait_for(&rig, 1);
    assert_eq!(guest.stop_queue(0), 1);
    assert_eq!(guest.finish(0, slot).0, 1);
    faulty.heal();
    guest.start_queue(0, 1);
    guest.write(0, 2048, &[3; 4096]);
    assert_eq!(guest.read(0, 2048, 512), [3; 512]);
    rig.end();
}

#[test]
fn a_monitor_that_leaves_takes_its_writes_along() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut guest = rig.boot(1);
    faulty.fill();
    for i in 0..30 {
        guest.submit(0, WRITE, (2 + i) * 2048, Data::Out(&[1; 4096]));
    }
    wait_for(&rig, 30);
    guest.disconnect();
    let mut guest = rig.boot(1);
    faulty.heal();
    rig.export.resume();
    wait_for(&rig, 0);
    for i in 0..30 {
        assert_eq!(guest.read(0, (2 + i) * 2048, 512), [0; 512]);
    }
    rig.end();
}
