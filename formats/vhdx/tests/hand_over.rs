//! Hand-over of space from one owner to the next, step by step.

mod common;

use std::sync::Arc;

use common::{MIB, create, disk_of, open_format, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage, GatedStorage};

/// A new file has headers, log, metadata and the block allocation table, 1 MiB each.
const TABLE: std::ops::Range<u64> = 3 * MIB..4 * MIB;

/// The entry of a discarded block is removed from the file, but the commit that removed it has not
/// ended. Meanwhile, the first allocation since opening searches for gaps between blocks. The
/// block's space is not a gap: the end of the commit frees it.
#[test]
fn a_block_whose_entry_is_just_being_removed_is_not_found_as_a_gap() {
    let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&memory, 8 * MIB, "block_size=1M", None);
    let disk = disk_of(open_format(&memory, true).expect("opening"), true);
    disk.write_at(&vec![1; 2 << 20], GuestOffset(0)).expect("writing");
    disk.close().expect("closing");
    let gated = GatedStorage::new(memory.clone());
    let storage: Arc<dyn Storage> = gated.clone();
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    disk.discard(GuestOffset(0), MIB).expect("discarding");
    let removed = |offset| TABLE.contains(&offset);
    gated.hold(move |call| call.kind == FaultKind::Write && call.done && removed(call.offset));
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| disk.flush());
        gated.reached();
        disk.write_at(&[2; 4096], GuestOffset(4 * MIB)).expect("writing");
        gated.release();
        flush.join().expect("no panic").expect("flushing");
    });
    disk.flush().expect("flushing");
    let mut bytes = [0; 4096];
    disk.read_at(&mut bytes, GuestOffset(4 * MIB)).expect("reading");
    assert!(bytes == [2; 4096], "another owner's space was given back");
    disk.close().expect("closing");
    sound(&memory, false, "closed");
}

/// Two writes share a new block. One of them has written its bytes, and fails to publish. A third
/// reservation at the same place must get space that reads as zero.
#[test]
fn bytes_of_a_write_that_could_not_be_published_are_not_taken_for_zeroes() {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    let size = 256 << 30;
    create(&storage, size, "block_size=1M", None);
    let format = open_format(&storage, true).expect("opening");
    let reserve = |at: u64| format.reserve(GuestOffset(at), 4096).expect("space").expect("new");
    let (first, second) = (reserve(0), reserve(MIB / 2));
    storage.write_at(&[1; 4096], first.host).expect("writing");
    // Evicts the page with the block's entry: there are more pages than the cache holds.
    for at in (MIB..size).step_by(512 << 20) {
        format.resolve(GuestOffset(at), 1).expect("a place");
    }
    faulty.arm(FaultPlan::nth(&[FaultKind::Read], 0));
    first.publish().expect_err("its entry cannot be read");
    faulty.heal();
    let third = reserve(0);
    assert!(third.zeroed);
    third.publish().expect("publishing");
    second.publish().expect("publishing");
    let mut bytes = [9; 4096];
    disk_of(format, true).read_at(&mut bytes, GuestOffset(0)).expect("reading");
    assert!(bytes == [0; 4096], "bytes of a failed write where zeroes were promised");
}
