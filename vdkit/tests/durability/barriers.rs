//! Syncs, reads and writes per operation.

use std::sync::Arc;

use vdkit::{GuestOffset, Storage};
use vdkit_testkit::CountingStorage;

use super::{SHAPES, Shape};

const PLAIN: Shape = Shape { options: "", backing: None };

fn counted(shape: &Shape) -> (Arc<CountingStorage>, vdkit::Disk) {
    let counting = CountingStorage::new(shape.image());
    let disk = shape.open(counting.clone() as Arc<dyn Storage>).unwrap();
    counting.reset();
    (counting, disk)
}

#[test]
fn many_allocating_writes_and_one_flush_cost_two_syncs() {
    for (writes, bytes) in [(1, 512), (1, 65536), (7, 4096), (48, 65536), (700, 4096)] {
        let (counting, disk) = counted(&PLAIN);
        for i in 0..writes {
            disk.write_at(&vec![1; bytes], GuestOffset(i * bytes as u64)).unwrap();
        }
        disk.flush().unwrap();
        let syncs = counting.counts().syncs;
        assert!(syncs <= 2, "{writes} writes of {bytes} bytes: {syncs} syncs");
    }
}

#[test]
fn small_clusters_grow_over_many_refcount_blocks_at_two_syncs_a_flush() {
    let (counting, disk) = counted(&Shape { options: "cluster_size=512", backing: None });
    for round in 0..3 {
        for i in 0..512 {
            disk.write_at(&[1; 2048], GuestOffset((round * 512 + i) * 2048)).unwrap();
        }
        disk.flush().unwrap();
    }
    let syncs = counting.counts().syncs;
    assert!(syncs <= 6, "{syncs} syncs for 3 flushes over 24 refcount blocks");
}

#[test]
fn once_space_is_reserved_a_flush_costs_one_sync() {
    let (counting, disk) = counted(&PLAIN);
    disk.write_at(&[1; 65536], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    for i in 1..10u64 {
        counting.reset();
        disk.write_at(&[1; 65536], GuestOffset(i << 16)).unwrap();
        disk.flush().unwrap();
        assert_eq!(counting.counts().syncs, 1, "flush {i}");
    }
}

#[test]
fn writes_in_place_cost_a_data_write_and_nothing_else() {
    for shape in SHAPES {
        let (counting, disk) = counted(shape);
        disk.write_at(&[1; 65536], GuestOffset(0)).unwrap();
        disk.flush().unwrap();
        counting.reset();
        for i in 0..100u64 {
            disk.write_at(&[2; 512], GuestOffset(i * 512)).unwrap();
        }
        let counts = counting.counts();
        assert_eq!((counts.reads, counts.writes, counts.syncs), (0, 100, 0), "{shape:?}");
        assert_eq!(counts.bytes_written, 51200, "{shape:?}");
        disk.flush().unwrap();
        assert_eq!(counting.counts().syncs, 1, "{shape:?}");
    }
}

#[test]
fn an_allocating_write_into_fresh_space_writes_its_own_bytes_only() {
    let (counting, disk) = counted(&PLAIN);
    disk.write_at(&[1; 4096], GuestOffset(0)).unwrap();
    counting.reset();
    disk.write_at(&[1; 4096], GuestOffset((5 << 16) + 8192)).unwrap();
    let counts = counting.counts();
    assert_eq!((counts.reads, counts.writes, counts.bytes_written), (0, 1, 4096));
    assert_eq!(counts.zeroes, 0);
}

#[test]
fn copying_from_a_backing_image_costs_two_syncs() {
    let (counting, disk) = counted(&Shape { options: "", backing: Some(3 << 20) });
    disk.write_at(&[1; 65536], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    counting.reset();
    for i in 1..20u64 {
        disk.write_at(&[1; 4096], GuestOffset(i << 16)).unwrap();
    }
    disk.flush().unwrap();
    // The copied data must be durable before the entries that expose it.
    assert_eq!(counting.counts().syncs, 2);
}
