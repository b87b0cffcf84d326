//! A full disk pauses writes, and nothing else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vdkit_block::Storage;
use vdkit_export::OnNoSpace;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultKind, FaultPlan, FaultyStorage};

use vdkit_testkit::disks::MIB;
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;

fn full(on_nospace: OnNoSpace) -> (Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    let rig = Rig::with(storage, 64 * MIB, |export| export.on_nospace = on_nospace, |_| {});
    (faulty, rig)
}

const GROWING: [FaultKind; 4] =
    [FaultKind::Write, FaultKind::Zero, FaultKind::Allocate, FaultKind::SetLen];

fn fill(faulty: &FaultyStorage) {
    faulty.arm(FaultPlan::nth(&GROWING, 0).no_space().lasting());
}

#[test]
fn writes_wait_and_go_on_when_there_is_space() {
    for resume in [false, true] {
        let (faulty, rig) = full(OnNoSpace::Pause);
        let mut client = rig.client(Style::Structured);
        client.write(0, &[1; 4096]).unwrap();
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
        fill(&faulty);
        // More than there are threads to a connection.
        let cookies: Vec<u64> = (0..40)
            .map(|i| client.request(WRITE, 0, (2 + i) * MIB, 4096, &[i as u8 + 1; 4096]))
            .collect();
        let began = Instant::now();
        while rig.export.parked().requests < 40 {
            assert!(began.elapsed() < Duration::from_secs(120), "{:?}", rig.export.parked());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Nobody was answered; reads go on, here and elsewhere.
        let read = client.request(READ, 0, 0, 100, b"");
        let answer = client.chunk(|_| 100);
        assert_eq!((answer.cookie, answer.kind), (read, 1));
        assert_eq!(rig.client(Style::Simple).read(0, 1).unwrap(), [1]);
        let parked = rig.export.parked();
        assert_eq!((parked.requests, parked.bytes), (40, 40 * 4096));
        assert!(parked.reason.contains("image"), "{}", parked.reason);
        faulty.heal();
        if resume {
            rig.export.resume();
        }
        let mut answered: Vec<u64> = (0..40).map(|_| client.chunk(|_| 0).cookie).collect();
        answered.sort_unstable();
        assert_eq!(answered, cookies);
        for i in 0..40u8 {
            assert_eq!(client.read((2 + u64::from(i)) * MIB, 1).unwrap(), [i + 1]);
        }
        assert_eq!(rig.export.parked().requests, 0);
        assert_eq!(rig.export.parked().total, 40);
        rig.end();
    }
}

#[test]
fn zeroes_wait_too() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut client = rig.client(Style::Extended);
    client.write(MIB, &vec![1; 65536]).unwrap();
    fill(&faulty);
    // Zeroes within a cluster are written, which fails here.
    let cookie = client.request(WRITE_ZEROES, NO_HOLE, MIB + 100, 1000, b"");
    let began = Instant::now();
    while rig.export.parked().requests < 1 {
        assert!(began.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(5));
    }
    faulty.heal();
    assert_eq!(client.chunk(|_| 0).cookie, cookie);
    assert_eq!(client.read(MIB + 99, 2).unwrap(), [1, 0]);
    rig.end();
}

#[test]
fn the_error_is_reported_when_that_is_wanted() {
    let (faulty, rig) = full(OnNoSpace::Report);
    for style in STYLES {
        let mut client = rig.client(style);
        fill(&faulty);
        assert_eq!(client.write(8 * MIB, &[1; 4096]), Err(28));
        faulty.heal();
        assert_eq!(client.write(8 * MIB, &[1; 4096]), Ok(()));
        client.run(TRIM, 0, 8 * MIB, MIB, b"").unwrap();
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
    }
    rig.end();
}

#[test]
fn what_a_client_left_behind_is_never_done() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut client = rig.client(Style::Structured);
    fill(&faulty);
    client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    let began = Instant::now();
    while rig.export.parked().requests < 1 {
        assert!(began.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(client);
    rig.settles_at(0);
    faulty.heal();
    rig.export.resume();
    while rig.export.parked().requests > 0 {
        assert!(began.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(5));
    }
    // It could lie over what the client wrote when it came again.
    assert_eq!(rig.client(Style::Simple).read(MIB, 1).unwrap(), [0]);
    rig.end();
}

#[test]
fn the_end_of_the_service_does_not_wait_for_space() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut client = rig.client(Style::Structured);
    fill(&faulty);
    let cookie = client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    let began = Instant::now();
    while rig.export.parked().requests < 1 {
        assert!(began.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(5));
    }
    let export = rig.export.clone();
    let closing = std::thread::spawn(move || export.close());
    assert_eq!(client.answer(cookie, 0).map(|_| ()), Err(108));
    // The image cannot be closed cleanly on a full disk, but it is closed.
    let _ = closing.join().unwrap();
    faulty.heal();
}
