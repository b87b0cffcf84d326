//! One flush for many replies: durable writes and flushes of a client with many outstanding
//! requests.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::{CacheMode, GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::{MIB, qcow2, reopen, reopen_in};
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;
use vdkit_testkit::{
    CountingStorage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, GatedStorage, eventually,
};

/// Serves a disk of 4 MiB whose first half is allocated.
fn rig(cache: CacheMode, storage: Arc<dyn Storage>) -> Rig {
    let disk = qcow2(storage.clone(), 4 * MIB, "");
    disk.write_at(&vec![0xee; 2 * MIB as usize], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let disk = reopen_in(cache, storage.clone(), true);
    Rig::over(storage, disk, |_| {}, |_| {})
}

/// Blocks all syncs.
fn shut(gate: &GatedStorage) {
    gate.hold(|call| call.kind == FaultKind::Sync && !call.done);
}

/// A gate over memory that counts and fails, and a server in mode writethrough.
fn gated() -> (Arc<GatedStorage>, Arc<CountingStorage>, Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let counting = CountingStorage::new(faulty.clone());
    let gate = GatedStorage::new(counting.clone());
    let rig = rig(CacheMode::Writethrough, gate.clone());
    (gate, counting, faulty, rig)
}

/// Requests sent in one call.
#[derive(Default)]
struct Burst {
    bytes: Vec<u8>,
    count: u64,
}

/// First cookie of a burst.
const FIRST: u64 = 1 << 32;

impl Burst {
    fn add(mut self, command: u16, flags: u16, at: u64, len: u32, payload: &[u8]) -> Self {
        self.bytes.extend(0x2560_9513u32.to_be_bytes());
        self.bytes.extend(flags.to_be_bytes());
        self.bytes.extend(command.to_be_bytes());
        self.bytes.extend((FIRST + self.count).to_be_bytes());
        self.bytes.extend(at.to_be_bytes());
        self.bytes.extend(len.to_be_bytes());
        self.bytes.extend(payload);
        self.count += 1;
        self
    }

    /// Writes of 4 KiB from the start of the disk.
    fn writes(self, count: u8, byte: u8) -> Self {
        (0..count)
            .fold(self, |burst, i| burst.add(WRITE, 0, u64::from(i) * 4096, 4096, &[byte; 4096]))
    }
}

/// Cookies and errors of the next `count` answers, ordered by cookie.
fn answers(client: &mut Client, count: u64) -> BTreeMap<u64, Option<u32>> {
    let mut answers = BTreeMap::new();
    for _ in 0..count {
        let chunk = client.chunk(|_| 0);
        let error = (chunk.kind >= 1 << 15)
            .then(|| u32::from_be_bytes(chunk.payload[..4].try_into().unwrap()));
        assert!(answers.insert(chunk.cookie, error).is_none(), "answered twice");
    }
    answers
}

/// A client whose first durable write waits for its sync, and which has sent more since: all of it
/// was taken, and nothing is answered.
fn waiting(gate: &GatedStorage, rig: &Rig, burst: &Burst) -> Client {
    let mut client = rig.client(Style::Structured);
    shut(gate);
    client.request(WRITE, 0, MIB, 4096, &[1; 4096]);
    gate.reached();
    client.put(&burst.bytes);
    // A leader continues while the other thread syncs, and takes requests in order.
    let read = client.request(READ, 0, MIB, 1, b"");
    let answer = client.chunk(|_| 1);
    assert_eq!((answer.cookie, answer.kind), (read, 1));
    client
}

#[test]
fn writes_of_one_send_cost_few_syncs() {
    let (_gate, counting, _, rig) = gated();
    let mut client = rig.client(Style::Structured);
    let mut fewest = u64::MAX;
    // On a busy machine the server may classify a write as waiting for the disk, or receive the
    // burst in many pieces; but not every time.
    for _ in 0..10 {
        let before = counting.counts().syncs;
        client.put(&Burst::default().writes(32, 5).bytes);
        assert!(answers(&mut client, 32).values().all(Option::is_none));
        fewest = fewest.min(counting.counts().syncs - before);
    }
    assert!((1..=12).contains(&fewest), "{fewest} syncs");
    assert_eq!(client.read(31 * 4096, 1).unwrap(), [5]);
    rig.end();
}

#[test]
fn what_comes_during_a_sync_shares_the_next_ones() {
    let (gate, counting, _, rig) = gated();
    let before = counting.counts().syncs;
    // So few writes that each could get a thread, as may happen on a busy machine.
    let burst =
        (0..24).fold(Burst::default().writes(8, 5), |burst, _| burst.add(FLUSH, 0, 0, 0, b""));
    let mut client = waiting(&gate, &rig, &burst);
    gate.release();
    assert!(answers(&mut client, 1 + burst.count).values().all(Option::is_none));
    let syncs = counting.counts().syncs - before;
    assert!((2..=6).contains(&syncs), "{syncs} syncs");
    rig.end();
}

#[test]
fn any_number_of_requests_waits_for_one_sync() {
    let (gate, counting, _, rig) = gated();
    let before = counting.counts().syncs;
    let burst = (0..2000).fold(Burst::default(), |burst, _| burst.add(FLUSH, 0, 0, 0, b""));
    let mut client = waiting(&gate, &rig, &burst);
    gate.release();
    assert!(answers(&mut client, 1 + burst.count).values().all(Option::is_none));
    let syncs = counting.counts().syncs - before;
    assert!(syncs <= 1 + 2000 / 256 + 1, "{syncs} syncs");
    rig.end();
}

#[test]
fn each_answer_is_durable_at_that_moment() {
    let modes = [(CacheMode::Writethrough, 0), (CacheMode::Writeback, FUA), (CacheMode::None, FUA)];
    for (cache, flags) in modes {
        let crash = CrashStorage::new();
        let rig = rig(cache, crash.clone());
        std::thread::scope(|scope| {
            for number in 0..3u64 {
                let (mut client, crash) = (rig.client(Style::Structured), &crash);
                scope.spawn(move || {
                    let mut open = BTreeMap::new();
                    let places = (0..48u64).map(|i| match i % 4 {
                        // In place, and with an allocation.
                        0 => 2 * MIB + (i * 3 + number) * 8192,
                        _ => (i * 3 + number) * 4096,
                    });
                    let mut places = places.fuse();
                    loop {
                        for at in places.by_ref() {
                            let byte = (at / 4096) as u8 | 1;
                            let cookie = client.request(WRITE, flags, at, 4096, &[byte; 4096]);
                            open.insert(cookie, (at, byte));
                            if open.len() == 8 {
                                break;
                            }
                        }
                        if open.is_empty() {
                            return;
                        }
                        let chunk = client.chunk(|_| 0);
                        // At once: a later flush by another thread must not help.
                        let image = crash.crash_now();
                        assert_eq!(chunk.kind, 0);
                        let (at, byte) = open.remove(&chunk.cookie).unwrap();
                        let disk = reopen(Arc::new(image.only_durable()), false);
                        let mut found = [0; 4096];
                        disk.read_at(&mut found, GuestOffset(at)).unwrap();
                        assert!(found == [byte; 4096], "{cache}: {at:#x}");
                    }
                });
            }
        });
        rig.end();
    }
}

#[test]
fn a_flush_among_other_requests_covers_what_was_answered_before() {
    let crash = CrashStorage::new();
    let rig = rig(CacheMode::Writeback, crash.clone());
    let (mut client, mut other) = (rig.client(Style::Structured), rig.client(Style::Structured));
    for round in 1..20u8 {
        let at = 2 * MIB + u64::from(round) * 65536;
        client.write(at, &[round; 512]).unwrap();
        let burst = Burst::default().writes(3, round).add(FLUSH, 0, 0, 0, b"").writes(2, round);
        other.put(&burst.bytes);
        let mut answered = 1;
        while !answers(&mut other, 1).contains_key(&(FIRST + 3)) {
            answered += 1;
        }
        let disk = reopen(Arc::new(crash.crash_now().only_durable()), false);
        let mut found = [0];
        disk.read_at(&mut found, GuestOffset(at)).unwrap();
        assert_eq!(found, [round]);
        answers(&mut other, burst.count - answered);
    }
    rig.end();
}

#[test]
fn a_failed_sync_answers_all_of_its_writes_with_the_error() {
    for (plan, errno) in [
        (FaultPlan::nth(&[FaultKind::Sync], 0).lasting(), 5),
        // Bytes are lost: waiting for space gains nothing.
        (FaultPlan::nth(&[FaultKind::Sync], 0).lasting().no_space(), 28),
    ] {
        let (gate, _, faulty, rig) = gated();
        let burst = Burst::default().writes(8, 5).add(FLUSH, 0, 0, 0, b"");
        let mut client = waiting(&gate, &rig, &burst);
        faulty.arm(plan);
        gate.release();
        let answers = answers(&mut client, 1 + burst.count);
        assert!(answers.values().all(|error| *error == Some(errno)), "{answers:?}");
        assert_eq!(rig.export.parked().total, 0);
        faulty.heal();
        assert_eq!(client.write(0, &[1; 4096]), Ok(()));
        rig.end();
    }
}

/// A disk whose flush finds no space for the map, and a client whose `count` requests wait.
fn full_at_flush(flags: u16) -> (Arc<CrashStorage>, Arc<FaultyStorage>, Rig, Client, u64) {
    let crash = CrashStorage::new();
    let faulty = FaultyStorage::new(crash.clone());
    let rig = rig(CacheMode::Writeback, faulty.clone());
    let mut client = rig.client(Style::Structured);
    client.run(WRITE, FUA, 2 * MIB, 65536, &[1; 65536]).unwrap();
    // The data is written; the flush finds no space.
    faulty.arm(FaultPlan::nth(&[FaultKind::Write], 1).no_space().lasting());
    let cookie = client.request(WRITE, flags, 3 * MIB, 65536, &[2; 65536]);
    if flags & FUA == 0 {
        assert!(client.answer(cookie, 0).is_ok());
        client.request(FLUSH, 0, 0, 0, b"");
        client.request(FLUSH, 0, 0, 0, b"");
    }
    let count = if flags & FUA == 0 { 2 } else { 1 };
    eventually("parked", || rig.export.parked().requests == count);
    (crash, faulty, rig, client, count)
}

#[test]
fn a_flush_that_finds_no_space_waits_for_some() {
    for flags in [0, FUA] {
        let (crash, faulty, rig, mut client, count) = full_at_flush(flags);
        // No request is answered, and reads continue.
        assert_eq!(client.read(3 * MIB, 1).unwrap(), [2]);
        faulty.heal();
        rig.export.resume();
        assert!(answers(&mut client, count).values().all(Option::is_none));
        let disk = reopen(Arc::new(crash.crash_now().only_durable()), false);
        let mut found = [0; 65536];
        disk.read_at(&mut found, GuestOffset(3 * MIB)).unwrap();
        assert!(found == [2; 65536]);
        assert_eq!((rig.export.parked().requests, rig.export.parked().bytes), (0, 0));
        rig.end();
    }
}

/// A full disk to be trimmed, and its client.
fn full_at_trim(cache: CacheMode) -> (Arc<CrashStorage>, Arc<FaultyStorage>, Rig, Client) {
    let crash = CrashStorage::new();
    let faulty = FaultyStorage::new(crash.clone());
    let rig = rig(cache, faulty.clone());
    let mut client = rig.client(Style::Structured);
    client.write(3 * MIB, &[2; 65536]).unwrap();
    faulty.arm(FaultPlan::nth(&[FaultKind::Write], 0).no_space().lasting());
    (crash, faulty, rig, client)
}

#[test]
fn a_trim_that_finds_no_space_stays_undone() {
    let (_, faulty, rig, mut client) = full_at_trim(CacheMode::Writethrough);
    client.run(TRIM, 0, 0, 65536, b"").unwrap();
    assert!(faulty.fired() > 0);
    assert_eq!(rig.export.parked().total, 0);
    faulty.heal();
    rig.end();
}

#[test]
fn a_durable_trim_waits_for_space() {
    let (crash, faulty, rig, mut client) = full_at_trim(CacheMode::Writeback);
    let trim = client.request(TRIM, FUA, 0, 65536, b"");
    eventually("parked", || rig.export.parked().requests == 1);
    assert_eq!(client.read(3 * MIB, 1).unwrap(), [2]);
    faulty.heal();
    rig.export.resume();
    assert!(client.answer(trim, 0).is_ok());
    let disk = reopen(Arc::new(crash.crash_now().only_durable()), false);
    let mut found = [1; 65536];
    disk.read_at(&mut found, GuestOffset(0)).unwrap();
    assert!(found == [0; 65536], "the trim is not durable");
    rig.end();
}

#[test]
fn neither_a_client_that_leaves_nor_the_end_waits_for_space() {
    let (_, faulty, rig, client, _) = full_at_flush(FUA);
    drop(client);
    rig.settles_at(0);
    faulty.heal();
    rig.export.resume();
    eventually("given up", || rig.export.parked().requests == 0);
    rig.end();

    let (_, faulty, rig, mut client, count) = full_at_flush(0);
    rig.export.end_waiting();
    // The error of the service's end, or of an attempt in progress.
    assert!(answers(&mut client, count).values().all(|error| matches!(error, Some(28 | 108))));
    faulty.heal();
    rig.end();
}

#[test]
fn a_client_that_leaves_during_a_sync_leaves_nothing_behind() {
    let (gate, _, _, rig) = gated();
    let client = waiting(&gate, &rig, &Burst::default().writes(8, 5));
    drop(client);
    std::thread::sleep(Duration::from_millis(20));
    gate.release();
    rig.settles_at(0);
    assert_eq!(rig.client(Style::Simple).read(7 * 4096, 1).unwrap(), [5]);
    rig.end();
}

#[test]
fn what_came_before_the_end_is_answered() {
    let (_gate, _, _, rig) = gated();
    for politely in [true, false] {
        let mut client = rig.client(Style::Structured);
        let burst = Burst::default().writes(20, 5).add(FLUSH, 0, 0, 0, b"");
        let count = burst.count;
        if politely {
            client.put(&burst.add(DISC, 0, 0, 0, b"").bytes);
        } else {
            client.put(&burst.bytes);
            client.socket.shutdown(Shutdown::Write).unwrap();
        }
        assert!(answers(&mut client, count).values().all(Option::is_none));
        assert!(client.is_ended());
    }
    rig.end();
}

#[test]
fn a_pause_keeps_replies_waiting_until_it_ends() {
    let (_gate, _, _, rig) = gated();
    let mut client = rig.client(Style::Structured);
    client.write(0, &[1; 4096]).unwrap();
    rig.export.pause();
    let burst = Burst::default().add(FLUSH, 0, 0, 0, b"").add(FLUSH, 0, 0, 0, b"").writes(6, 5);
    client.put(&burst.bytes);
    client.socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut byte = [0];
    let early = std::io::Read::read(&mut &client.socket, &mut byte).unwrap_err();
    assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock);
    client.socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    rig.export.resume();
    assert!(answers(&mut client, 8).values().all(Option::is_none));
    rig.end();
}
