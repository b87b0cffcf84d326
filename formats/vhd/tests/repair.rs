//! The check finds each kind of damage, a repair fixes it, and compaction loses nothing; also tests
//! the requirements of Azure.

mod support;

use std::sync::Arc;

use support::{BLOCKS, DYNAMIC, FIXED, HEADER, STRIDE, Shared, TABLE, get, put, sum, written};
use vdkit_block::{FormatDriver, GuestOffset, HostOffset, Probe, Repair};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, Rng, copy_of};
use vdkit_vhd::{VhdDriver, azure_faults};

fn bytes(storage: &Shared) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(&mut bytes, HostOffset(0)).unwrap();
    bytes
}

fn repaired(storage: &Shared) {
    DYNAMIC.found(storage, Repair::All);
    assert_eq!(DYNAMIC.found(storage, Repair::Nothing), (0, 0));
}

#[test]
fn either_footer_is_made_from_the_other() {
    let sound = written();
    let before = DYNAMIC.content(&sound);
    let end = sound.len().unwrap() - 512;
    for at in [0, 40, end, end + 66] {
        let storage = copy_of(&sound);
        storage.write_at(&[0x99; 3], HostOffset(at)).unwrap();
        assert!(DYNAMIC.content(&storage) == before, "{at}");
        let disk = DYNAMIC.open(&storage, false).unwrap();
        assert_eq!(disk.warnings().count(), 1, "{at}");
        assert_ne!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0), "{at}");
        repaired(&storage);
        assert!(DYNAMIC.content(&storage) == before, "{at}");
        let (mut front, mut back) = ([0; 512], [0; 512]);
        storage.read_at(&mut front, HostOffset(0)).unwrap();
        storage.read_at(&mut back, HostOffset(end)).unwrap();
        assert_eq!(front, back);
    }
    let storage = copy_of(&sound);
    storage.write_at(&[0; 512], HostOffset(0)).unwrap();
    storage.write_at(&[0; 512], HostOffset(end)).unwrap();
    assert!(DYNAMIC.open(&storage, false).unwrap_err().to_string().contains("footer"));
}

/// New blocks overwrite the footer at the end, so a writer restores the copy at the start first.
#[test]
fn a_power_cut_leaves_a_footer_where_the_copy_was_damaged() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    storage.write_at(&[0x99; 3], HostOffset(0)).unwrap();
    let crash = CrashStorage::holding(&*storage);
    let disk = DYNAMIC.open(&(crash.clone() as Shared), true).unwrap();
    disk.write_at(&[7; 4096], GuestOffset(0)).unwrap();
    disk.flush().unwrap();
    disk.close().unwrap();
    let mut rng = Rng::new(1);
    crash.for_each_crash(|ops, image| {
        for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
            let after = DYNAMIC.content(&(Arc::new(survivor) as Shared));
            assert!(after[4096..] == before[4096..], "after {ops} changes");
        }
    });
}

/// Readers expect the footer in the last sector of a device.
#[test]
fn a_resize_on_a_device_changes_the_footer_at_its_end() {
    let device = MemoryStorage::with_len("device", 64 << 20).fixed_len();
    let storage: Shared = Arc::new(device);
    DYNAMIC.create(&storage);
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_at(&[7; 4096], GuestOffset(0)).unwrap();
    disk.resize(40 << 20).unwrap();
    disk.close().unwrap();
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
    assert_eq!(DYNAMIC.open(&storage, false).unwrap().warnings().count(), 0);
}

#[test]
fn a_wrong_sum_of_the_dynamic_header_is_told_and_mended() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    put(&storage, HEADER + 36, 7);
    let error = DYNAMIC.open(&storage, false).unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR));
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (1, 0));
    repaired(&storage);
    assert!(DYNAMIC.content(&storage) == before);
}

#[test]
fn the_second_of_two_entries_to_a_block_gets_a_copy() {
    let storage = written();
    let before = DYNAMIC.content(&storage);
    put(&storage, TABLE + 3 * 4, get(&storage, TABLE + 4));
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing).0, 1);
    repaired(&storage);
    let after = DYNAMIC.content(&storage);
    assert_eq!(after[2 << 20..4 << 20], before[2 << 20..4 << 20]);
    assert_eq!(after[6 << 20..8 << 20], before[2 << 20..4 << 20]);
    // A partial overlap is the same damage.
    put(&storage, TABLE + 4 * 4, get(&storage, TABLE + 4) + 9);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing).0, 1);
    repaired(&storage);
    assert_eq!(DYNAMIC.content(&storage)[2 << 20..8 << 20], after[2 << 20..8 << 20]);
}

#[test]
fn entries_outside_of_the_file_and_into_headers_are_taken_away() {
    for word in [0, 1, 3, 0x7fff_ffff, 0xffff_fffe] {
        let storage = written();
        let before = DYNAMIC.content(&storage);
        put(&storage, TABLE + 4 * 4, word);
        assert_eq!(DYNAMIC.found(&storage, Repair::Nothing).0, 1, "{word:#x}");
        assert!(DYNAMIC.open(&storage, true).is_err(), "{word:#x}");
        repaired(&storage);
        assert!(DYNAMIC.content(&storage) == before, "{word:#x}");
    }
}

#[test]
fn gaps_and_space_behind_are_leaks() {
    let storage = written();
    put(&storage, TABLE + 4, u32::MAX);
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 1));
    let before = DYNAMIC.content(&storage);
    assert_eq!(DYNAMIC.found(&storage, Repair::Leaks), (0, 1));
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
    assert!(DYNAMIC.content(&storage) == before);
    assert_eq!(storage.len().unwrap(), BLOCKS + 3 * STRIDE + 512);
}

#[test]
fn compaction_drops_blocks_of_zeroes_and_moves_the_rest_together() {
    let storage = written();
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_zeroes(GuestOffset(2 << 20), 2 << 20, false).unwrap();
    disk.discard(GuestOffset(10 << 20), 2 << 20).unwrap();
    disk.close().unwrap();
    let report = DYNAMIC.cut_in_compaction(&*storage);
    assert_eq!((report.zero_clusters, report.moved_clusters), (2, 2));
    assert_eq!(report.length_after, BLOCKS + 2 * STRIDE + 512);
}

#[test]
fn a_power_cut_while_the_size_changes_leaves_one_of_both() {
    for large in [4 << 30, 40 << 20] {
        let (_, [old, new]) = DYNAMIC.cut_in_growth(&*written(), large);
        assert!(old > 0 && new > 0, "{old} {new}");
    }
}

/// A footer at the end suffices: neither a fixed nor a damaged image is detected as raw.
#[test]
fn images_are_known_by_either_footer() {
    let probe = |storage: &Shared| {
        let len = storage.len().unwrap();
        let mut bytes = vec![0; len as usize];
        storage.read_at(&mut bytes, HostOffset(0)).unwrap();
        let head = &bytes[..bytes.len().min(64 << 10)];
        VhdDriver.probe(head, &bytes[bytes.len().saturating_sub(512)..], len)
    };
    let fixed: Shared = Arc::new(FIXED.image());
    assert_eq!(probe(&fixed), Probe::Yes);
    let dynamic = written();
    assert_eq!(probe(&dynamic), Probe::Yes);
    dynamic.write_at(&[0; 512], HostOffset(0)).unwrap();
    assert_eq!(probe(&dynamic), Probe::Yes);
    fixed.write_at(&[1], HostOffset(fixed.len().unwrap() - 1)).unwrap();
    assert_eq!(probe(&fixed), Probe::No);
    // A fixed disk may begin with a footer as guest data.
    let nested: Shared = Arc::new(FIXED.image());
    let mut footer = [0; 512];
    nested.read_at(&mut footer, HostOffset(2 << 20)).unwrap();
    nested.write_at(&footer, HostOffset(0)).unwrap();
    assert_eq!(FIXED.open(&nested, false).unwrap().guest_bytes(), 2 << 20);
}

/// The size field of such creators does not size the disk, so it may hold anything.
#[test]
fn a_size_that_no_vhd_has_moves_no_footer_into_the_disk() {
    const BYTES: u64 = 60 * 4 * 17 * 512;
    let limit = 0xff00_0000_u64 * 512;
    for creator in [*b"qemu", *b"vpc "] {
        for size in [u64::MAX, u64::MAX - 511, u64::MAX - 600, limit + 1] {
            let storage: Shared = Arc::new(FIXED.image());
            let footer = FIXED.guest_bytes;
            put(&storage, footer + 28, u32::from_be_bytes(creator));
            put(&storage, footer + 56, (60 << 16) | (4 << 8) | 17);
            storage.write_at(&size.to_be_bytes(), HostOffset(footer + 48)).unwrap();
            sum(&storage, footer, 512, 64);
            storage.write_at(&[7; 512], HostOffset(0)).unwrap();
            let before = bytes(&storage);
            for repair in [Repair::Nothing, Repair::Leaks, Repair::All] {
                assert_eq!(FIXED.found(&storage, repair), (1, 0), "{size:#x} {repair:?}");
            }
            assert!(bytes(&storage) == before, "{size:#x}: changed");
            assert_eq!(FIXED.open(&storage, false).unwrap().guest_bytes(), BYTES);
        }
    }
}

/// A crash leaves footers that differ in the size, but not two images' footers.
#[test]
fn footers_of_two_images_are_damage_that_a_repair_of_leaks_leaves_alone() {
    for (field, word) in [(60, 4), (60, 2), (68, 0x1234_5678)] {
        let storage = written();
        let before = DYNAMIC.content(&storage);
        put(&storage, TABLE + 4, u32::MAX);
        let end = storage.len().unwrap() - 512;
        put(&storage, end + field, word);
        // Of a disk that does not end before this footer, or the file would end as a fixed image.
        put(&storage, end + 52, u32::MAX / 512 * 512);
        sum(&storage, end, 512, 64);
        let damaged = bytes(&storage);
        assert_eq!(DYNAMIC.found(&storage, Repair::Leaks), (1, 1), "{field}");
        assert!(bytes(&storage) == damaged, "{field}: changed");
        repaired(&storage);
        assert!(DYNAMIC.content(&storage)[4 << 20..] == before[4 << 20..], "{field}");
    }
}

#[test]
fn azure_takes_fixed_images_of_whole_mib_and_says_what_it_refuses() {
    let good: Shared = Arc::new(FIXED.image());
    assert!(azure_faults(&*good).unwrap().is_empty());
    let told = |storage: &Shared| {
        let faults = azure_faults(&**storage).unwrap();
        faults.iter().map(|fault| format!("{}: {}", fault.structure, fault.message)).collect()
    };
    let told = |storage: &Shared| -> String {
        let all: Vec<String> = told(storage);
        all.join("\n")
    };
    assert!(told(&written()).contains("is dynamic"));
    let odd: Shared =
        Arc::new(vdkit_testbase::trials::Trial { guest_bytes: (2 << 20) + 512, ..FIXED }.image());
    assert!(told(&odd).contains("3145728 would be"), "{}", told(&odd));
    let long = copy_of(&good);
    let mut footer = [0; 512];
    long.read_at(&mut footer, HostOffset(2 << 20)).unwrap();
    long.write_at(&footer, HostOffset(3 << 20)).unwrap();
    assert!(told(&long).contains("the file has"), "{}", told(&long));
    let raw: Shared = Arc::new(MemoryStorage::with_len("raw", 1 << 20));
    assert!(told(&raw).contains("footer"));
    // The next whole MiB would be more than a number holds.
    for size in [u64::MAX, u64::MAX - 511, u64::MAX - (1 << 20) + 2] {
        let huge = copy_of(&good);
        huge.write_at(&size.to_be_bytes(), HostOffset((2 << 20) + 48)).unwrap();
        sum(&huge, 2 << 20, 512, 64);
        let told = told(&huge);
        assert!(told.contains("2040 GiB") && !told.contains("would be"), "{size:#x}: {told}");
    }
    let old = copy_of(&good);
    put(&old, (2 << 20) + 12, 0x0002_0000);
    sum(&old, 2 << 20, 512, 64);
    assert!(told(&old).contains("version"), "{}", told(&old));
}
