//! Resizes for which the block allocation table needs another MiB or one more entry at its end.

mod common;

use std::sync::Arc;

use common::{disk_of, open_format, parent_ref, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::trials::{Resizes, Trial};
use vdkit_testbase::units::{GIB, MIB};
use vdkit_testbase::{CrashStorage, FaultKind, Rng};
use vdkit_vhdx::VhdxDriver;

const fn trial(options: &'static str, guest_bytes: u64) -> Trial {
    Trial::new(&VhdxDriver, options, guest_bytes)
}

/// A table of 1 MiB has 131,072 entries, including those of sector bitmaps.
const TABLES: Resizes<'_> = Resizes::new(
    trial("block_size=1M", 100 * GIB),
    &[126 * GIB, 130_976 * MIB, 131_041 * MIB, 131_042 * MIB, 3 * GIB, 300 * GIB],
);
const LARGE_BLOCKS: Resizes<'_> = Resizes::new(
    trial("block_size=8M", 1000 * GIB),
    &[1021 * GIB, 1022 * GIB, 5 * MIB, 2000 * GIB],
);
const SMALL: Resizes<'_> = Resizes::new(
    trial("block_size=1M", 4 * MIB + 512),
    &[7 * MIB, 3 * MIB + 1024, MIB, 12 * MIB, 2 * MIB],
);
const FIXED: Resizes<'_> =
    Resizes { trial: trial("block_size=1M,subformat=fixed", 4 * MIB + 512), ..SMALL };

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    [TABLES, LARGE_BLOCKS, SMALL, FIXED].iter().for_each(Resizes::models);
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    SMALL.beside_requests(8, 1);
    FIXED.beside_requests(4, 2);
    Resizes { sizes: &[200 * GIB, 3 * GIB, 300 * GIB], ..TABLES }.beside_requests(1, 3);
}

#[test]
fn a_resize_and_requests_wait_for_each_other() {
    let moved = Resizes { sizes: &[200 * GIB], ..TABLES };
    [SMALL, FIXED, moved].iter().for_each(Resizes::waits_for_a_write);
    Resizes { sizes: &[2 * MIB], ..SMALL }.waits_for_a_write();
    [SMALL, moved].iter().for_each(Resizes::waits_for_a_guard);
}

#[test]
fn a_resize_may_fail_at_any_call() {
    let moved = Resizes { sizes: &[126 * GIB, 200 * GIB, 3 * GIB], ..TABLES };
    [moved, SMALL, FIXED].iter().for_each(|images| images.all_faults(&FaultKind::SPACE));
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    SMALL.power_cut(3);
    FIXED.power_cut(4);
    Resizes { sizes: &[126 * GIB, 200 * GIB, 3 * GIB], ..TABLES }.power_cut(5);
}

/// The table of an image without a parent ends with a block's entry. The region may end there too,
/// and guest data follows it.
#[test]
fn growing_clears_no_guest_data_behind_the_table() {
    for (options, old, new) in [
        ("block_size=1M", 100 * GIB, 126 * GIB),
        ("block_size=8M", 1000 * GIB, 1021 * GIB),
        ("block_size=1M,logical_sector_size=4096", 100 * GIB, 127 * GIB),
    ] {
        let trial = Trial { options, guest_bytes: old, ..TABLES.trial };
        let crash = CrashStorage::holding(&trial.image());
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = trial.open(&storage, true).unwrap();
        let write = |byte: u8| disk.write_at(&[byte; 8192], GuestOffset(0)).unwrap();
        let look = |disk: &Disk, byte: u8, what: &str| {
            let mut bytes = [0xee; 8192];
            disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
            assert_eq!(bytes.iter().find(|found| **found != byte), None, "{options}, {what}");
        };
        write(0xaa);
        disk.flush().unwrap();
        disk.resize(new).unwrap();
        look(&disk, 0xaa, "live");
        // A replay of the log restores no old guest data.
        write(0xbb);
        disk.flush().unwrap();
        let killed: Arc<dyn Storage> = Arc::new(crash.crash_now().everything());
        look(&trial.open(&killed, true).unwrap(), 0xbb, "replayed");
        disk.close().unwrap();
        look(&trial.open(&storage, false).unwrap(), 0xbb, "closed");
        sound(&storage, false, options);
    }
}

/// The old place of a moved table is a hole in the file, and the check does not report it.
#[test]
fn a_table_that_moves_leaves_no_leak() {
    let storage: Arc<dyn Storage> = Arc::new(TABLES.trial.image());
    let disk = TABLES.trial.open(&storage, true).unwrap();
    disk.write_at(&[1; 4096], GuestOffset(0)).unwrap();
    disk.resize(300 * GIB).unwrap();
    disk.close().unwrap();
    sound(&storage, false, "the table has moved");
}

fn child(size: u64) -> Arc<CrashStorage> {
    let made: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    common::create(&made, size, "block_size=1M", Some(parent_ref()));
    CrashStorage::holding(&*made)
}

fn open(storage: &Arc<dyn Storage>) -> Disk {
    disk_of(open_format(storage, true).expect("opening"), true)
}

/// With a parent each chunk of 4 GiB has a sector bitmap: those of removed chunks are freed.
#[test]
fn a_child_that_is_made_smaller_leaves_no_sector_bitmap_behind() {
    let storage: Arc<dyn Storage> = child(20 * GIB);
    let disk = open(&storage);
    for at in [0, 5 * GIB, 9 * GIB, 19 * GIB] {
        disk.write_at(&[7; 512], GuestOffset(at + 4096)).unwrap();
    }
    disk.flush().unwrap();
    disk.resize(6 * GIB).unwrap();
    disk.close().unwrap();
    drop(disk);
    sound(&storage, false, "made smaller");
    let disk = open(&storage);
    disk.resize(20 * GIB).unwrap();
    let mut bytes = [0xee; 512];
    for (at, byte) in [(0, 7), (5 * GIB, 7), (9 * GIB, 0), (19 * GIB, 0)] {
        disk.read_at(&mut bytes, GuestOffset(at + 4096)).unwrap();
        assert_eq!(bytes, [byte; 512], "{at:#x}");
        disk.write_at(&[8; 512], GuestOffset(at)).unwrap();
        disk.read_at(&mut bytes, GuestOffset(at + 4096)).unwrap();
        assert_eq!(bytes, [byte; 512], "{at:#x}, beside a write");
    }
    disk.close().unwrap();
    sound(&storage, false, "grown again");
}

/// The log still has pages of a sector bitmap whose space becomes a block: a replay must not write
/// them over guest data.
#[test]
fn a_replay_writes_no_old_sector_bitmap_over_a_new_block() {
    for shrink in [false, true] {
        let crash = child(9 * GIB);
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = open(&storage);
        // Three sector bitmaps with one block each.
        for at in [0, 4 * GIB, 8 * GIB] {
            disk.write_at(&[7; 512], GuestOffset(at + 4096)).unwrap();
        }
        disk.flush().unwrap();
        if shrink {
            disk.resize(3 * GIB).unwrap();
        } else {
            disk.top().empty().unwrap();
        }
        disk.flush().unwrap();
        // Whole blocks, in all of the freed space.
        let (at, bytes) = (GuestOffset(16 * MIB), vec![0x99; 8 * MIB as usize]);
        disk.write_at(&bytes, at).unwrap();
        disk.flush().unwrap();
        let mut rng = Rng::new(1);
        let now = crash.crash_now();
        for killed in [now.everything(), now.only_durable(), now.survivor(&mut rng)] {
            let storage: Arc<dyn Storage> = Arc::new(killed);
            let mut found = vec![0; bytes.len()];
            open(&storage).read_at(&mut found, at).unwrap();
            let strange = found.iter().position(|byte| *byte != 0x99);
            assert_eq!(strange, None, "shrunk: {shrink}");
        }
    }
}

#[test]
fn a_close_and_requests_wait_for_each_other() {
    Resizes::new(trial("block_size=1M", 16 * MIB), &[]).a_close_waits_for_a_write();
}
