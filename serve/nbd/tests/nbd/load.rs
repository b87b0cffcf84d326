//! Several clients at once, against a model.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vdkit_storage::MemoryStorage;
use vdkit_testkit::{Rng, Watched};

use vdkit_testkit::disks::{MIB, reopen};
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;

/// Bytes per stripe; stripes belong to the clients in turn, so that clients share clusters but
/// never bytes.
const STRIPE: u64 = 1536;
const CLIENTS: u64 = 4;
const DISK: u64 = 8 * MIB;

/// The content of a client's own stripes.
struct Lane {
    client: Client,
    number: u64,
    model: Vec<u8>,
    rng: Rng,
}

impl Lane {
    fn stripes() -> u64 {
        DISK / STRIPE / CLIENTS
    }

    fn step(&mut self) {
        let stripe = self.rng.below(Self::stripes());
        let at = (stripe * CLIENTS + self.number) * STRIPE;
        let from = self.rng.below(STRIPE);
        let len = 1 + self.rng.below(STRIPE - from);
        let own = (stripe * STRIPE + from) as usize..(stripe * STRIPE + from + len) as usize;
        match self.rng.below(10) {
            0..4 => {
                let bytes = vec![self.rng.next_u64() as u8; len as usize];
                let fua = if self.rng.chance(1, 20) { FUA } else { 0 };
                self.client.run(WRITE, fua, at + from, len, &bytes).unwrap();
                self.model[own].copy_from_slice(&bytes);
            }
            4 => {
                let flags = if self.rng.chance(1, 2) { NO_HOLE } else { 0 };
                self.client.run(WRITE_ZEROES, flags, at + from, len, b"").unwrap();
                self.model[own].fill(0);
            }
            5 => self.client.run(FLUSH, 0, 0, 0, b"").unwrap(),
            _ => {
                let read = self.client.read(at + from, len as usize).unwrap();
                assert!(read == self.model[own], "client {} at {}", self.number, at + from);
            }
        }
    }
}

#[test]
fn clients_that_share_clusters_keep_their_bytes() {
    let rig = Rig::new(DISK);
    let rounds = std::env::var("VDKIT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(1) * 1500;
    let stop = AtomicBool::new(false);
    let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let client = rig.client(STYLES[number as usize % 3]);
                let mut lane = Lane {
                    client,
                    number,
                    model: vec![0; (Lane::stripes() * STRIPE) as usize],
                    rng: Rng::from_env(0x10ad + number),
                };
                scope.spawn(move || {
                    for _ in 0..rounds {
                        lane.step();
                    }
                    lane.model
                })
            })
            .collect();
        // Snapshots under load, and clients that connect, send a large request and disconnect.
        scope.spawn(|| {
            let mut rng = Rng::from_env(0x57a2);
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                let name = format!("s{number}");
                let new = vdkit_block::NewSnapshot { name: name.clone(), ..Default::default() };
                let take = |disk: &vdkit_chain::Disk| {
                    let snapshots = disk.top().snapshots().unwrap();
                    snapshots.create(&new, &Default::default())?;
                    if rng.chance(2, 3) {
                        snapshots.delete(&name, &Default::default())?;
                    }
                    Ok(())
                };
                rig.export.alone(take).unwrap();
                let mut visitor = rig.client(Style::Structured);
                visitor.request(READ, 0, 0, DISK, b"");
                drop(visitor);
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        });
        let models = lanes.into_iter().map(|lane| lane.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        models
    });
    let storage = rig.end();
    let disk = reopen(storage, false);
    let mut all = vec![0; DISK as usize];
    disk.read_at(&mut all, vdkit_block::GuestOffset(0)).unwrap();
    for (index, stripe) in all.chunks_exact(STRIPE as usize).enumerate() {
        let (owner, place) = (index as u64 % CLIENTS, index as u64 / CLIENTS);
        if place < Lane::stripes() {
            let from = (place * STRIPE) as usize;
            assert!(stripe == &models[owner as usize][from..from + STRIPE as usize], "{index}");
        }
    }
}

#[test]
fn many_requests_of_one_client_are_each_answered_once() {
    let rig = Rig::new(64 * MIB);
    for style in STYLES {
        let mut client = rig.client(style);
        let mut open = std::collections::BTreeMap::new();
        let mut rng = Rng::from_env(0xa11);
        let mut answered = 0;
        while answered < 3000 {
            if open.len() < 64 && rng.chance(2, 3) {
                let at = rng.below(1000) * 4096;
                let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
                let (cookie, reads) = match rng.below(4) {
                    0 => (client.request(WRITE, flags, at, 4096, &[1; 4096]), 0),
                    1 => (client.request(FLUSH, 0, 0, 0, b""), 0),
                    2 => (client.request(WRITE_ZEROES, 0, at, 65536, b""), 0),
                    _ => (client.request(READ, 0, at, 4096, b""), 4096),
                };
                assert!(open.insert(cookie, reads).is_none());
            } else if !open.is_empty() {
                let chunk = client.chunk(|cookie| open[&cookie]);
                assert!(chunk.kind < 1 << 15);
                assert!(open.contains_key(&chunk.cookie));
                if chunk.flags & 1 == 1 {
                    open.remove(&chunk.cookie);
                    answered += 1;
                }
            }
        }
    }
    rig.end();
}

#[test]
fn what_was_begun_is_done_when_the_service_ends() {
    let storage = Arc::new(MemoryStorage::new("image"));
    let rig = Rig::with(storage, 64 * MIB, |_| {}, |_| {});
    let mut client = rig.client(Style::Structured);
    for i in 0..100u64 {
        client.request(WRITE, 0, i * 65536, 65536, &vec![i as u8 + 1; 65536]);
    }
    // The server has started all of them once the last one is answered.
    for _ in 0..100 {
        assert_eq!(client.chunk(|_| 0).kind, 0);
    }
    let storage = rig.end();
    assert!(client.is_ended());
    let disk = reopen(storage, false);
    for i in 0..100u64 {
        let mut byte = [0];
        disk.read_at(&mut byte, vdkit_block::GuestOffset(i * 65536 + 65535)).unwrap();
        assert_eq!(byte, [i as u8 + 1]);
    }
}

/// A client may send large payloads faster than they are written; buffered payload bytes are
/// bounded.
#[test]
fn one_large_payload_is_in_memory_at_a_time() {
    const PAYLOAD: usize = 8 << 20;
    let rig = Rig::new(64 * MIB);
    let client = rig.client(Style::Structured);
    rig.export.pause();
    let watched = Watched::default();
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut client = client;
            watched.is_me();
            for index in 0..4 {
                client.request(WRITE, 0, index * PAYLOAD as u64, PAYLOAD as u64, &[3; PAYLOAD]);
            }
            client
        });
        watched.until_it_waits();
        assert!(!sender.is_finished(), "all four were read though none could be written");
        rig.export.resume();
        let mut client = sender.join().unwrap();
        for _ in 0..4 {
            assert_eq!(client.chunk(|_| 0).kind, 0);
        }
        assert_eq!(client.read(32 * MIB - 1, 2).unwrap(), [3, 0]);
    });
    rig.end();
}

/// A client may send all of its requests before it reads a reply, up to the server's limit of
/// concurrent requests: QEMU's takes 16.
#[test]
fn a_client_that_sends_before_it_reads_is_served() {
    const KIB: u64 = 1 << 10;
    for style in STYLES {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client(style);
        client.write(0, &vec![7; 32 << 20]).unwrap();
        for [reads, read_bytes, writes, write_bytes] in [
            [8, 128 * KIB, 8, 128 * KIB],
            [10, 64 * KIB, 6, 64 * KIB],
            [4, 128 * KIB, 4, MIB],
            [3, 8 * MIB, 3, 8 * MIB],
            [100, 4 * KIB, 100, 4 * KIB],
        ] {
            let reads: Vec<u64> =
                (0..reads).map(|_| client.request(READ, 0, 0, read_bytes, b"")).collect();
            let payload = vec![7; write_bytes as usize];
            let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
            let writes: Vec<u64> = (0..writes)
                .map(|_| client.request(WRITE, flags, 0, write_bytes, &payload))
                .collect();
            let mut open: std::collections::BTreeSet<u64> =
                reads.iter().chain(&writes).copied().collect();
            while !open.is_empty() {
                let len = |cookie| if reads.contains(&cookie) { read_bytes as usize } else { 0 };
                let chunk = client.chunk(len);
                assert!(chunk.kind < 1 << 15);
                if chunk.flags & 1 == 1 {
                    assert!(open.remove(&chunk.cookie));
                }
            }
        }
        rig.end();
    }
}
