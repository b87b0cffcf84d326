//! Guests that write anything into memory. An invalid queue is stopped; the other queues and the
//! server continue.

use std::os::fd::AsFd;
use std::time::Duration;

use vdkit_testkit::Rng;

use crate::guest::*;
use crate::rig::Rig;
use vdkit_testkit::disks::MIB;

const WRITE_ONLY: u16 = 2;

/// Descriptors: address, length, flags.
type Parts = Vec<(u64, u32, u16)>;

/// Makes the first queue of a guest invalid: it returns nothing, and the second works as before.
fn stopped(nonsense: impl FnOnce(&mut Guest)) {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(2);
    guest.write(0, 0, &[1; 512]);
    nonsense(&mut guest);
    guest.write(1, 8, &[2; 512]);
    assert_eq!(guest.read(1, 0, 512), [1; 512]);
    // The answer comes when nobody works on the queue any more.
    guest.stop_queue(0);
    assert_eq!(guest.collect(0), 0, "something came back");
    // It works again after the monitor restarts it.
    let mut guest = {
        drop(guest);
        rig.boot(2)
    };
    assert_eq!(guest.read(0, 8, 512), [2; 512]);
    rig.end();
}

/// Address of a valid header.
fn header(guest: &Guest) -> u64 {
    let at = GUEST + 0x8_0000;
    guest.put(at, READ.to_le());
    guest.put(at + 8, 0_u64);
    at
}

fn status(guest: &Guest) -> u64 {
    header(guest) + 32
}

#[test]
fn chains_that_make_no_sense() {
    let chains: [fn(&mut Guest) -> Parts; 8] = [
        // No status; no header; a short header; empty.
        |g| vec![(header(g), 16, 0)],
        |g| vec![(status(g), 1, WRITE_ONLY)],
        |g| vec![(header(g), 15, 0), (status(g), 1, WRITE_ONLY)],
        |_| vec![(0, 16, 0), (0, 1, WRITE_ONLY)],
        // A status outside; at the end of the address space; of length 0.
        |g| vec![(header(g), 16, 0), (8, 1, WRITE_ONLY)],
        |g| vec![(header(g), 16, 0), (u64::MAX, 1, WRITE_ONLY)],
        |g| vec![(header(g), 16, 0), (status(g), 0, WRITE_ONLY)],
        // A readable descriptor after a writable one.
        |g| vec![(header(g), 16, 0), (status(g), 1, WRITE_ONLY), (header(g), 16, 0)],
    ];
    for chain in chains {
        stopped(|guest| {
            let parts = chain(guest);
            guest.chain(0, 5, &parts);
            guest.offer(0, 20);
        });
    }
}

#[test]
fn chains_without_an_end() {
    stopped(|guest| {
        let at = header(guest);
        guest.chain(0, 5, &[(at, 16, 0), (at, 16, 0)]);
        // The second points back to the first.
        let second = GUEST + 21 * 16;
        guest.put(second + 12, 1_u16);
        guest.put(second + 14, 20_u16);
        guest.offer(0, 20);
    });
}

#[test]
fn descriptors_beyond_their_table() {
    stopped(|guest| guest.offer(0, QUEUE_SIZE));
    stopped(|guest| guest.offer(0, u16::MAX));
    stopped(|guest| {
        let at = header(guest);
        guest.chain(0, 5, &[(at, 16, 0), (at, 16, 0)]);
        guest.put(GUEST + 20 * 16 + 14, 5000_u16);
        guest.offer(0, 20);
    });
}

#[test]
fn indirect_tables_that_make_no_sense() {
    const INDIRECT: u16 = 4;
    let table = GUEST + 0x9_0000;
    // Outside; partial; empty; too large.
    for (address, len) in [(8, 48), (table, 47), (table, 0), (table, !15), (u64::MAX - 7, 32)] {
        stopped(|guest| {
            guest.chain(0, 5, &[(address, len, INDIRECT)]);
            guest.offer(0, 20);
        });
    }
    // Nested tables.
    stopped(|guest| {
        guest.put(table, table);
        guest.put(table + 8, 16_u32);
        guest.put(table + 12, INDIRECT);
        guest.chain(0, 5, &[(table, 16, INDIRECT)]);
        guest.offer(0, 20);
    });
}

#[test]
fn available_indices_that_make_no_sense() {
    stopped(|guest| {
        guest.set_available(0, 1 + QUEUE_SIZE + 1);
        guest.kick(0);
    });
    // A head in flight is offered repeatedly.
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(2);
    rig.export.pause();
    let slot = guest.submit(0, WRITE, 0, Data::Out(&[1; 512]));
    for _ in 0..1000 {
        guest.offer(0, slot * 4);
    }
    std::thread::sleep(Duration::from_millis(50));
    rig.export.resume();
    guest.write(1, 8, &[2; 512]);
    rig.end();
}

#[test]
fn data_outside_of_memory_is_an_error() {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(1);
    guest.write(0, 0, &[1; 4096]);
    for (kind, flags) in [(READ, WRITE_ONLY), (WRITE, 0), (DISCARD, 0)] {
        for (address, len) in [(8, 512), (GUEST + (96 << 20) - 256, 512), (u64::MAX - 100, 512)] {
            let slot = guest.prepare(0, kind, 0, Data::None);
            let head = GUEST + 0x1_0000 + u64::from(slot) * 64;
            guest.chain(
                0,
                slot,
                &[(head, 16, 0), (address, len, flags), (head + 32, 1, WRITE_ONLY)],
            );
            guest.offer(0, slot * 4);
            assert_eq!(guest.finish(0, slot).0, 1, "{kind} {address:x}");
        }
    }
    assert_eq!(guest.read(0, 0, 4096), [1; 4096]);
    rig.end();
}

/// Split headers and statuses, as old and unusual drivers use.
#[test]
fn any_layout_of_the_pieces_works() {
    let rig = Rig::new(MIB);
    let mut guest = rig.boot(1);
    let pattern: Vec<u8> = (0..1024).map(|i| (i % 253) as u8).collect();
    guest.write(0, 0, &pattern);
    let slot = guest.prepare(0, READ, 0, Data::In(1024));
    let head = GUEST + 0x1_0000 + u64::from(slot) * 64;
    let data = GUEST + 0x8_0000;
    guest.indirect = true;
    guest.chain(
        0,
        slot,
        &[
            (head, 3, 0),
            (head + 3, 0, 0),
            (head + 3, 13, 0),
            (data, 100, WRITE_ONLY),
            (data + 100, 923, WRITE_ONLY),
            // The last data byte and the status in one descriptor.
            (data + 1023, 2, WRITE_ONLY),
        ],
    );
    guest.indirect = false;
    guest.put(data + 1024, 0xff_u8);
    guest.put(head + 32, 0_u8);
    guest.offer(0, slot * 4);
    guest.finish(0, slot);
    let mut got = vec![0; 1025];
    vm_memory::Bytes::read_slice(&guest.mem, &mut got, vm_memory::GuestAddress(data)).unwrap();
    assert_eq!(got[..1024], pattern);
    assert_eq!(got[1024], 0, "the status");
    rig.end();
}

/// Random bytes everywhere the device reads.
#[test]
fn random_rings() {
    let rig = Rig::new(64 * MIB);
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let mut guest = rig.boot(2);
        for _ in 0..50 {
            let head = rng.below(u64::from(QUEUE_SIZE) + 2) as u16;
            for _ in 0..8 {
                let at = GUEST + rng.below(u64::from(QUEUE_SIZE)) * 16;
                let address = match rng.below(4) {
                    0 => rng.below(u64::MAX),
                    1 => GUEST + rng.below(4096) * 16,
                    _ => header(&guest) + rng.below(64),
                };
                guest.put(at, address);
                guest.put(at + 8, rng.below(5000) as u32);
                guest.put(at + 12, rng.below(8) as u16);
                guest.put(at + 14, rng.below(u64::from(QUEUE_SIZE)) as u16);
            }
            guest.put(header(&guest), rng.below(16) as u32);
            guest.offer(0, head);
        }
        guest.write(1, 100_000, &[3; 512]);
        assert_eq!(guest.read(1, 100_000, 512), [3; 512]);
    }
    let mut guest = rig.boot(1);
    guest.write(0, 16, &[4; 512]);
    drop(guest);
    rig.end();
}

/// Writing to one whose reader is gone would end the server's process.
#[test]
fn descriptors_that_are_no_events() {
    let rig = Rig::new(MIB);
    let (reader, pipe) = std::io::pipe().unwrap();
    let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
    drop(reader);
    for request in [12, 13, 14] {
        for fd in [pipe.as_fd(), socket.as_fd()] {
            let mut guest = Guest::new(1);
            guest.connect(&rig.socket);
            assert!(!guest.try_set(request, &[0; 8], &[fd]), "request {request}");
        }
    }
    rig.boot(1).write(0, 0, &[9; 512]);
    rig.end();
}

/// Invalid messages: the connection ends or the message is refused, and the next monitor is served.
#[test]
fn random_messages() {
    let rig = Rig::new(MIB);
    let mut rng = Rng::new(5);
    for request in 0..45_u32 {
        for len in [0, 4, 8, 12, 20, 24, 40, 64, 300] {
            let mut guest = Guest::new(1);
            guest.connect(&rig.socket);
            let body: Vec<u8> = (0..len)
                .map(|_| if rng.below(3) == 0 { rng.below(256) as u8 } else { rng.below(2) as u8 })
                .collect();
            guest.send(request, 8, &body, &[]);
            guest.disconnect();
        }
    }
    let guest = {
        let mut guest = Guest::new(1);
        guest.connect(&rig.socket);
        guest
    };
    // Another version; an endless body; half a header.
    guest.send_bytes(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], &[]);
    drop(guest);
    for bytes in [&[1, 0, 0, 0, 1, 0, 0, 0, 255, 255, 255, 255][..], &[1, 0, 0]] {
        let mut guest = Guest::new(1);
        guest.connect(&rig.socket);
        guest.send_bytes(bytes, &[]);
    }
    rig.boot(1).write(0, 0, &[9; 512]);
    rig.end();
}
