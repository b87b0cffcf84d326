//! Damage found by a check, and its repair.

use std::sync::Arc;

use vdkit_block::{GuestOffset, HostOffset, Limits, Repair, Severity, Storage, StorageExt};
use vdkit_storage::MemoryStorage;
use vdkit_vmdk::VmdkDriver;
use vdkit_vmdk::header::field;

use super::{GUEST_BYTES, Shape, USUAL, audit, check, read_all};

const SHAPE: Shape = Shape { grain: 4096, ..USUAL };

/// An image with scattered data, its content, and the location of its directories.
fn filled() -> (Arc<MemoryStorage>, Vec<u8>) {
    let memory = SHAPE.image();
    let disk = SHAPE.open(memory.clone()).unwrap();
    let mut model = vec![0; GUEST_BYTES as usize];
    for number in 0..20u64 {
        let at = number * 150_016;
        let bytes = vec![number as u8 + 1; 9000];
        disk.write_at(&bytes, GuestOffset(at)).unwrap();
        model[at as usize..at as usize + 9000].copy_from_slice(&bytes);
    }
    disk.close().unwrap();
    (memory, model)
}

fn word(memory: &MemoryStorage, at: u64) -> u32 {
    let mut bytes = [0; 4];
    memory.read_at(&mut bytes, HostOffset(at)).unwrap();
    u32::from_le_bytes(bytes)
}

fn put(memory: &MemoryStorage, at: u64, value: u32) {
    memory.write_at(&value.to_le_bytes(), HostOffset(at)).unwrap();
}

struct Places {
    directory: u64,
    redundant: u64,
    table: u64,
    copy: u64,
}

fn places(memory: &MemoryStorage) -> Places {
    let header = SHAPE.header();
    let (directory, redundant) = (header.directory * 512, header.redundant_directory * 512);
    let table = u64::from(word(memory, directory)) * 512;
    let copy = u64::from(word(memory, redundant)) * 512;
    Places { directory, redundant, table, copy }
}

/// Repairs damage and checks the result.
fn repair(memory: &Arc<MemoryStorage>, model: &[u8], corruptions: bool, what: &str) {
    let storage: Arc<dyn Storage> = memory.clone();
    let before = memory.to_vec();
    let found = check(&storage, Repair::Nothing).unwrap();
    assert_eq!(memory.to_vec(), before, "{what}: looking changes nothing");
    assert_eq!(found.corruptions > 0, corruptions, "{what}: {:#?}", found.findings);
    assert!(found.corruptions + found.leaks > 0, "{what}: not found");
    let repaired = check(&storage, Repair::All).unwrap();
    assert_eq!(
        repaired.corruptions_left() + repaired.leaks_left(),
        0,
        "{what}: {:#?}",
        repaired.findings
    );
    audit(&storage, true, &format!("{what}, repaired"));
    let disk = SHAPE.open(storage).unwrap();
    assert!(read_all(&disk) == model, "{what}: content");
}

#[test]
fn a_damaged_directory_comes_back_from_its_copy() {
    for value in [0, 1, 0xffff_fff0] {
        let (memory, model) = filled();
        let p = places(&memory);
        put(&memory, p.directory, value);
        // A reader uses the other directory; a writer refuses.
        let storage: Arc<dyn Storage> = memory.clone();
        if value > 1 {
            let disk =
                super::open(&VmdkDriver, storage.clone(), &[], false, Limits::default()).unwrap();
            assert!(read_all(&disk) == model, "{value:#x}");
            assert!(disk.warnings().any(|warning| warning.contains("redundant")), "{value:#x}");
            let error = SHAPE.open(storage).unwrap_err();
            assert_eq!(error.remedy(), Some(vdkit_block::Remedy::REPAIR), "{error}");
        }
        repair(&memory, &model, true, &format!("directory entry {value:#x}"));
        let (memory, model) = filled();
        put(&memory, places(&memory).redundant, value);
        repair(&memory, &model, true, &format!("redundant directory entry {value:#x}"));
    }
}

#[test]
fn a_damaged_table_comes_back_from_its_copy() {
    for value in [2, 0x00ff_ffff] {
        let (memory, model) = filled();
        let p = places(&memory);
        put(&memory, p.table, value);
        let storage: Arc<dyn Storage> = memory.clone();
        if value != 2 {
            let disk =
                super::open(&VmdkDriver, storage.clone(), &[], false, Limits::default()).unwrap();
            assert!(read_all(&disk) == model, "{value:#x}");
        }
        repair(&memory, &model, true, &format!("table entry {value:#x}"));
    }
    let (memory, model) = filled();
    put(&memory, places(&memory).copy, 0);
    repair(&memory, &model, true, "an entry of the copy");
}

#[test]
fn two_entries_with_one_grain_get_one_each() {
    let (memory, mut model) = filled();
    let p = places(&memory);
    let grain = word(&memory, p.table);
    for table in [p.table, p.copy] {
        put(&memory, table + 4 * 100, grain);
    }
    // Both show the same bytes, before and after.
    let first: Vec<u8> = model[..4096].to_vec();
    model[100 * 4096..101 * 4096].copy_from_slice(&first);
    repair(&memory, &model, true, "one grain twice");
}

/// A small file must not fill the disk with copies of its one grain.
#[test]
fn a_grain_in_all_entries_is_copied_only_by_force() {
    let memory = SHAPE.image();
    let storage: Arc<dyn Storage> = memory.clone();
    let disk = SHAPE.open(storage.clone()).unwrap();
    disk.write_at(&[7; 4096], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    let p = places(&memory);
    let grain = word(&memory, p.table);
    for slot in 1..500 {
        for table in [p.table, p.copy] {
            put(&memory, table + 4 * slot, grain);
        }
    }
    let report = check(&storage, Repair::All).unwrap();
    assert_eq!((report.corruptions, report.corruptions_left()), (499, 498));
    assert_eq!(check(&storage, Repair::AllForced).unwrap().corruptions_left(), 0);
    let content = read_all(&SHAPE.open(storage).unwrap());
    assert!(content[..500 * 4096].iter().all(|byte| *byte == 7));
}

/// An entry that names metadata is damage; to discard it must not discard the metadata too.
#[test]
fn an_entry_that_names_a_directory_frees_nothing() {
    for of in [|p: &Places| p.directory, |p: &Places| p.redundant] {
        let (memory, model) = filled();
        let p = places(&memory);
        for table in [p.table, p.copy] {
            put(&memory, table, (of(&p) / 512) as u32);
        }
        let directory = |p: &Places| {
            let mut bytes = [0; 512];
            memory.read_at(&mut bytes, HostOffset(of(p))).unwrap();
            bytes
        };
        let before = directory(&p);
        let disk = SHAPE.open(memory.clone()).unwrap();
        disk.discard(GuestOffset(0), 4096).unwrap_err();
        disk.flush().unwrap();
        assert!(directory(&p) == before, "the directory was changed");
        drop(disk);
        let storage: Arc<dyn Storage> = memory.clone();
        check(&storage, Repair::All).unwrap();
        let disk = SHAPE.open(memory.clone()).unwrap();
        disk.write_at(&[7; 4096], GuestOffset(0)).unwrap();
        disk.close().unwrap();
        assert!(directory(&p) == before, "the directory was changed");
        let disk = SHAPE.open(memory.clone()).unwrap();
        assert!(read_all(&disk)[9216..] == model[9216..], "content");
    }
}

#[test]
fn bytes_without_an_entry_are_given_back() {
    let (memory, mut model) = filled();
    let p = places(&memory);
    for table in [p.table, p.copy] {
        put(&memory, table, 0);
    }
    model[..4096].fill(0);
    repair(&memory, &model, false, "a grain without an entry");
}

/// After a crash the copies may be stale: no damage, and repaired with the leaks.
#[test]
fn copies_that_are_behind_after_a_crash_are_no_damage() {
    let (memory, model) = filled();
    let p = places(&memory);
    put(&memory, p.copy, 0);
    memory.write_at(&[1], HostOffset(field::UNCLEAN)).unwrap();
    let storage: Arc<dyn Storage> = memory.clone();
    let report = check(&storage, Repair::Leaks).unwrap();
    assert!(report.corruptions == 0 && report.leaks == 2, "{:#?}", report.findings);
    assert!(report.findings.iter().all(|f| f.severity == Severity::Leak && f.repaired));
    audit(&storage, true, "repaired");
    assert!(read_all(&SHAPE.open(storage).unwrap()) == model);
}

/// Opening such an image for writing updates the copies, and closing marks it clean.
#[test]
fn opening_for_writing_after_a_crash_mends_the_copies() {
    let (memory, mut model) = filled();
    let p = places(&memory);
    put(&memory, p.copy + 8, 0);
    put(&memory, p.copy + 400, 99);
    memory.write_at(&[1], HostOffset(field::UNCLEAN)).unwrap();
    let storage: Arc<dyn Storage> = memory.clone();
    let disk = SHAPE.open(storage.clone()).unwrap();
    assert_eq!(disk.warnings().count(), 0);
    disk.write_at(&[0x44; 512], GuestOffset(0)).unwrap();
    model[..512].fill(0x44);
    disk.close().unwrap();
    audit(&storage, true, "closed");
    assert!(read_all(&SHAPE.open(storage.clone()).unwrap()) == model);
    // Damage that cannot be judged keeps the unclean mark.
    put(&memory, p.table, 0x00ff_ffff);
    memory.write_at(&[1], HostOffset(field::UNCLEAN)).unwrap();
    let disk = SHAPE.open(storage).unwrap();
    assert!(disk.warnings().any(|warning| warning.contains("not closed cleanly")));
    disk.close().unwrap();
    let mut mark = [0];
    memory.read_at(&mut mark, HostOffset(field::UNCLEAN)).unwrap();
    assert_eq!(mark, [1]);
}
