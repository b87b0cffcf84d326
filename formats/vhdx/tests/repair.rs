//! Each kind of damage is reported with the violated rule, and repaired as far as possible.

mod common;

use std::sync::Arc;

use common::{MIB, check, create, disk_of, open_format, same};
use vdkit_block::{GuestOffset, HostOffset, Repair, Severity, Storage};
use vdkit_storage::MemoryStorage;

const TABLE: u64 = 3 * MIB;

/// An image of 8 blocks of 1 MiB, of which the first four hold data, and its guest content.
fn image() -> (Arc<dyn Storage>, Vec<u8>) {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 8 * MIB, "block_size=1M", None);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    let mut guest = vec![0; 8 << 20];
    for block in 0..4 {
        let at = block << 20;
        guest[at..at + 5000].fill(block as u8 + 1);
        disk.write_at(&guest[at..at + 5000], GuestOffset(at as u64)).expect("writing");
    }
    disk.close().expect("closing");
    (storage, guest)
}

fn entry(storage: &Arc<dyn Storage>, index: u64) -> u64 {
    let mut word = [0; 8];
    storage.read_at(&mut word, HostOffset(TABLE + index * 8)).expect("reading");
    u64::from_le_bytes(word)
}

fn set_entry(storage: &Arc<dyn Storage>, index: u64, value: u64) {
    storage.write_at(&value.to_le_bytes(), HostOffset(TABLE + index * 8)).expect("writing");
}

/// Damages an image: the damage is reported at this offset with this rule, and `repair` fixes it.
fn told_and_mended(
    damage: impl Fn(&Arc<dyn Storage>, &mut [u8]),
    offset: u64,
    rule: &str,
    severity: Severity,
    repair: Repair,
) {
    let (storage, mut guest) = image();
    damage(&storage, &mut guest);
    let report = check(&storage, Repair::Nothing).expect("checking");
    let found = report.findings.iter().find(|f| f.offset == offset && f.message.contains(rule));
    let found = found.unwrap_or_else(|| panic!("{rule} at {offset:#x}: {:#?}", report.findings));
    assert_eq!(found.severity, severity);
    let repaired = check(&storage, repair).expect("repairing");
    assert_eq!(repaired.corruptions_left() + repaired.leaks_left(), 0, "{rule}: {repaired:#?}");
    assert!(repaired.findings.iter().any(|f| f.offset == offset && f.repaired), "{repaired:#?}");
    let again = check(&storage, Repair::Nothing).expect("checking");
    assert!(again.findings.is_empty(), "{rule}: {:#?}", again.findings);
    same(&disk_of(open_format(&storage, false).expect("opening"), false), &guest, rule);
}

#[test]
fn one_of_two_headers() {
    // Either header may be the last written one, so both are tested.
    for offset in [64 << 10, 128 << 10] {
        told_and_mended(
            |storage, _| storage.write_at(&[0xee; 100], HostOffset(offset)).expect("damage"),
            offset,
            "[2.2.2]",
            Severity::Leak,
            Repair::All,
        );
    }
}

#[test]
fn one_of_two_region_tables() {
    for offset in [192 << 10, 256 << 10] {
        told_and_mended(
            |storage, _| storage.write_at(&[0xee; 100], HostOffset(offset + 16)).expect("damage"),
            offset,
            "[2.2.3]",
            Severity::Leak,
            Repair::Leaks,
        );
    }
}

#[test]
fn entries_of_the_block_allocation_table() {
    let corrupt = Severity::Corruption;
    let at = |index: u64| TABLE + index * 8;
    let block = |guest: &mut [u8], n: usize| guest[n << 20..(n + 1) << 20].fill(0);
    // Reserved bits, and an offset in a state without one.
    told_and_mended(
        |s, _| set_entry(s, 0, entry(s, 0) | 8),
        at(0),
        "[2.5.1]",
        corrupt,
        Repair::All,
    );
    told_and_mended(|s, _| set_entry(s, 6, 5 << 20 | 2), at(6), "[2.5.1.1]", corrupt, Repair::All);
    // Undefined states of a block with space, and a state that is invalid without a parent.
    for state in [4, 5, 7] {
        told_and_mended(
            |s, _| set_entry(s, 1, entry(s, 1) & !7 | state),
            at(1),
            "[2.5.1.1]",
            corrupt,
            Repair::All,
        );
    }
    told_and_mended(|s, _| set_entry(s, 7, 5), at(7), "[2.5.1.1]", corrupt, Repair::All);
    // Beyond the end of the file, and overlapping another block.
    told_and_mended(
        |s, guest| {
            set_entry(s, 2, 900 << 20 | 6);
            block(guest, 2);
        },
        at(2),
        "behind the file's end [2.5.1]",
        corrupt,
        Repair::All,
    );
    told_and_mended(
        |s, guest| {
            set_entry(s, 3, entry(s, 0));
            block(guest, 3);
        },
        at(3),
        "over another one",
        corrupt,
        Repair::AllForced,
    );
    told_and_mended(
        |s, guest| {
            set_entry(s, 3, MIB | 6);
            block(guest, 3);
        },
        at(3),
        "log or regions",
        corrupt,
        Repair::AllForced,
    );
}

#[test]
fn space_that_nothing_refers_to() {
    told_and_mended(
        |s, _| {
            let end = s.len().expect("length");
            s.write_at(&[1; 4096], HostOffset(end + 2 * MIB)).expect("damage");
        },
        10 * MIB,
        "nothing refers to",
        Severity::Leak,
        Repair::Leaks,
    );
}

#[test]
fn a_repair_that_may_lose_data_wants_to_be_forced() {
    let (storage, _) = image();
    set_entry(&storage, 3, entry(&storage, 0));
    let report = check(&storage, Repair::All).expect("repairing");
    assert_eq!(report.corruptions_left(), 1);
    assert!(report.findings.iter().all(|f| !f.repaired));
}

#[test]
fn a_log_that_waits_is_replayed_by_a_repair() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, 8 * MIB, "block_size=1M", None);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    disk.write_at(&[9; 512], GuestOffset(MIB)).expect("writing");
    disk.flush().expect("flushing");
    drop(disk);
    // The page that the flush wrote in place is lost: only the log has it.
    set_entry(&storage, 1, 2);
    let mut guest = vec![0; 8 << 20];
    guest[1 << 20..(1 << 20) + 512].fill(9);
    same(&disk_of(open_format(&storage, false).expect("opening"), false), &guest, "by the log");
    assert_eq!(entry(&storage, 1), 2, "reading changes nothing");
    check(&storage, Repair::All).expect("repairing");
    assert_eq!(entry(&storage, 1) & 7, 6);
    same(&disk_of(open_format(&storage, false).expect("opening"), false), &guest, "replayed");
}
