//! Differencing images: their parent locators, and changes of them.

mod common;

use std::sync::Arc;

use common::{
    Kind, MIB, amend, apply, check, create, disk_of, open_format, parent_ref, same, sound,
};
use vdkit_block::{
    BackingRef, CreateRequest, Creation, Error, FormatDriver, GuestOffset, Limits, Options, Place,
    Repair, Storage,
};
use vdkit_storage::MemoryStorage;
use vdkit_vhdx::VhdxDriver;

fn new(size: u64, options: &str, parent: Option<BackingRef>) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    create(&storage, size, options, parent);
    storage
}

fn describe(storage: &Arc<dyn Storage>) -> vdkit_block::ImageInfo {
    VhdxDriver.describe(storage, &Limits::default()).expect("describing")
}

#[test]
fn a_child_names_its_parent_and_its_identity() {
    let info = describe(&new(MIB, "", Some(parent_ref())));
    assert_eq!(info.backing_file.as_deref(), Some("parent.vhdx"));
    assert_eq!(info.backing_format.as_deref(), Some("vhdx"));
    assert_eq!(info.backing_identity, parent_ref().identity);
    assert_eq!(info.properties[0], ("subformat".to_owned(), "differencing".to_owned()));
}

#[test]
fn a_child_of_something_else_is_refused() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    for backing in [
        BackingRef { format: Some("raw".to_owned()), ..parent_ref() },
        BackingRef { identity: None, ..parent_ref() },
    ] {
        let new = CreateRequest::new(storage.clone(), MIB, Options::default());
        let request = CreateRequest { backing: Some(backing), ..new };
        let error = VhdxDriver.create(&request).expect_err("refused");
        assert!(matches!(error, Error::Unsupported { .. } | Error::Invalid { .. }), "{error}");
    }
}

#[test]
fn the_identity_changes_with_the_first_write_of_each_opening() {
    let storage = new(4 * MIB, "block_size=1M", None);
    let mut seen = vec![describe(&storage).identity];
    for round in 0..4 {
        let disk = disk_of(open_format(&storage, true).expect("opening"), true);
        assert_eq!(describe(&storage).identity, seen[seen.len() - 1], "opening changes nothing");
        if round == 2 {
            // Read-only use.
            disk.flush().expect("flushing");
            disk.close().expect("closing");
            assert_eq!(describe(&storage).identity, seen[seen.len() - 1]);
            continue;
        }
        // From the second round on, also for writes in place.
        disk.write_at(&[round; 512], GuestOffset(0)).expect("writing");
        let now = describe(&storage).identity;
        assert!(!seen.contains(&now));
        disk.write_at(&[round; 512], GuestOffset(512)).expect("writing");
        disk.close().expect("closing");
        assert_eq!(describe(&storage).identity, now, "once an opening");
        seen.push(now);
    }
}

#[test]
fn a_write_makes_its_own_sectors_the_childs() {
    let kind = Kind { options: "block_size=1M", parent: Some(4 * MIB), size: 4 * MIB };
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    kind.create(&storage);
    let disk = kind.open(&storage, true).expect("opening");
    disk.write_at(&[9; 100], GuestOffset(MIB + 700)).expect("writing");
    disk.write_at(&vec![8; 1 << 20], GuestOffset(2 * MIB)).expect("writing");
    let top = disk.top();
    let place = |at: u64, len: u64| {
        let extent = top.resolve(GuestOffset(at), len).expect("resolving");
        (extent.len, matches!(extent.place, Place::Data { .. }))
    };
    assert_eq!(place(MIB, MIB), (512, false));
    assert_eq!(place(MIB + 512, MIB), (512, true));
    assert_eq!(place(MIB + 1024, MIB - 1024), (MIB - 1024, false));
    assert_eq!(place(2 * MIB, MIB), (MIB, true));
    let mut guest = kind.guest();
    guest[(1 << 20) + 700..(1 << 20) + 800].fill(9);
    guest[2 << 20..3 << 20].fill(8);
    same(&disk, &guest, "sectors");
    // The table, a bitmap for the partial block, and two blocks.
    disk.close().expect("closing");
    assert_eq!(storage.len().expect("length"), 7 * MIB);
}

#[test]
fn an_emptied_child_is_its_parent_again() {
    let kind = Kind { options: "block_size=1M", parent: Some(4 * MIB), size: 4 * MIB };
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    kind.create(&storage);
    let length = storage.len().expect("length");
    let disk = kind.open(&storage, true).expect("opening");
    let mut guest = kind.guest();
    for (id, at) in [(1, 100), (2, MIB + 5), (3, 3 * MIB)] {
        let op = common::Op::Write { at, len: 70_000 };
        apply(&disk, &mut guest, op, id).expect("writing");
    }
    disk.write_zeroes(GuestOffset(2 * MIB), MIB, true).expect("zeroing");
    disk.empty().expect("emptying");
    same(&disk, &kind.guest(), "emptied");
    disk.close().expect("closing");
    drop(disk);
    sound(&storage, false, "emptied");
    assert_eq!(storage.len().expect("length"), length);
}

#[test]
fn a_parent_is_changed_removed_and_given_by_amending() {
    let kind = Kind { options: "block_size=1M", parent: Some(4 * MIB), size: 4 * MIB };
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    kind.create(&storage);
    let disk = kind.open(&storage, true).expect("opening");
    let mut alone = vec![0; 4 << 20];
    for (id, at) in [(1, 512), (2, MIB + 1024), (3, 3 * MIB)] {
        let bytes = common::pattern(id, at, 70_144);
        disk.write_at(&bytes, GuestOffset(at)).expect("writing");
        alone[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
    }
    disk.close().expect("closing");
    drop(disk);
    let other = BackingRef {
        name: "../elsewhere/with-a-much-longer-name.vhdx".to_owned(),
        identity: Some("ffffffff-89ab-cdef-0123-456789abcdef".to_owned()),
        ..parent_ref()
    };
    let identity = describe(&storage).identity;
    assert_eq!(amend(&storage, Some(other.clone())), ["backing"]);
    assert!(amend(&storage, Some(other.clone())).is_empty());
    let info = describe(&storage);
    assert_eq!(info.backing_file.as_deref(), Some(other.name.as_str()));
    assert_eq!(info.backing_identity, other.identity);
    assert_eq!(info.identity, identity, "the guest sees the same");
    // Without a parent, missing data reads as zero.
    assert_eq!(amend(&storage, None), ["backing"]);
    sound(&storage, false, "alone");
    assert_eq!(describe(&storage).backing_file, None);
    assert_eq!(describe(&storage).properties[0].1, "dynamic");
    same(&disk_of(open_format(&storage, true).expect("opening"), true), &alone, "alone");
    // With a parent again, which its zeroes hide.
    assert_eq!(amend(&storage, Some(parent_ref())), ["backing"]);
    sound(&storage, false, "on a parent again");
    same(&kind.open(&storage, false).expect("opening"), &alone, "on a parent again");
    assert_eq!(check(&storage, Repair::All).expect("checking").corruptions, 0);
}

#[test]
fn a_table_that_grows_out_of_its_region_moves() {
    let storage = new(4 * MIB, "block_size=1M", None);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    disk.write_at(&[5; 512], GuestOffset(3 * MIB)).expect("writing");
    disk.resize(300 << 30).expect("growing");
    disk.write_at(&[6; 512], GuestOffset((300 << 30) - 512)).expect("writing");
    disk.flush().expect("flushing");
    drop(disk);
    let disk = disk_of(open_format(&storage, true).expect("opening"), true);
    for (at, byte) in [(3 * MIB, 5), ((300 << 30) - 512, 6), (200 << 30, 0)] {
        let mut bytes = [1; 512];
        disk.read_at(&mut bytes, GuestOffset(at)).expect("reading");
        assert_eq!(bytes, [byte; 512], "{at:#x}");
    }
    disk.resize(2 * MIB).expect("shrinking");
    disk.close().expect("closing");
    drop(disk);
    sound(&storage, false, "shrunk again");
}
