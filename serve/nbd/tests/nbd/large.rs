//! Large requests, sent and received in pieces.

use std::io::Write;
use std::sync::Arc;

use vdkit_block::Storage;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::disks::MIB;
use vdkit_testkit::nbd::Rig;
use vdkit_testkit::nbd::client::*;
use vdkit_testkit::{FaultKind, FaultPlan, FaultyStorage, eventually};

/// Bytes of a chunk of a large read.
const PIECE: usize = 512 << 10;

fn faulty() -> (Arc<FaultyStorage>, Rig) {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    (faulty, Rig::with(storage, 64 * MIB, |_| {}, |_| {}))
}

/// Position-dependent nonzero bytes.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 1000 % 251) as u8 + 1).collect()
}

#[test]
fn a_large_read_comes_in_pieces_and_whole_when_asked() {
    for style in [Style::Structured, Style::Extended] {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client(style);
        client.write(0, &vec![1; 2 * MIB as usize]).unwrap();
        client.write(5 * MIB, &vec![2; 3 * MIB as usize]).unwrap();
        let (bytes, chunks) = client.read_with(0, 0, 8 * MIB as usize).unwrap();
        assert_eq!(chunks, 5 * MIB as usize / PIECE, "zeroes cost no data");
        let (whole, one) = client.read_with(DF, 0, 8 * MIB as usize).unwrap();
        assert_eq!(one, 1);
        assert!(bytes == whole);
        assert_eq!(whole.iter().filter(|byte| **byte == 2).count(), 3 * MIB as usize);
        rig.end();
    }
}

#[test]
fn reads_of_all_lengths_are_right() {
    let rig = Rig::new(64 * MIB);
    let data = pattern(3 * PIECE);
    rig.client(Style::Simple).write(12_345, &data).unwrap();
    for style in STYLES {
        let mut client = rig.client(style);
        let edges = [PIECE / 2, PIECE, 2 * PIECE];
        for len in edges.into_iter().flat_map(|edge| edge - 1..=edge + 1) {
            assert!(client.read(12_346, len).unwrap() == data[1..=len], "{style:?} {len}");
        }
        // A read of 0 bytes, which a data chunk cannot have.
        assert_eq!(client.read_with(0, 12_345, 0).unwrap(), (vec![], 0));
    }
    rig.end();
}

#[test]
fn an_error_within_a_large_read_says_where_and_ends_the_request_alone() {
    for style in STYLES {
        let (faulty, rig) = faulty();
        let mut client = rig.client(style);
        let data = pattern(4 * PIECE);
        client.write(MIB, &data).unwrap();
        let fail_once = |nth| faulty.arm(FaultPlan::nth(&[FaultKind::Read], nth));
        // In one piece: none of it is sent.
        fail_once(0);
        let flags = if style == Style::Simple { 0 } else { DF };
        assert_eq!(client.read_with(flags, MIB, data.len()), Err(5));
        if style != Style::Simple {
            fail_once(2);
            let cookie = client.request(READ, 0, MIB, data.len() as u64, b"");
            for piece in 0..2 {
                let chunk = client.chunk(|_| 0);
                assert_eq!((chunk.flags, chunk.kind, chunk.cookie), (0, 1, cookie));
                let at = MIB + (piece * PIECE) as u64;
                assert_eq!(chunk.payload[..8], at.to_be_bytes());
                assert!(chunk.payload[8..] == data[piece * PIECE..][..PIECE]);
            }
            // doc/proto.md: NBD_REPLY_TYPE_ERROR_OFFSET: error, length of the text, text, offset.
            let error = client.chunk(|_| 0);
            assert_eq!((error.flags, error.kind, error.cookie), (1, 0x8002, cookie));
            assert_eq!(error.payload[..4], 5u32.to_be_bytes());
            let text = u16::from_be_bytes(error.payload[4..6].try_into().unwrap()) as usize;
            assert!(std::str::from_utf8(&error.payload[6..6 + text]).unwrap().contains("image"));
            assert_eq!(error.payload[6 + text..], (MIB + 2 * PIECE as u64).to_be_bytes());
        }
        assert_eq!(faulty.fired(), 1);
        assert!(client.read(MIB, data.len()).unwrap() == data);
        rig.end();
    }
}

/// Small and large payloads, and requests without, in one stream with arbitrary boundaries.
#[test]
fn payloads_end_where_the_next_request_begins() {
    for style in STYLES {
        let rig = Rig::new(64 * MIB);
        let mut client = rig.client(style);
        let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
        // Around the limits of in-buffer payloads and of one receive.
        let lens =
            [65_537, 65_536, 1, 300_000, 65_537, 262_117, 262_116, 40, 2_000_000, 9, 262_145];
        let mut at = 0;
        let mut places = Vec::new();
        for (index, len) in lens.into_iter().enumerate() {
            let data = vec![index as u8 + 1; len];
            client.request(WRITE, flags, at, len as u64, &data);
            // Without waiting for the previous answer.
            client.request(READ, 0, 63 * MIB, 16, b"");
            places.push((at, len));
            at += len as u64;
        }
        let reads = |cookie: u64| if cookie.is_multiple_of(2) { 16 } else { 0 };
        for _ in 0..2 * lens.len() {
            let chunk = client.chunk(reads);
            assert!(chunk.kind < 1 << 15, "{chunk:?}");
        }
        for (index, (at, len)) in places.into_iter().enumerate() {
            let read = client.read(at, len).unwrap();
            assert!(read.iter().all(|byte| *byte == index as u8 + 1), "{index}");
        }
        rig.end();
    }
}

#[test]
fn a_client_that_leaves_within_a_large_payload_changes_nothing() {
    let rig = Rig::new(64 * MIB);
    for style in STYLES {
        for sent in [0, 1000, 70_000, 600_000, (1 << 20) - 1] {
            let mut client = rig.client(style);
            let flags = if style == Style::Extended { PAYLOAD_LEN } else { 0 };
            client.request(WRITE, flags, MIB, MIB, b"");
            client.socket.write_all(&vec![9; sent]).unwrap();
            drop(client);
            rig.settles_at(0);
        }
        let mut client = rig.client(style);
        assert_eq!(client.read(MIB, MIB as usize).unwrap(), vec![0; MIB as usize]);
        drop(client);
        rig.settles_at(0);
    }
    rig.end();
}

#[test]
fn a_large_write_that_finds_no_space_is_done_whole_later() {
    let (faulty, rig) = faulty();
    let mut client = rig.client(Style::Structured);
    let data = pattern(3 * MIB as usize + 5);
    // At its first change, and after some of it is done.
    for nth in 0..2 {
        faulty.arm(FaultPlan::nth(&FaultKind::SPACE, nth).no_space().lasting());
        let at = 8 * MIB * (nth + 1) + 777;
        let cookie = client.request(WRITE, 0, at, data.len() as u64, &data);
        eventually("parked", || rig.export.parked().requests >= 1);
        faulty.heal();
        rig.export.resume();
        assert_eq!(client.chunk(|_| 0).cookie, cookie);
        assert!(client.read(at, data.len()).unwrap() == data, "{nth}");
    }
    rig.end();
}
