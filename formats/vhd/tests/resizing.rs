//! Resizes that grow tables by a sector, move them after the blocks or back, and move footers.

mod support;

use std::sync::Arc;

use support::{DYNAMIC, FIXED, STRIDE, Shared, TABLE, create_over, get, put, written};
use vdkit_block::{
    CompactOptions, Compaction, FormatDriver, GuestOffset, HostOffset, Limits, OfflineImage, Repair,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::trials::{Cut, Resizes, Trial};
use vdkit_testbase::units::{GIB, MIB};
use vdkit_testbase::{CrashStorage, FaultKind};
use vdkit_vhd::VhdDriver;

/// The table has 128 entries per sector: it moves with each additional sector.
const TABLES: Resizes<'_> = Resizes::new(
    Trial { guest_bytes: 200 * MIB, ..DYNAMIC },
    &[256 * MIB, 300 * MIB, 301 * MIB, 40 * MIB, GIB, 3 * MIB, 258 * MIB],
);
/// Sizes are rounded up to a CHS geometry.
const ROUNDED: Resizes<'_> = Resizes::new(
    Trial { options: "", guest_bytes: 20 * MIB, ..DYNAMIC },
    &[300 * MIB, 7 * MIB, 600 * GIB, 256 * MIB],
);
const FIXED_SIZES: Resizes<'_> = Resizes {
    cut: Cut::CutOff,
    ..Resizes::new(FIXED, &[2 * MIB + 512, 3 * MIB, MIB + 1024, 5 * MIB, MIB])
};

#[test]
fn other_sizes_equal_the_model_live_and_offline() {
    [TABLES, ROUNDED, FIXED_SIZES].iter().for_each(Resizes::models);
}

#[test]
fn requests_beside_resizes_lose_nothing() {
    TABLES.beside_requests(4, 1);
    ROUNDED.beside_requests(2, 2);
    FIXED_SIZES.beside_requests(8, 3);
}

#[test]
fn a_resize_and_requests_wait_for_each_other() {
    [TABLES, ROUNDED].iter().for_each(Resizes::waits_for_a_write);
    [TABLES, ROUNDED].iter().for_each(Resizes::waits_for_a_guard);
    TABLES.a_close_waits_for_a_write();
    Resizes { sizes: &[40 * MIB], ..TABLES }.waits_for_a_write();
    // The write would take the place of the footer, or lengthen the file.
    Resizes { sizes: &[MIB], ..FIXED_SIZES }.waits_for_a_write();
}

#[test]
fn a_resize_may_fail_at_any_call() {
    TABLES.all_faults(&FaultKind::SPACE);
    // A file can be truncated on a full disk.
    FIXED_SIZES.all_faults(&FaultKind::SPACE[..3]);
}

#[test]
fn a_power_cut_in_a_resize_leaves_one_of_both_sizes() {
    let few = Resizes { sizes: &[300 * MIB, 301 * MIB, 40 * MIB, GIB], ..TABLES };
    few.power_cut(3);
}

/// A crash between the two footers with the smaller size and the header with fewer entries.
#[test]
fn growing_after_an_interrupted_shrink_shows_no_old_data() {
    let trial = Trial { guest_bytes: 16 * MIB, ..DYNAMIC };
    let images = Resizes::new(trial, &[5 * MIB + 512, 16 * MIB]);
    images.power_cut(5);
}

/// Also if the file has its new length without the new footer: the old footer is found as the last
/// data of the file.
#[test]
fn a_power_cut_leaves_no_old_footer_in_a_fixed_disk_that_grows() {
    for seed in 7..15 {
        FIXED_SIZES.power_cut(seed);
    }
}

/// The table moves after the first block, and new blocks follow the table: not at the old block
/// positions, for which the footer was placed.
#[test]
fn a_footer_written_ahead_is_not_shown_to_the_guest() {
    let trial = Trial { guest_bytes: 200 * MIB, ..DYNAMIC };
    let storage: Shared = Arc::new(trial.image());
    let disk = trial.open(&storage, true).unwrap();
    disk.write_at(&[1; 512], GuestOffset(0)).unwrap();
    disk.resize(300 * MIB).unwrap();
    for block in 1..150 {
        disk.write_at(&[2; 512], GuestOffset(block * 2 * MIB)).unwrap();
    }
    let look = |disk: &vdkit_chain::Disk| {
        let mut bytes = vec![0xee; 2 * MIB as usize];
        for block in 0..150 {
            disk.read_at(&mut bytes, GuestOffset(block * 2 * MIB)).unwrap();
            let first = if block == 0 { 1 } else { 2 };
            assert!(bytes[..512].iter().all(|byte| *byte == first), "block {block}");
            let strange = bytes[512..].iter().position(|byte| *byte != 0);
            assert_eq!(strange, None, "block {block}");
        }
    };
    look(&disk);
    disk.close().unwrap();
    look(&trial.open(&storage, false).unwrap());
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
}

/// A moved table is after blocks that a later shrink removes: new blocks are before the table, and
/// the footer that is written ahead of them must not overwrite it.
#[test]
fn a_footer_written_ahead_is_not_put_into_a_moved_table() {
    let trial = Trial { guest_bytes: 128 * MIB, ..DYNAMIC };
    let crash = CrashStorage::holding(&trial.image());
    let storage: Shared = crash.clone();
    let disk = trial.open(&storage, true).unwrap();
    for block in (0..64).step_by(2) {
        disk.write_at(&[block as u8 + 1; 512], GuestOffset(block * 2 * MIB)).unwrap();
    }
    disk.resize(300 * MIB).unwrap();
    disk.resize(64 * MIB).unwrap();
    for block in (1..32).step_by(2) {
        disk.write_at(&[block as u8 + 1; 512], GuestOffset(block * 2 * MIB)).unwrap();
        let killed: Shared = Arc::new(crash.crash_now().everything());
        assert_eq!(DYNAMIC.found(&killed, Repair::Nothing).0, 0, "block {block}");
    }
    disk.close().unwrap();
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
    let disk = trial.open(&storage, false).unwrap();
    let mut bytes = [0xee; 1024];
    for block in 0..32 {
        disk.read_at(&mut bytes, GuestOffset(block * 2 * MIB)).unwrap();
        assert!(bytes[..512].iter().all(|byte| *byte == block as u8 + 1), "block {block}");
        assert!(bytes[512..].iter().all(|byte| *byte == 0), "block {block}");
    }
}

/// A live resize on a full disk: the tables and footers that it had written are where the next
/// blocks go, so that space must not count as never written.
#[test]
fn a_live_growth_without_space_leaves_no_table_bytes_to_the_guest() {
    let places = [2, 4, 6, 8, 10].map(|at| at * MIB + 1024);
    TABLES.trial.growth_without_space(600 * GIB, &places);
}

/// The table of a 511 GiB disk ends at 1 MiB, and the parent's name is after it.
#[test]
fn the_name_of_a_large_images_parent_is_not_written_over() {
    let large = Trial { guest_bytes: 600 * GIB, ..DYNAMIC };
    let base: Shared = Arc::new(large.image());
    let child: Shared = Arc::new(MemoryStorage::new("child"));
    create_over(&child, &base, "sub/base.vhd").unwrap();
    let name = || VhdDriver.describe(&child, &Limits::default()).unwrap().backing_file;
    assert_eq!(name().as_deref(), Some("sub/base.vhd"));
    let open = || large.open(&child, true).unwrap().over(large.open(&base, false).unwrap());
    let disk = open();
    for block in [7, 3, 250_000] {
        disk.write_at(&[0x22; 65536], GuestOffset(block * 2 * MIB)).unwrap();
    }
    disk.close().unwrap();
    assert_eq!(name().as_deref(), Some("sub/base.vhd"));
    let options = CompactOptions::default().zero_scan(true);
    VhdDriver.compact(&OfflineImage::new(&child), options).unwrap();
    assert_eq!(name().as_deref(), Some("sub/base.vhd"));
    assert_eq!(DYNAMIC.found(&child, Repair::Nothing), (0, 0));
    let disk = open();
    let mut bytes = vec![0; 65536];
    for block in [7, 3, 250_000] {
        disk.read_at(&mut bytes, GuestOffset(block * 2 * MIB)).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0x22), "block {block}");
    }
}

/// Other programs may store the name after blocks. No block or footer may overwrite it.
#[test]
fn a_name_between_blocks_or_at_the_end_is_not_written_over() {
    for between in [false, true] {
        let base = written();
        let child: Shared = Arc::new(MemoryStorage::new("child"));
        create_over(&child, &base, "base.vhd").unwrap();
        let open = || DYNAMIC.open(&child, true).unwrap().over(DYNAMIC.open(&base, false).unwrap());
        let disk = open();
        for block in [4, 1, 6] {
            disk.write_at(&[0x33; 512], GuestOffset(block * 2 * MIB)).unwrap();
        }
        disk.close().unwrap();
        // The name, of one sector, is now after the three blocks, and the footer after the name.
        let mut name = [0; 512];
        child.read_at(&mut name, HostOffset(2048)).unwrap();
        child.write_at(&[0; 512], HostOffset(2048)).unwrap();
        let end = child.len().unwrap() - 512;
        let mut footer = [0; 512];
        child.read_at(&mut footer, HostOffset(end)).unwrap();
        child.write_at(&name, HostOffset(end)).unwrap();
        child.write_at(&footer, HostOffset(end + 512)).unwrap();
        put(&child, support::HEADER + 576 + 20, end as u32);
        support::sum(&child, support::HEADER, 1024, 36);
        let told = || VhdDriver.describe(&child, &Limits::default()).unwrap().backing_file;
        assert_eq!(told().as_deref(), Some("base.vhd"));
        if between {
            let disk = open();
            disk.write_at(&[0x44; 512], GuestOffset(0)).unwrap();
            disk.close().unwrap();
            // Removes block 4, which leaves a gap before the name.
            let entry = support::TABLE + 4 * 4;
            put(&child, entry, u32::MAX);
        }
        let options = CompactOptions::default().zero_scan(true);
        VhdDriver.compact(&OfflineImage::new(&child), options).unwrap();
        assert_eq!(told().as_deref(), Some("base.vhd"), "{between}");
        DYNAMIC.found(&child, Repair::All);
        assert_eq!(told().as_deref(), Some("base.vhd"), "{between}");
        assert_eq!(DYNAMIC.found(&child, Repair::Nothing).0, 0, "{between}");
        let disk = open();
        disk.write_at(&vec![0x55; 3 * STRIDE as usize], GuestOffset(8 * MIB)).unwrap();
        disk.close().unwrap();
        assert_eq!(told().as_deref(), Some("base.vhd"), "{between}");
    }
}

/// Virtual PC before 2004 omitted the last byte of the footer.
#[test]
fn growing_with_a_footer_of_511_bytes_keeps_the_guests_last_byte() {
    for size in [2 * MIB + 512, 4 * MIB] {
        let storage: Shared = Arc::new(FIXED.image());
        storage.write_at(&[0x5a; 2 << 20], HostOffset(0)).unwrap();
        storage.set_len(storage.len().unwrap() - 1).unwrap();
        let disk = FIXED.open(&storage, true).unwrap();
        disk.resize(size).unwrap();
        disk.close().unwrap();
        let disk = FIXED.open(&storage, false).unwrap();
        let mut bytes = vec![0xee; size as usize];
        disk.read_at(&mut bytes, GuestOffset(0)).unwrap();
        assert!(bytes[..2 << 20].iter().all(|byte| *byte == 0x5a), "{size}");
        assert!(bytes[2 << 20..].iter().all(|byte| *byte == 0), "{size}");
        assert_eq!(storage.len().unwrap(), size + 512);
    }
}

/// Only the file's length survives of a growth: the disk has its old size, a check reports the
/// cause and truncates the file after its footer, as does opening it for writing.
#[test]
fn a_fixed_disk_whose_new_footer_was_lost_is_found_again() {
    for gap in [512, 1 << 20, 1 << 40] {
        let storage: Shared = Arc::new(FIXED.image());
        let disk = FIXED.open(&storage, true).unwrap();
        disk.write_at(&[0x5a; 4096], GuestOffset(2 * MIB - 4096)).unwrap();
        disk.close().unwrap();
        let len = storage.len().unwrap();
        storage.set_len(len + gap).unwrap();
        let look = |writable: bool| {
            let disk = FIXED.open(&storage, writable).unwrap();
            assert_eq!(disk.guest_bytes(), 2 * MIB);
            let mut bytes = [0; 4096];
            disk.read_at(&mut bytes, GuestOffset(2 * MIB - 4096)).unwrap();
            assert_eq!(bytes, [0x5a; 4096]);
            disk.warnings().any(|warning| warning.contains("power cut"))
        };
        assert!(look(false));
        assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 1));
        if gap == 512 {
            assert!(look(true));
        } else {
            DYNAMIC.found(&storage, Repair::Leaks);
        }
        assert_eq!(
            (DYNAMIC.found(&storage, Repair::Nothing), storage.len().unwrap()),
            ((0, 0), len)
        );
        assert!(!look(true));
    }
}

/// A growth would zero the rest of the last block, which another entry names too.
#[test]
fn an_image_with_a_block_of_two_entries_keeps_its_size() {
    let storage = written();
    let disk = DYNAMIC.open(&storage, true).expect("opening");
    disk.resize(15 * MIB).expect("a smaller disk");
    disk.close().expect("closing");
    put(&storage, TABLE + 7 * 4, get(&storage, TABLE + 4));
    let before = DYNAMIC.content(&storage);
    for size in [16 * MIB, 64 * GIB, 4 * MIB] {
        let disk = DYNAMIC.open(&storage, true).expect("opening");
        let error = disk.resize(size).expect_err("refused");
        assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR), "{error}");
        assert!(error.to_string().contains("expected a block of its own"), "{error}");
        disk.close().expect("closing");
        assert!(DYNAMIC.content(&storage) == before, "{size}");
    }
    DYNAMIC.found(&storage, Repair::All);
    let disk = DYNAMIC.open(&storage, true).expect("opening");
    disk.resize(16 * MIB).expect("mended");
    disk.close().expect("closing");
    assert!(DYNAMIC.content(&storage).starts_with(&before));
}
