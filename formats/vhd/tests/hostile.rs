//! Hostile headers are rejected quickly and in bounded memory; unusual but valid ones are accepted.

mod support;

use std::sync::Arc;

use support::{DYNAMIC, FIXED, HEADER, Shared, TABLE, put, sum, written};
use vdkit_block::{FormatDriver, GuestOffset, HostOffset, Limits, Repair};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, copy_of};
use vdkit_vhd::VhdDriver;

const WORDS: [u32; 8] = [0, 1, 511, 512, 0x7fff_ffff, 0x8000_0000, 0xffff_fe00, u32::MAX];

#[test]
fn each_field_may_lie() {
    let sound = written();
    let end = sound.len().unwrap() - 512;
    for field in (0..96).step_by(4) {
        for word in WORDS {
            let storage = copy_of(&sound);
            for footer in [0, end] {
                put(&storage, footer + field, word);
                if field != 64 {
                    sum(&storage, footer, 512, 64);
                }
            }
            DYNAMIC.survive(&storage, &format!("{word:#x} at {field} of the footer"));
        }
    }
    for field in (0..64).chain(576..600).step_by(4) {
        for word in WORDS {
            let storage = copy_of(&sound);
            put(&storage, HEADER + field, word);
            if field != 36 {
                sum(&storage, HEADER, 1024, 36);
            }
            DYNAMIC.survive(&storage, &format!("{word:#x} at {field} of the dynamic header"));
        }
    }
}

#[test]
fn a_fixed_image_ends_before_its_footer() {
    let storage: Shared = Arc::new(FIXED.image());
    put(&storage, (2 << 20) + 48, 1);
    sum(&storage, 2 << 20, 512, 64);
    let error = VhdDriver.describe(&storage, &Limits::default()).unwrap_err().to_string();
    assert!(error.contains("current size"), "{error}");
    assert!(FIXED.open(&storage, false).is_err());
}

/// The guest of a fixed image writes the start of the file: it must not turn the image into one that
/// names a parent, or into one that a repair truncates.
#[test]
fn the_guest_of_a_fixed_image_does_not_choose_another_kind() {
    for disk_type in [3, 4] {
        let storage: Shared = Arc::new(FIXED.image());
        let mut start = vec![0; 1 << 20];
        written().read_at(&mut start, HostOffset(0)).unwrap();
        let disk = FIXED.open(&storage, true).unwrap();
        disk.write_at(&start, GuestOffset(0)).unwrap();
        disk.close().unwrap();
        put(&storage, 60, disk_type);
        sum(&storage, 0, 512, 64);
        storage.read_at(&mut start, HostOffset(0)).unwrap();
        let info = VhdDriver.describe(&storage, &Limits::default()).unwrap();
        assert_eq!((info.virtual_size, info.backing_file), (2 << 20, None));
        for repair in [Repair::Nothing, Repair::Leaks, Repair::All] {
            assert_eq!(FIXED.found(&storage, repair), (0, 0), "{repair:?}");
        }
        assert_eq!(storage.len().unwrap(), (2 << 20) + 512);
        let content = FIXED.content(&storage);
        assert!(content.len() == 2 << 20 && content.starts_with(&start));
    }
}

#[test]
fn a_table_without_an_entry_for_each_block_is_refused() {
    let storage = written();
    put(&storage, HEADER + 28, 3);
    sum(&storage, HEADER, 1024, 36);
    let error = DYNAMIC.open(&storage, false).unwrap_err().to_string();
    assert!(error.contains("table entries"), "{error}");
}

#[test]
fn a_giant_table_costs_nothing() {
    let sound = written();
    let storage: Shared = Arc::new(MemoryStorage::new("image"));
    let mut bytes = vec![0; 2048];
    sound.read_at(&mut bytes, HostOffset(0)).unwrap();
    storage.write_at(&bytes, HostOffset(0)).unwrap();
    put(&storage, HEADER + 28, 0x3fff_ffff);
    sum(&storage, HEADER, 1024, 36);
    storage.write_at(&(1_u64 << 50).to_be_bytes(), HostOffset(48)).unwrap();
    sum(&storage, 0, 512, 64);
    storage.set_len(1 << 60).unwrap();
    let counting = CountingStorage::new(storage);
    let counted: Shared = counting.clone();
    let disk = DYNAMIC.open(&counted, false).unwrap();
    // A zero entry points into the headers.
    let error = disk.read_at(&mut [0; 4096], GuestOffset(1 << 49)).unwrap_err().to_string();
    assert!(error.contains("block table entry"), "{error}");
    let counts = counting.counts();
    assert!(counts.reads <= 8 && counts.bytes_read < 64 << 10, "{counts:?}");
}

#[test]
fn describing_takes_few_reads() {
    for storage in [written(), Arc::new(FIXED.image()) as Shared] {
        let counting = CountingStorage::new(storage);
        let counted: Shared = counting.clone();
        VhdDriver.describe(&counted, &Limits::default()).unwrap();
        assert!(counting.counts().reads <= 3, "{:?}", counting.counts());
    }
}

/// Virtual PC before 2004 wrote footers of 511 bytes.
#[test]
fn a_footer_of_511_bytes_is_one() {
    let storage: Shared = Arc::new(FIXED.image());
    let disk = FIXED.open(&storage, true).unwrap();
    disk.write_at(&[5; 1000], GuestOffset((2 << 20) - 1000)).unwrap();
    disk.close().unwrap();
    drop(disk);
    storage.set_len((2 << 20) + 511).unwrap();
    let disk = FIXED.open(&storage, false).unwrap();
    let mut bytes = [0; 1000];
    disk.read_at(&mut bytes, GuestOffset((2 << 20) - 1000)).unwrap();
    assert_eq!(bytes, [5; 1000]);
}

/// Hyper-V marks only written sectors; clear bits must not hide a write by vdkit.
#[test]
fn bitmaps_of_others_are_filled_before_their_blocks_are_written() {
    let storage = written();
    let block = u64::from(support::get(&storage, TABLE + 4)) * 512;
    storage.write_at(&[0; 512], HostOffset(block)).unwrap();
    let before = DYNAMIC.content(&storage);
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_at(&[6; 512], GuestOffset(2 << 20)).unwrap();
    disk.close().unwrap();
    let mut bitmap = [0; 512];
    storage.read_at(&mut bitmap, HostOffset(block)).unwrap();
    assert_eq!(bitmap, [0xff; 512]);
    assert_eq!(DYNAMIC.content(&storage)[(2 << 20) + 512..], before[(2 << 20) + 512..]);
}
