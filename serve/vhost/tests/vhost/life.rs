//! Monitors that connect and disconnect, and a disk that grows meanwhile.

use std::sync::Arc;
use std::time::Duration;

use vdkit_serve::{Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_vhost::{Listener, Server, ServerOptions};

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::{MIB, qcow2};
use vdkit_testkit::{Watched, eventually, in_child};

#[test]
fn a_monitor_may_come_again() {
    let rig = Rig::new(MIB);
    for i in 0..20_u8 {
        let mut guest = rig.boot(2);
        if i > 0 {
            assert_eq!(guest.read(1, 0, 512), [i; 512]);
        }
        guest.write(0, 0, &[i + 1; 512]);
        if i % 2 == 0 {
            assert_eq!(guest.stop_queue(0), 1);
        }
    }
    rig.end();
}

#[test]
fn a_second_monitor_waits_for_the_first() {
    let rig = Rig::new(MIB);
    let mut first = rig.boot(1);
    let socket = rig.socket.clone();
    let watched = Arc::new(Watched::default());
    let thread = watched.clone();
    let second = std::thread::spawn(move || {
        thread.is_me();
        let mut guest = Guest::boot(&socket, 1);
        guest.read(0, 0, 512)
    });
    watched.until_it_waits();
    assert!(!second.is_finished());
    first.write(0, 0, &[5; 512]);
    first.disconnect();
    assert_eq!(second.join().unwrap(), [5; 512]);
    rig.end();
}

#[test]
fn queues_stop_and_go_on_where_they_were() {
    let rig = Rig::new(64 * MIB);
    let mut guest = rig.boot(2);
    for round in 0..10 {
        for i in 0..40 {
            guest.submit(0, WRITE, i * 128, Data::Out(&[round as u8 + 1; 65536]));
        }
        // Taken requests are put back before the queue stops; the rest stays.
        let base = guest.stop_queue(0);
        let back = guest.collect(0) as u16;
        assert_eq!(base, round * 40 + back);
        guest.write(1, 100_000, &[1; 512]);
        guest.start_queue(0, base);
        while guest.returned(0).len() < 40 {
            guest.wait_call(0, Duration::from_secs(10));
            guest.collect(0);
        }
        for slot in guest.returned(0) {
            assert_eq!(guest.release(0, slot).0, 0);
        }
        assert_eq!(guest.read(1, 39 * 128, 512), [round as u8 + 1; 512]);
    }
    rig.end();
}

#[test]
fn a_queue_that_is_switched_off_does_nothing() {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(2);
    let enable = |guest: &Guest, on: u32| {
        let body: Vec<u8> = [0, on].iter().flat_map(|word: &u32| word.to_ne_bytes()).collect();
        assert!(guest.try_set(18, &body, &[]));
    };
    enable(&guest, 0);
    let slot = guest.submit(0, READ, 0, Data::In(512));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!guest.is_back(0, slot));
    enable(&guest, 1);
    assert_eq!(guest.finish(0, slot).0, 0);
    rig.end();
}

#[test]
fn the_guest_learns_of_a_new_size() {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(1);
    assert_eq!(guest.run(0, READ, 2048, Data::In(512)).0, 1);
    rig.export.grow(2 * MIB).unwrap();
    guest.config_change();
    assert_eq!(guest.config_u64(0), 4096);
    assert_eq!(guest.read(0, 2048, 512), [0; 512]);
    rig.end();
}

/// A monitor's queries about the disk are answered while its requests are blocked.
#[test]
fn a_disk_that_is_paused_can_be_connected_to() {
    let rig = Rig::new(MIB);
    rig.export.pause();
    let mut guest = rig.boot(1);
    assert_eq!(guest.config_u64(0), 2048);
    let slot = guest.submit(0, READ, 0, Data::In(512));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!guest.is_back(0, slot));
    rig.export.resume();
    assert_eq!(guest.finish(0, slot).0, 0);
    rig.end();
}

/// The next monitor is accepted when the requests have ended, which nothing else would end.
#[test]
fn a_monitor_that_leaves_during_a_pause_takes_its_requests_along() {
    for notes in [true, false] {
        let rig = Rig::new(MIB);
        let mut guest = if notes { Guest::new(1) } else { Guest::new(1).without_notes() };
        guest.connect(&rig.socket);
        guest.start();
        guest.write(0, 0, &[1; 512]);
        rig.export.pause();
        let before = rig.export.stats().slow_lane;
        let slots = [
            guest.submit(0, WRITE, 8, Data::Out(&[2; 512])),
            guest.submit(0, WRITE_ZEROES, 0, Data::Out(&range(16, 1, 0))),
            guest.submit(0, DISCARD, 0, Data::Out(&range(128, 128, 0))),
            guest.submit(0, FLUSH, 0, Data::None),
            guest.submit(0, READ, 0, Data::In(512)),
        ];
        let taken = before + slots.len() as u64;
        eventually("all are taken", || rig.export.stats().slow_lane == taken);
        guest.disconnect();
        guest.connect(&rig.socket);
        rig.export.resume();
        guest.collect(0);
        guest.start();
        // They are repeated if the monitor has kept a record of them.
        let status = if notes { 0 } else { 1 };
        for slot in slots {
            assert_eq!(guest.finish(0, slot).0, status);
        }
        assert_eq!(guest.read(0, 8, 512), [if notes { 2 } else { 0 }; 512]);
        rig.end();
    }
}

#[test]
fn sockets_are_not_taken_from_others() {
    let rig = Rig::new(MIB);
    assert!(Listener::bind(&rig.socket).is_err(), "somebody listens there");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(Listener::bind(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let path = folder.path().join("stale");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(Listener::bind(&path).unwrap());
    assert!(!path.exists());
    rig.end();
}

/// The server ends with requests in flight: none is lost, none is answered twice.
#[test]
fn another_server_takes_over() {
    let mut rig = Rig::new(64 * MIB);
    let mut guest = rig.boot(1);
    for round in 0..10_u8 {
        for i in 0..60 {
            guest.submit(0, WRITE, i * 128, Data::Out(&[round + 1; 65536]));
        }
        rig = rig.restart();
        guest.connect(&rig.socket);
        guest.collect(0);
        guest.start();
        while guest.returned(0).len() < 60 {
            guest.wait_call(0, Duration::from_secs(10));
            guest.collect(0);
        }
        for slot in guest.returned(0) {
            assert_eq!(guest.release(0, slot).0, 0);
        }
        for i in 0..60 {
            assert_eq!(guest.read(0, i * 128, 512), [round + 1; 512]);
        }
    }
    rig.end();
}

#[test]
fn a_dropped_server_serves_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vhost.sock");
    let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
    let export = Export::new(disk, ExportOptions::default());
    let listener = Listener::bind(&socket).unwrap();
    let server = Server::start(export.clone(), listener, ServerOptions::default()).unwrap();
    let mut guest = Guest::boot(&socket, 1);
    guest.write(0, 0, &[1; 512]);
    drop(server);
    assert_eq!(Arc::strong_count(&export), 1);
    assert!(!socket.exists());
}

/// A server with few queues and no threads for slow requests, which the queues' threads then do.
#[test]
fn a_small_server_serves_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("vhost.sock");
    let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
    let export = Export::new(disk, ExportOptions::default());
    let mut options = ServerOptions::default();
    options.queues_max = 2;
    options.threads_max = 0;
    let server = Server::start(export, Listener::bind(&socket).unwrap(), options).unwrap();
    let mut guest = Guest::boot(&socket, 2);
    assert_eq!(guest.get(17), 2, "queues");
    assert_eq!(guest.config(34, 2), [2, 0]);
    // Too long for the non-blocking path.
    guest.write(1, 0, &[7; DATA as usize]);
    assert!(guest.read(0, 0, DATA as u32) == [7; DATA as usize]);
    drop(server);
}

#[test]
fn a_child_of_fork_ends_no_server() {
    for stops in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
        let export = Export::new(disk, ExportOptions::default());
        let listener = Listener::bind(&socket).unwrap();
        let server = Server::start(export, listener, ServerOptions::default()).unwrap();
        let mut guest = Guest::boot(&socket, 1);
        guest.write(0, 0, &[5; 512]);
        let mut inherited = Some(server);
        let leaves_it = || match inherited.take() {
            Some(server) if stops => !server.stop(Duration::MAX),
            server => server.is_some(),
        };
        assert!(in_child(|| (), leaves_it), "stops: {stops}");
        assert_eq!(guest.read(0, 0, 512), [5; 512]);
        guest.disconnect();
        assert_eq!(Guest::boot(&socket, 1).read(0, 0, 512), [5; 512]);
        assert!(inherited.unwrap().stop(Duration::from_secs(120)));
    }
}
