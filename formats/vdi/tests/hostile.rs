//! Hostile headers are rejected quickly and in bounded memory; unusual but valid ones are accepted.

mod support;

use std::sync::Arc;

use support::{DYNAMIC, Shared, entry, field, put, written};
use vdkit_block::{
    CheckReport, Format, FormatDriver, GuestOffset, HostOffset, Limits, OfflineImage, Repair,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, copy_of};
use vdkit_vdi::VdiDriver;

#[test]
fn each_field_of_the_header_may_lie() {
    let sound = written();
    let fields = [
        64,
        field::VERSION,
        field::SIZE,
        field::TYPE,
        field::TABLE,
        field::DATA,
        field::DISK_BYTES,
        field::DISK_BYTES + 4,
        field::BLOCK_BYTES,
        field::EXTRA,
        field::ENTRIES,
        field::ALLOCATED,
        field::UUID_LINK,
    ];
    for at in fields {
        for word in [0, 1, 511, 512, 4096, 0x7fff_ffff, 0x8000_0000, 0xffff_fe00, u32::MAX] {
            let storage = copy_of(&sound);
            put(&storage, at, word);
            DYNAMIC.survive(&storage, &format!("{word:#x} at {at:#x}"));
        }
    }
}

#[test]
fn errors_name_the_field_and_what_was_expected() {
    let cases: [(u64, u32, &str); 8] = [
        (field::VERSION, 0x0002_0000, "VDI version 2.0"),
        (field::TYPE, 9, "image type"),
        (field::TABLE, 8, "block table"),
        (field::ENTRIES, 1 << 30, "block table"),
        (field::ENTRIES, 3, "disk size"),
        (field::BLOCK_BYTES, 1000, "blocks of 1000 bytes"),
        (field::DATA, 100, "offset of the blocks"),
        (field::EXTRA, 1 << 21, "block extra"),
    ];
    for (at, word, wanted) in cases {
        let storage = written();
        put(&storage, at, word);
        let error = VdiDriver.describe(&storage, &Limits::default()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn a_short_file_is_no_image() {
    let sound = written();
    for len in [0, 1, 64, 100, 511, 512, 540] {
        let storage = copy_of(&sound);
        storage.set_len(len).unwrap();
        assert!(VdiDriver.describe(&storage, &Limits::default()).is_err(), "{len}");
        DYNAMIC.survive(&storage, &format!("{len} bytes"));
    }
}

/// A table of 4 GiB in a sparse file: opening reads none of it, and a guest read only a piece.
#[test]
fn a_giant_table_costs_nothing() {
    let storage: Shared = Arc::new(MemoryStorage::new("image"));
    let mut bytes = [0; 512];
    written().read_at(&mut bytes, HostOffset(0)).unwrap();
    storage.write_at(&bytes, HostOffset(0)).unwrap();
    put(&storage, field::ENTRIES, 0x3000_0000);
    put(&storage, field::DATA, 0xe000_0000);
    storage
        .write_at(&(0x3000_0000_u64 << 20).to_le_bytes(), HostOffset(field::DISK_BYTES))
        .unwrap();
    storage.set_len(1 << 60).unwrap();
    let counting = CountingStorage::new(storage);
    let counted: Shared = counting.clone();
    let disk = DYNAMIC.open(&counted, false).unwrap();
    disk.read_at(&mut [0; 4096], GuestOffset(1 << 45)).unwrap();
    let counts = counting.counts();
    assert!(counts.reads <= 4 && counts.bytes_read < 64 << 10, "{counts:?}");
}

/// A million bad entries are counted, not listed one by one.
#[test]
fn a_giant_table_of_bad_entries_is_counted() {
    let storage: Shared = Arc::new(MemoryStorage::new("image"));
    let mut bytes = [0; 512];
    written().read_at(&mut bytes, HostOffset(0)).unwrap();
    storage.write_at(&bytes, HostOffset(0)).unwrap();
    put(&storage, field::ENTRIES, 1 << 20);
    put(&storage, field::DATA, 8 << 20);
    storage.write_at(&(1_u64 << 40).to_le_bytes(), HostOffset(field::DISK_BYTES)).unwrap();
    // All zero: each names the first block, which does not exist.
    storage.set_len(8 << 20).unwrap();
    let report = VdiDriver.check(&OfflineImage::new(&storage), Repair::Nothing).unwrap();
    assert!(report.corruptions >= 1 << 20, "{}", report.corruptions);
    assert_eq!(report.findings.len(), CheckReport::FINDINGS_MAX);
}

#[test]
fn describing_is_one_read() {
    let counting = CountingStorage::new(written());
    let storage: Shared = counting.clone();
    VdiDriver.describe(&storage, &Limits::default()).unwrap();
    assert_eq!(counting.counts().reads, 1);
}

/// An image of version 0, which has a shorter header, followed by the table and the unaligned
/// blocks.
fn version_0(sound: &Shared) -> Shared {
    let mut bytes = vec![0; sound.len().unwrap() as usize];
    sound.read_at(&mut bytes, HostOffset(0)).unwrap();
    let (table, data) = (512, 1 << 20);
    let mut old = vec![0; 0x1a4];
    old[..64].copy_from_slice(&bytes[..64]);
    old[64..68].copy_from_slice(&bytes[64..68]);
    old[68..72].copy_from_slice(&1_u32.to_le_bytes());
    old[72..76].copy_from_slice(&1_u32.to_le_bytes());
    old[0x160..0x168].copy_from_slice(&(8_u64 << 20).to_le_bytes());
    old[0x168..0x16c].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    old[0x16c..0x170].copy_from_slice(&8_u32.to_le_bytes());
    old[0x170..0x174].copy_from_slice(&4_u32.to_le_bytes());
    old.extend(&bytes[table..table + 32]);
    old.extend(&bytes[data..]);
    Arc::new(MemoryStorage::from_bytes("old", &old))
}

#[test]
fn a_version_0_image_is_read_and_not_written() {
    let sound = written();
    let storage = version_0(&sound);
    assert!(DYNAMIC.content(&storage) == DYNAMIC.content(&sound));
    let error = DYNAMIC.open(&storage, true).unwrap_err().to_string();
    assert!(error.contains("version 0") && error.contains("convert"), "{error}");
}

#[test]
fn errors_of_version_0_name_its_own_fields() {
    for (at, word, wanted) in [
        (0x160, 9 << 20, "disk size at offset 0x160"),
        (0x164, u32::MAX, "disk size at offset 0x160"),
        (0x16c, 1 << 24, "block table at offset 0x16c"),
    ] {
        let storage = version_0(&written());
        put(&storage, at, word);
        let error = VdiDriver.describe(&storage, &Limits::default()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

/// VirtualBox may put bytes before each block's data.
#[test]
fn extra_bytes_before_blocks_are_skipped() {
    let sound = written();
    let mut bytes = vec![0; sound.len().unwrap() as usize];
    sound.read_at(&mut bytes, HostOffset(0)).unwrap();
    let mut wide = bytes[..1 << 20].to_vec();
    for block in bytes[1 << 20..].chunks(1 << 20) {
        wide.extend([0x77; 512]);
        wide.extend(block);
    }
    let storage: Shared = Arc::new(MemoryStorage::from_bytes("wide", &wide));
    put(&storage, field::EXTRA, 512);
    assert!(DYNAMIC.content(&storage) == DYNAMIC.content(&sound));
    let disk = DYNAMIC.open(&storage, true).unwrap();
    disk.write_at(&[4; 3 << 20], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    assert!(DYNAMIC.content(&storage)[..3 << 20].iter().all(|byte| *byte == 4));
    assert_eq!(DYNAMIC.found(&storage, Repair::Nothing), (0, 0));
}

#[test]
fn a_block_that_is_marked_zero_reads_zero_and_can_be_written() {
    let storage = written();
    put(&storage, entry(&storage, 3), 0xffff_fffe);
    let disk = DYNAMIC.open(&storage, true).unwrap();
    let place = disk.top().resolve(GuestOffset(3 << 20), 1 << 20).unwrap().place;
    assert_eq!(place, vdkit_block::Place::Zero { allocated: false });
    disk.write_at(&[8; 512], GuestOffset(3 << 20)).unwrap();
    disk.close().unwrap();
    assert_eq!(DYNAMIC.content(&storage)[3 << 20..][..1024], [[8; 512], [0; 512]].concat());
}

#[test]
fn an_image_over_a_parent_can_only_be_read_and_says_whose_it_is() {
    let storage = written();
    storage.write_at(&[0x11; 16], HostOffset(field::UUID_LINK)).unwrap();
    put(&storage, field::TYPE, 4);
    let info = VdiDriver.describe(&storage, &Limits::default()).unwrap();
    let parent = info.backing_identity.unwrap();
    assert!(parent.starts_with("11111111-1111-1111-1111-111111111111 "), "{parent}");
    let error = DYNAMIC.open(&storage, true).unwrap_err().to_string();
    assert!(error.contains("stands on another"), "{error}");
    let format: Arc<dyn Format> = DYNAMIC.open(&storage, false).unwrap().top().clone();
    let hole = format.resolve(GuestOffset(0), 512).unwrap().place;
    assert_eq!(hole, vdkit_block::Place::Hole);
}

/// The entries of small blocks reach the limit of the table at a smaller disk.
#[test]
fn growth_counts_the_entries_of_small_blocks() {
    let storage: Shared = Arc::new(DYNAMIC.image());
    storage.write_at(&(4u64 << 20).to_le_bytes(), HostOffset(field::DISK_BYTES)).unwrap();
    put(&storage, field::BLOCK_BYTES, 4096);
    put(&storage, field::ENTRIES, 1024);
    storage.write_at(&[0xff; 4096], HostOffset(entry(&storage, 0))).unwrap();
    let disk = DYNAMIC.open(&storage, true).unwrap();
    let before = storage.len().unwrap();
    let error = disk.resize(5 << 40).unwrap_err();
    assert!(matches!(error, vdkit_block::Error::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains(&format!("{}, more than", 5u64 << 40)), "{error}");
    assert_eq!((disk.guest_bytes(), storage.len().unwrap()), (4 << 20, before));
    disk.resize(6 << 20).unwrap();
}
