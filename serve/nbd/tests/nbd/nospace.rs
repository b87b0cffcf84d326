//! A full disk blocks writes and nothing else.

use std::sync::Arc;
use std::time::Duration;

use vdkit_block::Storage;
use vdkit_serve::OnNoSpace;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultyStorage, eventually};

use vdkit_testkit::disks::MIB;
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;

fn full(on_nospace: OnNoSpace) -> (Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    let rig = Rig::with(storage, 64 * MIB, |export| export.on_nospace = on_nospace, |_| {});
    (faulty, rig)
}

#[test]
fn writes_wait_and_go_on_when_there_is_space() {
    for resume in [false, true] {
        let (faulty, rig) = full(OnNoSpace::Pause);
        let mut client = rig.client(Style::Structured);
        client.write(0, &[1; 4096]).unwrap();
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
        faulty.fill();
        // More than a connection's threads.
        let cookies: Vec<u64> = (0..40)
            .map(|i| client.request(WRITE, 0, (2 + i) * MIB, 4096, &[i as u8 + 1; 4096]))
            .collect();
        eventually("parked", || rig.export.parked().requests >= 40);
        // No write was answered; reads continue, here and elsewhere.
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
    faulty.fill();
    // Zeroes within a cluster are written, which fails here.
    let cookie = client.request(WRITE_ZEROES, NO_HOLE, MIB + 100, 1000, b"");
    eventually("parked", || rig.export.parked().requests >= 1);
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
        faulty.fill();
        assert_eq!(client.write(8 * MIB, &[1; 4096]), Err(28));
        faulty.heal();
        assert_eq!(client.write(8 * MIB, &[1; 4096]), Ok(()));
        client.run(TRIM, 0, 8 * MIB, MIB, b"").unwrap();
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
    }
    rig.end();
}

fn wait_for(rig: &Rig, requests: u64) {
    eventually("parked", || rig.export.parked().requests == requests);
}

/// A full disk, and a client that waits for space and does not read its replies.
fn stalled() -> (Arc<FaultyStorage>, Rig, Client) {
    let (faulty, rig) = full(OnNoSpace::Pause);
    rig.client(Style::Simple).write(0, &vec![7; 16 << 20]).unwrap();
    faulty.fill();
    let mut client = rig.client(Style::Structured);
    client.request(WRITE, 0, 40 * MIB, 4096, &[5; 4096]);
    wait_for(&rig, 1);
    for _ in 0..4 {
        client.request(READ, 0, 0, 16 * MIB, b"");
    }
    // The server has filled the socket.
    let mut byte = [0];
    let (got, _) =
        rustix::net::recv(&client.socket, &mut byte, rustix::net::RecvFlags::PEEK).unwrap();
    assert_eq!(got, 1);
    std::thread::sleep(Duration::from_millis(300));
    (faulty, rig, client)
}

#[test]
fn a_client_that_does_not_read_keeps_no_other_clients_write_waiting() {
    let (faulty, rig, stalled) = stalled();
    let mut client = rig.client(Style::Structured);
    let cookie = client.request(WRITE, 0, 50 * MIB, 4096, &[6; 4096]);
    wait_for(&rig, 2);
    faulty.heal();
    rig.export.resume();
    assert!(client.answer(cookie, 0).is_ok());
    drop(stalled);
    rig.end();
}

#[test]
fn the_end_of_the_service_does_not_wait_for_a_client_that_does_not_read() {
    let (faulty, rig, stalled) = stalled();
    let (export, (tell, told)) = (rig.export.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || {
        export.end_waiting();
        tell.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    faulty.heal();
    // Then the client is disconnected.
    rig.end_within(Duration::from_millis(100));
    drop(stalled);
}

/// Late replies are whole, and not interleaved within other replies.
#[test]
fn late_replies_come_among_others() {
    let (faulty, rig, mut client) = stalled();
    let more: Vec<u64> = (0..30)
        .map(|i| client.request(WRITE, 0, (20 + i) * MIB, 4096, &[i as u8 + 1; 4096]))
        .collect();
    // A server that waits for this client to read does not see all of them yet.
    faulty.heal();
    rig.export.resume();
    let (mut writes, mut read) = (Vec::new(), 0);
    while writes.len() < 31 || read < 4 * (16 << 20) {
        let chunk = client.chunk(|_| 0);
        match chunk.kind {
            0 => writes.push(chunk.cookie),
            1 => {
                assert!(chunk.payload[8..].iter().all(|byte| *byte == 7));
                read += chunk.payload.len() - 8;
            }
            kind => panic!("chunk {kind}"),
        }
    }
    writes.sort_unstable();
    assert_eq!(writes[1..], more);
    rig.end();
}

#[test]
fn what_a_client_left_behind_is_never_done() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut client = rig.client(Style::Structured);
    faulty.fill();
    client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    eventually("parked", || rig.export.parked().requests >= 1);
    drop(client);
    rig.settles_at(0);
    faulty.heal();
    rig.export.resume();
    eventually("given up", || rig.export.parked().requests == 0);
    // It could overwrite what the client wrote after reconnecting.
    assert_eq!(rig.client(Style::Simple).read(MIB, 1).unwrap(), [0]);
    rig.end();
}

#[test]
fn the_end_of_the_service_does_not_wait_for_space() {
    let (faulty, rig) = full(OnNoSpace::Pause);
    let mut client = rig.client(Style::Structured);
    faulty.fill();
    let cookie = client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    eventually("parked", || rig.export.parked().requests >= 1);
    let export = rig.export.clone();
    let closing = std::thread::spawn(move || export.close());
    assert_eq!(client.answer(cookie, 0).map(|_| ()), Err(108));
    // The image cannot be closed cleanly on a full disk, but it is closed.
    let _ = closing.join().unwrap();
    faulty.heal();
}
