//! Hostile images: each is rejected with a clear error or read, quickly and in bounded memory.

mod common;

use std::sync::Arc;

use common::{MIB, create, disk_of, open_format, parent_ref, try_amend};
use vdkit_block::{
    Error, FormatDriver, GuestOffset, HostOffset, Limits, OfflineImage, Repair, Storage, StorageExt,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{Rng, processor_time};
use vdkit_vhdx::VhdxDriver;

fn image(options: &str, child: bool) -> MemoryStorage {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    create(&storage, 6 * MIB, options, child.then(parent_ref));
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    disk.write_at(&vec![7; 2 << 20], GuestOffset(MIB - 1000)).expect("writing");
    disk.flush().expect("flushing");
    // Not closed: the log has entries.
    drop(disk);
    MemoryStorage::clone(&memory)
}

/// Corrects a structure's CRC-32C.
fn seal(storage: &MemoryStorage, at: u64, len: usize) {
    let mut bytes = vec![0; len];
    storage.read_at(&mut bytes, HostOffset(at)).expect("reading");
    bytes[4..8].fill(0);
    let sum = crc32c::crc32c(&bytes);
    storage.write_at(&sum.to_le_bytes(), HostOffset(at + 4)).expect("writing");
}

/// Tries every operation on an image; none may take long. Returns the error of opening it.
fn try_all(content: &MemoryStorage) -> Option<Error> {
    let started = processor_time();
    let fresh = || -> Arc<dyn Storage> { Arc::new(content.clone()) };
    let mut limits = Limits::default();
    limits.check_bytes_max = 16 << 20;
    let _ = VhdxDriver.describe(&fresh(), &limits);
    let error = match open_format(&fresh(), false) {
        Ok(format) => {
            let disk = disk_of(format, false);
            let size = disk.guest_bytes();
            for at in [0, MIB, size / 2, size.saturating_sub(5000)] {
                let mut bytes = vec![0; 5000.min(size.saturating_sub(at)) as usize];
                let _ = disk.read_at(&mut bytes, GuestOffset(at.min(size)));
            }
            None
        }
        Err(error) => Some(error),
    };
    let small = error.is_none();
    if small {
        for repair in [Repair::Nothing, Repair::All, Repair::AllForced] {
            let storage = fresh();
            let image = OfflineImage { limits, ..OfflineImage::new(&storage) };
            let _ = VhdxDriver.check(&image, repair);
        }
    }
    let storage = fresh();
    if let Ok(format) = open_format(&storage, true) {
        let disk = disk_of(format, true);
        let size = disk.guest_bytes();
        for at in [0, size / 2, size.saturating_sub(600)] {
            let len = 600.min(size.saturating_sub(at)) as usize;
            let _ = disk.write_at(&vec![1; len], GuestOffset(at.min(size)));
        }
        let _ = disk.flush();
        let _ = disk.close();
    }
    let took = processor_time() - started;
    assert!(took.as_secs() < 10, "took {took:?}");
    error
}

/// Replaces each 4 and 8 bytes of a structure with invalid numbers.
fn each_field(content: &MemoryStorage, at: u64, fields: std::ops::Range<u64>, sealed: usize) {
    let values =
        [0, 1, 511, 4095, 1 << 20, u64::from(u32::MAX), 1 << 40, u64::MAX - 4095, u64::MAX];
    for field in fields.step_by(4) {
        for value in values {
            for len in [4, 8] {
                let storage = content.clone();
                let bytes = &u64::to_le_bytes(value)[..len];
                storage.write_at(bytes, HostOffset(at + field)).expect("damage");
                if sealed > 0 {
                    seal(&storage, at, sealed);
                }
                try_all(&storage);
            }
        }
    }
}

#[test]
fn each_field_of_the_headers() {
    let content = image("block_size=1M", false);
    // First one header, then the other, so that either can be current.
    for at in [64 << 10, 128 << 10] {
        each_field(&content, at, 8..80, 4096);
    }
}

#[test]
fn each_field_of_the_region_table() {
    each_field(&image("block_size=1M", false), 192 << 10, 8..80, 64 << 10);
}

#[test]
fn each_field_of_the_metadata() {
    let content = image("block_size=1M", true);
    each_field(&content, 2 * MIB, 8..240, 0);
    each_field(&content, 2 * MIB + (64 << 10), 0..200, 0);
}

#[test]
fn each_field_of_the_table_and_the_log() {
    let content = image("block_size=1M", true);
    each_field(&content, MIB, 8..128, 8192);
    // Without the log, which would restore the table.
    let storage: Arc<dyn Storage> = Arc::new(content.clone());
    drop(open_format(&storage, true).expect("replaying"));
    let mut replayed = vec![0; storage.len().expect("length") as usize];
    storage.read_at(&mut replayed, HostOffset(0)).expect("reading");
    let replayed = MemoryStorage::from_bytes("image", &replayed);
    each_field(&replayed, 3 * MIB, 0..48, 0);
    each_field(&replayed, 3 * MIB + (8192 * 8), 0..8, 0);
}

#[test]
fn random_bytes_anywhere() {
    let content = image("block_size=1M", true);
    let mut rng = Rng::new(1);
    for _ in 0..150 {
        let storage = content.clone();
        for _ in 0..1 + rng.below(6) {
            let at = match rng.below(4) {
                0 => rng.below(320 << 10),
                1 => MIB + rng.below(32 << 10),
                2 => 2 * MIB + rng.below(66 << 10),
                _ => 3 * MIB + rng.below(100),
            };
            let mut bytes = [0; 8];
            rng.fill(&mut bytes);
            storage.write_at(&bytes, HostOffset(at)).expect("damage");
        }
        for (at, len) in [(64 << 10, 4096), (128 << 10, 4096), (192 << 10, 64 << 10)] {
            seal(&storage, at, len);
        }
        try_all(&storage);
    }
}

/// A truncated file gives an error that names the file, or the rest of the image.
#[test]
fn a_file_that_ends_early() {
    let content = image("block_size=1M", false);
    let len = content.len().expect("length");
    for end in [0, 1, 8, 4096, 64 << 10, 200 << 10, MIB, 2 * MIB, 3 * MIB, 4 * MIB, len - 1] {
        let storage = content.clone();
        storage.set_len(end).expect("cutting");
        if let Some(error) = try_all(&storage) {
            assert!(error.to_string().contains("image"), "{error}");
        }
    }
}

/// Damage to an image.
type Damage<'a> = Box<dyn Fn(&MemoryStorage) + 'a>;

fn refusal(damage: impl FnOnce(&MemoryStorage)) -> String {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    create(&storage, 6 * MIB, "block_size=1M", None);
    let storage = MemoryStorage::clone(&memory);
    damage(&storage);
    try_all(&storage).expect("refused").to_string()
}

#[test]
fn refusals_say_what_is_wrong() {
    let put = |storage: &MemoryStorage, at: u64, bytes: &[u8]| {
        storage.write_at(bytes, HostOffset(at)).expect("damage");
    };
    let regions = 192 << 10;
    let metadata = 2 * MIB;
    let items = metadata + (64 << 10);
    let cases: [(&str, Damage<'_>); 9] = [
        ("[2.2.1]", Box::new(|s| put(s, 0, b"whatever"))),
        (
            "a required region that is not known",
            Box::new(|s| {
                put(s, regions + 8, &3u32.to_le_bytes());
                put(s, regions + 16 + 64, &[5; 16]);
                put(s, regions + 16 + 64 + 16, &(16 * MIB).to_le_bytes());
                put(s, regions + 16 + 64 + 24, &(MIB as u32).to_le_bytes());
                put(s, regions + 16 + 64 + 28, &1u32.to_le_bytes());
                seal(s, regions, 64 << 10);
            }),
        ),
        (
            "a required metadata item that is not known",
            Box::new(|s| put(s, metadata + 32 + 32 * 4, &[5; 16])),
        ),
        ("[2.6.2.1]", Box::new(|s| put(s, items, &(3 * MIB as u32).to_le_bytes()))),
        ("[2.6.2.2]", Box::new(|s| put(s, items + 16, &(65u64 << 40).to_le_bytes()))),
        ("[2.6.2.4]", Box::new(|s| put(s, items + 48, &1024u32.to_le_bytes()))),
        ("[2.5]", Box::new(|s| put(s, items + 16, &(60u64 << 40).to_le_bytes()))),
        (
            "version 2",
            Box::new(|s| {
                for at in [64 << 10, 128 << 10] {
                    put(s, at + 66, &2u16.to_le_bytes());
                    seal(s, at, 4096);
                }
            }),
        ),
        (
            "log of version 1",
            Box::new(|s| {
                for at in [64 << 10, 128 << 10] {
                    put(s, at + 48, &[5; 16]);
                    put(s, at + 64, &1u16.to_le_bytes());
                    seal(s, at, 4096);
                }
            }),
        ),
    ];
    for (says, damage) in cases {
        let text = refusal(damage);
        assert!(text.contains(says), "'{text}' should say '{says}'");
    }
}

fn word(storage: &Arc<dyn Storage>, at: u64) -> u64 {
    let mut bytes = [0; 8];
    storage.read_at(&mut bytes, HostOffset(at)).expect("reading");
    u64::from_le_bytes(bytes)
}

/// The bytes of the last block behind the disk's end lie over metadata; nobody reads them. A
/// discard must not free the metadata, and a growth must not zero it.
#[test]
fn a_block_over_metadata_is_neither_freed_nor_zeroed() {
    for grow in [false, true] {
        change_a_block_over_metadata(grow);
    }
}

fn change_a_block_over_metadata(grow: bool) {
    const END: u64 = 300 << 30;
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 4 * MIB, "block_size=2M", None);
    let open = |writable| disk_of(open_format(&storage, writable).expect("opening"), writable);
    let disk = open(true);
    // The table moves, and leaves a gap before it.
    disk.resize(END + (64 << 10)).expect("growing");
    disk.write_at(&[1; 4096], GuestOffset(0)).expect("writing");
    disk.close().expect("closing");
    let regions = [0, 1].map(|index| word(&storage, (192 << 10) + 16 + index * 32 + 16));
    let table = regions.into_iter().max().expect("two regions");
    assert_eq!(table, 4 * MIB, "the gap is elsewhere");
    let block = END / (2 * MIB);
    let entry = table + (block + block / 2048) * 8;
    storage.write_at(&((3 * MIB) | 6).to_le_bytes(), HostOffset(entry)).expect("damage");
    let disk = open(true);
    let changed = match grow {
        true => disk.resize(END + 2 * MIB),
        false => disk.discard(GuestOffset(END), 64 << 10),
    };
    refused(changed, OVERLAP);
    disk.close().expect("closing");
    let mut bytes = [0; 4096];
    open(false).read_at(&mut bytes, GuestOffset(0)).expect("reading");
    assert!(bytes == [1; 4096], "the table was wiped");
}

#[test]
fn a_sector_bitmap_over_metadata_is_not_freed() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 6 * MIB, "block_size=1M", Some(parent_ref()));
    storage
        .write_at(&((2 * MIB) | 6).to_le_bytes(), HostOffset(3 * MIB + 4096 * 8))
        .expect("damage");
    let child = open_format(&storage, true).expect("opening");
    refused(child.empty(), OVERLAP);
    child.close().expect("closing");
    open_format(&storage, false).expect("the metadata was wiped");
    // Nor when the image loses its parent, with all of its sector bitmaps.
    refused(try_amend(&storage, None).map(drop), OVERLAP);
    open_format(&storage, false).expect("the metadata was wiped");
}

const OVERLAP: &str = "expected space that nothing else uses";
const BEYOND: &str = "expected space within the file";

fn refused(result: vdkit_block::Result<()>, expected: &str) {
    let error = result.expect_err("refused");
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR), "{error}");
    let error = error.to_string();
    assert!(error.contains(expected), "{error}");
}

/// An image of 16 blocks of 1 MiB whose first four hold 1, 2, 3, 4; they follow the table at 3 MiB.
fn four_blocks() -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 16 * MIB, "block_size=1M", None);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    for block in 0..4 {
        disk.write_at(&vec![block as u8 + 1; MIB as usize], GuestOffset(block * MIB))
            .expect("data");
    }
    disk.close().expect("closing");
    storage
}

fn entry(storage: &Arc<dyn Storage>, block: u64) -> u64 {
    word(storage, 3 * MIB + block * 8)
}

fn set_entry(storage: &Arc<dyn Storage>, block: u64, entry: u64) {
    storage.write_at(&entry.to_le_bytes(), HostOffset(3 * MIB + block * 8)).expect("damage");
}

fn first_byte(disk: &vdkit_chain::Disk, block: u64) -> u8 {
    let mut byte = [0];
    disk.read_at(&mut byte, GuestOffset(block * MIB)).expect("reading");
    byte[0]
}

/// If the file of a truncated image grew, the lost entries would be valid again, and name the space
/// of new blocks.
#[test]
fn a_truncated_image_gets_no_new_space_before_a_repair() {
    let storage = four_blocks();
    let end = entry(&storage, 3) & !(MIB - 1);
    storage.set_len(end).expect("cutting");
    let open = || disk_of(open_format(&storage, true).expect("opening"), true);
    let disk = open();
    refused(disk.write_at(&[9; 4096], GuestOffset(8 * MIB)), BEYOND);
    refused(disk.write_zeroes(GuestOffset(0), MIB, true), BEYOND);
    refused(disk.discard(GuestOffset(0), MIB), BEYOND);
    refused(disk.resize(32 * MIB), BEYOND);
    disk.write_at(&[9; 4096], GuestOffset(MIB)).expect("space that is there");
    assert_eq!([0, 1, 2].map(|block| first_byte(&disk, block)), [1, 9, 3]);
    disk.close().expect("closing");
    assert_eq!(storage.len().expect("length"), end);
    VhdxDriver.check(&OfflineImage::new(&storage), Repair::All).expect("mending");
    let disk = open();
    disk.write_at(&[9; 4096], GuestOffset(8 * MIB)).expect("writing");
    disk.discard(GuestOffset(3 * MIB), MIB).expect("discarding");
    assert_eq!([0, 1, 2, 3, 8].map(|block| first_byte(&disk, block)), [1, 9, 3, 0, 9]);
}

/// Freeing space that a second entry names would hand out the other block's data.
#[test]
fn space_with_two_owners_is_not_freed() {
    let storage = four_blocks();
    set_entry(&storage, 9, entry(&storage, 2));
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    refused(disk.discard(GuestOffset(9 * MIB), MIB), OVERLAP);
    refused(disk.resize(4 * MIB), OVERLAP);
    refused(disk.write_at(&[9; 4096], GuestOffset(12 * MIB)), OVERLAP);
    disk.close().expect("closing");
    let disk = disk_of(open_format(&storage, false).expect("opening"), false);
    assert_eq!([0, 1, 2, 3, 9].map(|block| first_byte(&disk, block)), [1, 2, 3, 4, 3]);
}

/// An offset that a state without data keeps [2.5.1.1] is not handed out, and no damage.
#[test]
fn space_of_an_unmapped_block_is_kept() {
    let storage = four_blocks();
    let kept = entry(&storage, 1) & !(MIB - 1);
    set_entry(&storage, 1, kept | 3);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    disk.write_at(&vec![9; MIB as usize], GuestOffset(8 * MIB)).expect("writing");
    disk.close().expect("closing");
    let new = entry(&storage, 8) & !(MIB - 1);
    assert!(new > kept, "{new:#x} and {kept:#x}");
}

/// Space that an unmapped block keeps behind the end of a truncated file is given up by a repair,
/// and not handed out before.
#[test]
fn kept_space_behind_the_end_of_the_file_is_not_handed_out() {
    let storage = four_blocks();
    let end = entry(&storage, 3) & !(MIB - 1);
    for (block, host) in [(1, end), (2, entry(&storage, 0) & !(MIB - 1))] {
        let (storage, kept) = (four_blocks(), host | 3);
        set_entry(&storage, block, kept);
        set_entry(&storage, 3, 0);
        storage.set_len(end).expect("cutting");
        let disk = disk_of(open_format(&storage, true).expect("opening"), true);
        let expected = if block == 1 { BEYOND } else { OVERLAP };
        refused(disk.write_at(&[9; 4096], GuestOffset(8 * MIB)), expected);
        disk.close().expect("closing");
        VhdxDriver.check(&OfflineImage::new(&storage), Repair::All).expect("mending");
        assert_eq!(entry(&storage, block), 3);
        let disk = disk_of(open_format(&storage, true).expect("opening"), true);
        disk.write_at(&[9; 4096], GuestOffset(8 * MIB)).expect("writing");
        disk.close().expect("closing");
        common::sound(&storage, false, "mended");
        let disk = disk_of(open_format(&storage, false).expect("opening"), false);
        assert_eq!([0, 8].map(|block| first_byte(&disk, block)), [1, 9]);
    }
}

#[test]
fn a_table_behind_the_end_of_the_file_is_not_read_as_zeroes() {
    let storage = four_blocks();
    storage.set_len(3 * MIB).expect("cutting");
    let error = open_format(&storage, false).expect_err("refused").to_string();
    assert!(error.contains("a table within the file"), "{error}");
}

/// The sector bitmap of a damaged image may be another block's data, which a write of more sectors must
/// not change.
#[test]
fn a_sector_bitmap_over_guest_data_is_not_changed() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 16 * MIB, "block_size=1M", Some(parent_ref()));
    let child = open_format(&storage, true).expect("opening");
    let bitmap = 4096;
    for (at, len) in [(0, 4096), (MIB, MIB)] {
        let reservation = child.reserve(GuestOffset(at), len).expect("space").expect("new");
        storage.write_at(&vec![0; len as usize], reservation.host).expect("writing");
        reservation.publish().expect("publishing");
    }
    child.close().expect("closing");
    let before = entry(&storage, bitmap);
    set_entry(&storage, bitmap, entry(&storage, 1));
    let child = open_format(&storage, true).expect("opening");
    refused(child.reserve(GuestOffset(8192), 4096).map(drop), OVERLAP);
    child.close().expect("closing");
    set_entry(&storage, bitmap, before);
    let child = open_format(&storage, true).expect("opening");
    assert!(child.reserve(GuestOffset(8192), 4096).expect("sound").is_some());
}
