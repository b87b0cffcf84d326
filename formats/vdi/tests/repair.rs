//! The check finds each kind of damage, a repair fixes it, and compaction loses nothing.

mod support;

use std::sync::Arc;

use support::{DYNAMIC, Shared, entry, field, get, put, written};
use vdkit_block::{CompactOptions, Compaction, GuestOffset, HostOffset, OfflineImage, Repair};
use vdkit_testbase::copy_of;
use vdkit_testbase::trials::Trial;
use vdkit_vdi::VdiDriver;

fn repaired(storage: &Shared) {
    DYNAMIC.found(storage, Repair::All);
    assert_eq!(DYNAMIC.found(storage, Repair::Nothing), (0, 0));
    let end = u64::from(get(storage, field::DATA));
    let blocks = u64::from(get(storage, field::ALLOCATED));
    assert_eq!(storage.len().unwrap(), end + (blocks << 20));
}

#[test]
fn a_count_that_is_too_small_is_damage_and_one_that_is_too_large_a_leak() {
    let storage = written();
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
    put(&storage, field::ALLOCATED, 3);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (1, 0));
    assert_eq!(DYNAMIC.found(&storage, Repair::Leaks), (1, 0));
    assert_eq!(get(&storage, field::ALLOCATED), 3);
    repaired(&storage);
    put(&storage, field::ALLOCATED, 6);
    assert_eq!(DYNAMIC.found(&storage, Repair::Leaks), (0, 1));
    assert_eq!(get(&storage, field::ALLOCATED), 4);
}

#[test]
fn the_second_of_two_entries_to_a_block_gets_a_copy() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    put(&storage, entry(&storage, 3), get(&storage, entry(&storage, 1)));
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing).0, 1);
    repaired(&storage);
    let after = DYNAMIC.content(&storage);
    assert_eq!(after[1 << 20..2 << 20], before[1 << 20..2 << 20]);
    assert_eq!(after[3 << 20..4 << 20], before[1 << 20..2 << 20]);
    assert_eq!(after[5 << 20..], before[5 << 20..]);
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_at(&[9; 512], GuestOffset(3 << 20)).unwrap();
    disk.close().unwrap();
    assert_eq!(DYNAMIC.content(&storage)[1 << 20..2 << 20], before[1 << 20..2 << 20]);
}

#[test]
fn an_entry_beyond_the_end_is_told_and_taken_away() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    put(&storage, entry(&storage, 4), 77);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing).0, 1);
    let disk = DYNAMIC.open(&storage, false).unwrap();
    let error = disk.read_at(&mut [0; 10], GuestOffset(4 << 20)).unwrap_err();
    assert!(error.to_string().contains("within the file"), "{error}");
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR));
    let error = DYNAMIC.open(&storage, true).unwrap_err().to_string();
    assert!(error.contains("block table entry"), "{error}");
    repaired(&storage);
    assert_eq!(DYNAMIC.content(&storage), before);
}

#[test]
fn a_gap_is_a_leak_that_a_repair_closes() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    // The second block of the file becomes a leak.
    put(&storage, entry(&storage, 1), u32::MAX);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 1));
    assert_eq!(DYNAMIC.found(&storage, Repair::Leaks), (0, 1));
    repaired(&storage);
    let after = DYNAMIC.content(&storage);
    assert_eq!(after[2 << 20..], before[2 << 20..]);
    assert_eq!(get(&storage, field::ALLOCATED), 3);
}

#[test]
fn a_file_that_ends_within_a_block_is_made_whole() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    storage.set_len(storage.len().unwrap() - 200_000).unwrap();
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (1, 0));
    repaired(&storage);
    // The end of the last block was zero.
    assert_eq!(DYNAMIC.content(&storage), before);
}

fn compact(storage: &Shared, zero_scan: bool) -> vdkit_block::CompactReport {
    VdiDriver
        .compact(&OfflineImage::new(storage), CompactOptions::default().zero_scan(zero_scan))
        .unwrap()
}

#[test]
fn compaction_drops_blocks_of_zeroes_and_moves_the_rest_together() {
    let storage = written();
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_zeroes(GuestOffset(1 << 20), 1 << 20, false).unwrap();
    disk.discard(GuestOffset(5 << 20), 1 << 20).unwrap();
    disk.close().unwrap();
    let before = DYNAMIC.content(&storage);
    let report = compact(&storage, true);
    assert_eq!((report.zero_clusters, report.moved_clusters), (2, 2));
    assert_eq!(report.length_before - report.length_after, 2 << 20);
    assert_eq!(DYNAMIC.content(&storage), before);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
    assert_eq!(compact(&storage, true).moved_clusters, 0);
}

#[test]
fn a_power_cut_while_compacting_loses_nothing() {
    let storage = written();
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_zeroes(GuestOffset(5 << 20), 1 << 20, false).unwrap();
    disk.write_zeroes(GuestOffset(1 << 20), 1 << 20, false).unwrap();
    disk.close().unwrap();
    let report = DYNAMIC.cut_in_compaction(&*storage);
    assert_eq!((report.zero_clusters, report.moved_clusters), (2, 2));
}

/// The blocks of a static image keep their places; zeroes in them become holes.
#[test]
fn compacting_a_static_image_punches_holes() {
    let image = Trial { options: "static=on", ..DYNAMIC };
    let storage: Shared = Arc::new(image.image());
    let disk = image.open(&storage, true).unwrap();
    disk.write_at(&vec![7; 2 << 20], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let first = HostOffset(get(&storage, field::DATA).into());
    storage.write_at(&vec![0; 1 << 20], first).unwrap();
    let (len, before) = (storage.len().unwrap(), DYNAMIC.content(&storage));
    for (zero_scan, freed) in [(false, 0), (true, 1 << 20)] {
        let options = CompactOptions::default().zero_scan(zero_scan);
        let report = VdiDriver.compact(&OfflineImage::new(&storage), options).unwrap();
        assert_eq!(report.moved_clusters, 0);
        assert_eq!(report.allocated_before - report.allocated_after, freed);
        assert_eq!(storage.len().unwrap(), len);
        assert!(DYNAMIC.content(&storage) == before);
    }
}

/// The first blocks move to the end, the table overwrites their places, and the header switches.
#[test]
fn a_power_cut_while_the_table_grows_loses_nothing() {
    let storage = written();
    // A table that ends directly before the blocks, as in QEMU's images.
    let data_at = get(&storage, field::DATA);
    let room = data_at - 512;
    let large = u64::from(room / 4 + 1) << 20;
    let (crash, [old, new]) = DYNAMIC.cut_in_growth(&*storage, large);
    assert!(old > 5 && new > 0, "{old} {new}");
    let whole: Shared = Arc::new(crash.crash_now().everything());
    assert_eq!(DYNAMIC.found(&whole, Repair::Nothing), (0, 0));
    assert_eq!(get(&whole, field::DATA), data_at + (1 << 20));
}

#[test]
fn repairing_at_random_always_ends_in_a_sound_image() {
    let sound = written();
    let mut rng = vdkit_testbase::Rng::new(21);
    for round in 0..60 {
        let storage = copy_of(&sound);
        for _ in 0..1 + rng.below(4) {
            let block = rng.below(8);
            let word = [0, 1, 2, 3, 4, 9, 0xffff_fffe, u32::MAX][rng.below(8) as usize];
            put(&storage, entry(&storage, block), word);
        }
        if rng.chance(1, 3) {
            put(&storage, field::ALLOCATED, rng.below(9) as u32);
        }
        DYNAMIC.found(&storage, Repair::All);
        assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0), "round {round}");
        let disk = DYNAMIC.open(&storage, true).unwrap();
        disk.write_at(&vec![3; 8 << 20], GuestOffset(0)).unwrap();
        disk.close().unwrap();
        assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0), "round {round}");
        assert!(DYNAMIC.content(&storage).iter().all(|byte| *byte == 3), "round {round}");
    }
}
