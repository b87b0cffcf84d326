//! Costs of operations: syncs, reads, and whether runs stay contiguous.

mod common;

use std::sync::Arc;

use common::{MIB, create, disk_of, open_format, pattern};
use vdkit_block::{FormatDriver, GuestOffset, Limits, Place, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, Counts};
use vdkit_vhdx::VhdxDriver;

fn counted(size: u64, options: &str) -> (Arc<CountingStorage>, Arc<dyn Storage>) {
    let counting = CountingStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = counting.clone();
    create(&storage, size, options, None);
    counting.reset();
    (counting, storage)
}

fn opened(storage: &Arc<dyn Storage>) -> Disk {
    disk_of(open_format(storage, true).expect("opening"), true)
}

fn during(counting: &CountingStorage, work: impl FnOnce()) -> Counts {
    counting.reset();
    work();
    counting.counts()
}

#[test]
fn allocating_writes_and_a_flush_cost_one_sync_or_two() {
    let (counting, storage) = counted(1 << 30, "block_size=1M");
    let disk = opened(&storage);
    let write = |first: u64, count: u64| {
        for block in first..first + count {
            disk.write_at(&pattern(1, block * MIB, 5000), GuestOffset(block * MIB)).expect("write");
        }
        disk.flush().expect("flush");
    };
    // The session's header; data and the log's own entry; its header; the entry.
    assert_eq!(during(&counting, || write(0, 50)).syncs, 4);
    let mut syncs = Vec::new();
    for round in 1..100 {
        syncs.push(during(&counting, || write(round * 10, 10)).syncs);
    }
    assert!(syncs.iter().all(|n| *n <= 2), "{syncs:?}");
    assert!(syncs.iter().filter(|n| **n == 1).count() > 50, "mostly one: {syncs:?}");
    // No metadata change: only data.
    let again = during(&counting, || write(0, 50));
    assert_eq!((again.syncs, again.writes), (1, 50));
    let closing = during(&counting, || disk.close().expect("closing"));
    assert!(closing.syncs <= 5, "{closing:?}");
}

#[test]
fn emptying_the_log_costs_one_sync_more() {
    let (counting, storage) = counted(1 << 30, "block_size=1M");
    let disk = opened(&storage);
    let mut most = 0;
    let mut sum = 0;
    for block in 0..600u64 {
        disk.write_at(&[7; 512], GuestOffset(block * MIB)).expect("write");
        let syncs = during(&counting, || disk.flush().expect("flush")).syncs;
        if block > 0 {
            most = most.max(syncs);
            sum += syncs;
        }
    }
    assert_eq!(most, 3, "data, header, entry");
    assert!(sum < 600 * 5 / 4, "{sum} syncs for 599 flushes");
}

#[test]
fn describing_takes_a_bounded_number_of_reads() {
    for (options, size) in
        [("", 1 << 20), ("block_size=1M", 8 << 40), ("subformat=fixed", 64 * MIB)]
    {
        let (counting, storage) = counted(size, options);
        let reads = during(&counting, || {
            VhdxDriver.describe(&storage, &Limits::default()).expect("describing");
        });
        assert!(reads.reads <= 5 && reads.bytes_read < 400 << 10, "{reads:?}");
        // Opening reads no table either, whatever its length.
        let opening = during(&counting, || drop(opened(&storage)));
        assert!(opening.bytes_read < 1 << 20, "{opening:?}");
    }
}

#[test]
fn one_reservation_covers_many_blocks_in_one_piece() {
    let (_, storage) = counted(4 << 30, "");
    let format = open_format(&storage, true).expect("opening");
    let reservation = format.reserve(GuestOffset(MIB), 2 << 30).expect("space").expect("new");
    assert_eq!(reservation.write, MIB..MIB + (2 << 30));
    assert!(reservation.zeroed && reservation.untouched);
    reservation.publish().expect("publishing");
    let run = format.resolve(GuestOffset(MIB), 2 << 30).expect("a run");
    assert_eq!(run.len, 2 << 30);
    assert!(matches!(run.place, Place::Data { .. }));
}

#[test]
fn reservations_of_one_block_need_not_wait_for_each_other() {
    let (_, storage) = counted(64 * MIB, "block_size=32M");
    let format = open_format(&storage, true).expect("opening");
    let reserve = |at: u64| format.reserve(GuestOffset(at), 4096).expect("space").expect("new");
    let (first, second, third) = (reserve(0), reserve(MIB), reserve(2 * MIB));
    for (space, byte) in [(&first, 1), (&second, 2), (&third, 3)] {
        storage.write_at(&[byte; 4096], space.host).expect("writing");
    }
    second.publish().expect("publishing");
    // The block is published already, so bytes of the failed write may be read, as on any disk.
    drop(first);
    third.publish().expect("publishing");
    let disk = disk_of(format, true);
    for (at, allowed) in [(0, &[0, 1][..]), (MIB, &[2]), (2 * MIB, &[3]), (3 * MIB, &[0])] {
        let mut bytes = [9; 4096];
        disk.read_at(&mut bytes, GuestOffset(at)).expect("reading");
        assert!(allowed.iter().any(|byte| bytes == [*byte; 4096]), "{at:#x}: {}", bytes[0]);
    }
}

#[test]
fn discarded_blocks_are_given_back() {
    let (_, storage) = counted(64 * MIB, "block_size=1M");
    let disk = opened(&storage);
    disk.write_at(&vec![1; 32 << 20], GuestOffset(0)).expect("writing");
    disk.flush().expect("flushing");
    let full = storage.allocated_bytes().expect("allocated");
    disk.discard(GuestOffset(8 * MIB), 24 * MIB).expect("discarding");
    disk.flush().expect("flushing");
    assert!(storage.allocated_bytes().expect("allocated") <= full - 23 * MIB);
    disk.write_at(&vec![2; 4 << 20], GuestOffset(40 * MIB)).expect("writing");
    disk.close().expect("closing");
    // Header, log, metadata, table, 8 blocks, and 4 blocks in reused space.
    assert_eq!(storage.len().expect("length"), (4 + 8 + 4) * MIB);
    // Also without a write: 4 of the first 8 blocks, and the blocks at the end.
    let disk = opened(&storage);
    disk.discard(GuestOffset(4 * MIB), 60 * MIB).expect("discarding");
    disk.close().expect("closing");
    assert_eq!(storage.len().expect("length"), (4 + 4) * MIB);
}
