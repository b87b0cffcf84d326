//! Clients that leave, and their pending requests.

use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use vdkit_block::{Error, Storage};
use vdkit_nbd::{Address, Exports, Listener, Server, ServerOptions};
use vdkit_serve::{Change, Claim, Export, ExportOptions};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2};
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;
use vdkit_testkit::{FaultKind, FaultyStorage, GatedCall, GatedStorage, eventually, in_child};

/// Maximum bytes kept for lack of space, of all clients.
const KEPT_BYTES_MAX: usize = 256 << 20;
/// Maximum threads of a connection.
const THREADS_MAX: u64 = 16;

fn served() -> (Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    let rig = Rig::with(storage, 1 << 30, |_| {}, |_| {});
    rig.client(Style::Simple).write(0, &[9; 4096]).unwrap();
    (faulty, rig)
}

/// Fills the disk and the kept bytes, so that the next change to keep blocks its thread. The kept bytes
/// are those of the returned client.
fn brim(faulty: &FaultyStorage, rig: &Rig) -> Arc<vdkit_serve::Client> {
    faulty.fill();
    let client = Arc::default();
    let error = Error::NoSpace { file: "image".to_owned(), what: "for a test".to_owned() };
    // Untouched pages.
    let kept = Change::Write(vec![0; KEPT_BYTES_MAX]);
    let claim = Claim::of(&client);
    rig.export.keep_claimed(kept, 512 * MIB, false, error, claim, Box::new(|_| {}));
    client
}

#[test]
fn a_write_that_waits_to_be_kept_is_given_up_when_its_client_leaves() {
    // Enough to block all threads of the connection, so that none receives.
    for writes in [1, 40] {
        let (faulty, rig) = served();
        let other = brim(&faulty, &rig);
        let mut client = rig.client(Style::Structured);
        for _ in 0..writes {
            client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
        }
        eventually("a call finds no space", || faulty.fired() > 0);
        assert_eq!(rig.export.parked().requests, 1);
        drop(client);
        rig.settles_at(0);
        rig.export.forget(&other);
        faulty.heal();
        rig.export.resume();
        let mut client = rig.client(Style::Structured);
        client.write(MIB, &[6; 4096]).unwrap();
        client.run(FLUSH, 0, 0, 0, b"").unwrap();
        eventually("given up", || rig.export.parked().requests == 0);
        assert_eq!(client.read(MIB, 1).unwrap(), [6], "after {writes} writes");
        rig.end();
    }
}

/// Other requests of the connection continue meanwhile, and so do replies that wait for a flush.
#[test]
fn a_leader_does_not_wait_for_room_to_keep_a_write() {
    let (faulty, rig) = served();
    let mut client = rig.client(Style::Structured);
    // All are short, so the leader itself runs the next one.
    for at in 2..50 {
        client.write(at * MIB, &[3; 4096]).unwrap();
    }
    let other = brim(&faulty, &rig);
    let write = client.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    for _ in 0..50 {
        let read = client.request(READ, 0, 0, 1, b"");
        assert_eq!(client.chunk(|_| 1).cookie, read);
    }
    rig.export.forget(&other);
    faulty.heal();
    rig.export.resume();
    assert!(client.answer(write, 0).is_ok());
    rig.end();
}

#[test]
fn a_paused_request_is_given_up_when_its_client_leaves() {
    for (command, payload) in [(WRITE, &[5; 4096][..]), (READ, b""), (BLOCK_STATUS, b"")] {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client_with(Style::Structured, &["base:allocation"]);
        rig.export.pause();
        for _ in 0..40 {
            client.request(command, 0, MIB, 4096, payload);
        }
        eventually("all threads wait", || rig.export.stats().slow_lane == THREADS_MAX);
        drop(client);
        rig.settles_at(0);
        rig.export.resume();
        assert_eq!(rig.client(Style::Structured).read(MIB, 1).unwrap(), [0]);
        rig.end();
    }
}

/// A disk whose next change is held.
fn held_at_a_change(handshake_time: Duration) -> (Arc<GatedStorage>, Rig) {
    let gate = GatedStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = gate.clone();
    let rig = Rig::with(storage, 64 * MIB, |_| {}, |server| server.handshake_time = handshake_time);
    // So that later changes go there and touch no metadata.
    rig.client(Style::Simple).write(MIB, &[9; 4096]).unwrap();
    rig.settles_at(0);
    gate.hold(|call| [FaultKind::Write, FaultKind::Zero].contains(&call.kind) && !call.done);
    (gate, rig)
}

/// A client that must not be let in before the gate is opened.
fn client_behind(gate: &GatedStorage, rig: &Rig) -> Client {
    let (reached, hears) = mpsc::channel();
    let path = rig.path().to_owned();
    let again = std::thread::spawn(move || {
        let client = Client::open(&path, "disk", Style::Structured);
        reached.send(()).unwrap();
        client
    });
    let early = hears.recv_timeout(Duration::from_millis(300));
    gate.release();
    assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
    again.join().unwrap()
}

/// A request in a thread, and requests that are still in the socket.
#[test]
fn a_change_of_a_lost_connection_does_not_come_after_what_its_client_writes_next() {
    for (command, changes) in [(WRITE, 1), (WRITE, 40), (WRITE_ZEROES, 1)] {
        let (gate, rig) = held_at_a_change(Duration::from_secs(120));
        let mut lost = rig.client(Style::Structured);
        let payload: &[u8] = if command == WRITE { &[5; 4096] } else { b"" };
        for _ in 0..changes {
            lost.request(command, 0, MIB, 4096, payload);
        }
        gate.reached();
        drop(lost);
        let mut client = client_behind(&gate, &rig);
        client.write(MIB, &[6; 4096]).unwrap();
        assert_eq!(client.read(MIB, 1).unwrap(), [6]);
        rig.end();
    }
}

#[test]
fn a_client_is_turned_away_while_a_change_of_a_lost_connection_hangs() {
    let (gate, rig) = held_at_a_change(Duration::from_secs(3));
    let mut lost = rig.client(Style::Structured);
    lost.request(WRITE, 0, MIB, 4096, &[5; 4096]);
    gate.reached();
    // A connection whose client stays delays nobody.
    assert_eq!(rig.client(Style::Structured).read(MIB, 1).unwrap(), [9]);
    drop(lost);
    let mut early = Client::dial(rig.path());
    early.put(&3u32.to_be_bytes());
    let go = [&4u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
    early.send_option(7, &go);
    early.socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let ended = (&early.socket).read_to_end(&mut Vec::new());
    gate.release();
    assert!(!ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "it was let in");
    assert_eq!(rig.client(Style::Structured).read(MIB, 1).unwrap(), [5]);
    rig.end();
}

fn panics_at_a_change(call: GatedCall) -> bool {
    assert!(![FaultKind::Write, FaultKind::Zero].contains(&call.kind), "for a test");
    false
}

/// The leader's request, and one of another thread.
#[test]
fn a_panic_ends_the_connection_instead_of_leaving_a_request_without_a_reply() {
    for (command, payload) in [(WRITE, &[5; 4096][..]), (WRITE_ZEROES, b"")] {
        let (gate, rig) = held_at_a_change(Duration::from_secs(60));
        gate.hold(panics_at_a_change);
        let mut client = rig.client(Style::Structured);
        client.request(command, 0, MIB, 4096, payload);
        assert!(client.is_ended(), "{command}");
        rig.settles_at(0);
        gate.release();
        let mut client = rig.client(Style::Structured);
        client.write(MIB, &[6; 4096]).unwrap();
        assert_eq!(client.read(MIB, 1).unwrap(), [6]);
        rig.end();
    }
}

/// A change found no space, and is being made when another request of the connection panics: one of
/// another thread, after which a leader still ends the connection, and the leader's own.
#[test]
fn a_kept_change_of_a_connection_that_panicked_does_not_come_after_the_next_one() {
    for (command, payload) in [(WRITE_ZEROES, &b""[..]), (WRITE, &[7; 4096])] {
        let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
        let gate = GatedStorage::new(faulty.clone());
        let (storage, time): (Arc<dyn Storage>, _) = (gate.clone(), Duration::from_secs(120));
        let rig = Rig::with(storage, 64 * MIB, |_| {}, |server| server.handshake_time = time);
        let mut client = rig.client(Style::Structured);
        client.write(MIB, &[9; 4096]).unwrap();
        faulty.fill();
        client.request(WRITE, 0, 8 * MIB, 4096, &[5; 4096]);
        eventually("kept", || rig.export.parked().requests == 1);
        gate.hold(|call| call.kind == FaultKind::Write && !call.done);
        faulty.heal();
        rig.export.resume();
        gate.reached();
        gate.hold(panics_at_a_change);
        client.request(command, 0, MIB, 4096, payload);
        assert!(client.is_ended());
        assert!(gate.is_held(), "the kept change was made before the panic");
        let mut client = client_behind(&gate, &rig);
        client.write(8 * MIB, &[6; 4096]).unwrap();
        assert_eq!(client.read(8 * MIB, 1).unwrap(), [6]);
        rig.end();
    }
}

#[test]
fn clients_that_read_nothing_and_closed_their_sides_delay_nobody_for_long() {
    // Far more of them than seconds.
    let (storage, time) = (Arc::new(MemoryStorage::new("image")), Duration::from_secs(6));
    let rig = Rig::with(storage, 64 * MIB, |_| {}, |server| server.handshake_time = time);
    let mut all: Vec<Client> = (0..12).map(|_| rig.client(Style::Simple)).collect();
    all[0].write(0, &[7; 4096]).unwrap();
    for deaf in &mut all {
        // Replies that no socket has room for, and a write behind them.
        for _ in 0..24 {
            deaf.request(READ, 0, 0, 256 << 10, b"");
        }
        deaf.request(WRITE, 0, 0, 4096, &[8; 4096]);
    }
    for deaf in &all {
        deaf.socket.shutdown(std::net::Shutdown::Write).unwrap();
    }
    rig.client(Style::Simple).write(0, &[9; 4096]).unwrap();
    assert_eq!(rig.client(Style::Simple).read(0, 1).unwrap(), [9]);
    drop(all);
    rig.end();
}

/// The leader runs a flush itself if the last one was brief.
#[test]
fn a_flush_of_a_lost_connection_keeps_nobody_out_of_a_paused_export() {
    let (storage, time) = (Arc::new(MemoryStorage::new("image")), Duration::from_secs(5));
    let rig = Rig::with(storage, 64 * MIB, |_| {}, |server| server.handshake_time = time);
    let mut lost = rig.client(Style::Simple);
    lost.write(0, &[1; 4096]).unwrap();
    for _ in 0..16 {
        lost.run(FLUSH, 0, 0, 0, b"").unwrap();
    }
    rig.export.pause();
    lost.request(FLUSH, 0, 0, 0, b"");
    drop(lost);
    let reached = catch_unwind(AssertUnwindSafe(|| rig.client(Style::Simple)));
    // Also if it was turned away: the end of the server waits for the flush.
    rig.export.resume();
    let mut client = reached.expect("a client is let in");
    client.run(FLUSH, 0, 0, 0, b"").unwrap();
    rig.end();
}

#[test]
fn caching_holes_takes_no_time() {
    let rig = Rig::new(7 << 40);
    let mut client = rig.client(Style::Extended);
    client.write(6 << 40, &[1; 4096]).unwrap();
    for _ in 0..4 {
        client.run(CACHE, 0, 0, 7 << 40, b"").unwrap();
    }
    rig.end();
}

#[test]
fn a_block_status_reply_walks_a_bounded_part_of_the_map() {
    const CLUSTERS: u64 = 70_000;
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    let options = "cluster_size=512";
    let disk = vdkit_testkit::disks::qcow2(storage.clone(), CLUSTERS * 512, options);
    // In descending order, so that each cluster is a separate map extent, and all of them merge
    // into one run.
    for cluster in (0..CLUSTERS).rev() {
        disk.write_at(&[1; 512], vdkit_block::GuestOffset(cluster * 512)).unwrap();
    }
    let rig = Rig::over(storage, disk, |_| {}, |_| {});
    let mut client = rig.client_with(Style::Extended, &["base:allocation"]);
    let first = client.status(0, 0, CLUSTERS * 512).unwrap().remove(0);
    let [(len, 0)] = first[..] else { panic!("{first:?}") };
    assert!(len > 0 && len < CLUSTERS * 512, "{len} of {}", CLUSTERS * 512);
    let rest = client.status(0, len, CLUSTERS * 512 - len).unwrap().remove(0);
    assert_eq!(rest, [(CLUSTERS * 512 - len, 0)]);
    rig.end();
}

/// Whoever stops a server opens the image again at once, and its lock must be free by then.
#[test]
fn a_stopped_server_holds_no_export() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let disk = qcow2(Arc::new(MemoryStorage::new("image")), 1 << 20, "");
    let export = Export::new(disk, ExportOptions::default());
    for _ in 0..500 {
        let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
        let exports = Exports::new(vec![export.clone()]);
        let server = Server::start(exports, vec![listener], ServerOptions::default()).unwrap();
        let client = UnixStream::connect(&socket).unwrap();
        while server.connections() == 0 {
            std::thread::yield_now();
        }
        server.stop(Duration::ZERO);
        assert_eq!(Arc::strong_count(&export), 1);
        drop(client);
    }
}

#[test]
fn a_dropped_server_serves_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let export = Export::new(
        qcow2(Arc::new(MemoryStorage::new("image")), MIB, ""),
        ExportOptions::default(),
    );
    let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
    let exports = Exports::new(vec![export.clone()]);
    let server = Server::start(exports, vec![listener], ServerOptions::default()).unwrap();
    let mut client = Client::open(&socket, "", Style::Simple);
    client.write(0, &[1; 4096]).unwrap();
    drop(server);
    assert_eq!(Arc::strong_count(&export), 1);
    assert!(!socket.exists() && client.is_ended());
}

#[test]
fn a_child_of_fork_ends_no_server() {
    for stops in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
        let export = Export::new(disk, ExportOptions::default());
        let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
        let exports = Exports::new(vec![export.clone()]);
        let server = Server::start(exports, vec![listener], ServerOptions::default()).unwrap();
        let mut client = Client::open(&socket, "", Style::Simple);
        client.write(0, &[1; 4096]).unwrap();
        let mut inherited = Some(server);
        let leaves_it = || match inherited.take() {
            Some(server) if stops => {
                server.stop(Duration::MAX);
                true
            }
            server => server.is_some(),
        };
        assert!(in_child(|| (), leaves_it), "stops: {stops}");
        assert_eq!(client.read(0, 1).unwrap(), [1]);
        assert_eq!(Client::open(&socket, "", Style::Simple).read(0, 1).unwrap(), [1]);
        inherited.unwrap().stop(Duration::ZERO);
        assert_eq!(Arc::strong_count(&export), 1);
    }
}

#[test]
fn a_server_that_cannot_start_listens_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let disk = qcow2(Arc::new(MemoryStorage::new("image")), MIB, "");
    let export = Export::new(disk, ExportOptions::default());
    let first = Listener::bind(&Address::Unix(socket.clone())).unwrap();
    // The system refuses to make this one non-blocking.
    let path_only = rustix::fs::OFlags::PATH.bits() as i32;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(path_only).open(folder.path());
    let second = Listener::Handed(OwnedFd::from(file.unwrap()).into());
    let exports = Exports::new(vec![export.clone()]);
    let started = Server::start(exports, vec![first, second], ServerOptions::default());
    assert!(started.is_err());
    assert_eq!(Arc::strong_count(&export), 1);
    assert!(!socket.exists());
}
