//! Images with a parent.

mod support;

use std::path::Path;
use std::sync::Arc;

use support::{DYNAMIC, HEADER, Shared, TABLE, create_over, get, put, sum, written};
use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, GuestOffset, HostOffset, Limits, Options,
    Repair, Storage,
};
use vdkit_chain::Disk;
use vdkit_storage::{CreateMode, FileOptions, FileStorage, MemoryStorage};
use vdkit_testbase::{
    CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng, libvhdi_reads, read_all,
};
use vdkit_vhd::VhdDriver;

fn open(child: &Shared, base: &Shared, writable: bool) -> Disk {
    let base = DYNAMIC.open(base, false).unwrap();
    DYNAMIC.open(child, writable).unwrap().over(base)
}

fn child_of(base: &Shared) -> Shared {
    let child: Shared = Arc::new(MemoryStorage::new("child"));
    create_over(&child, base, "base.vhd").unwrap();
    child
}

/// A random write to the disk and the model.
fn write(disk: &Disk, model: &mut [u8], rng: &mut Rng, op: u8) {
    let at = rng.below(model.len() as u64);
    let len =
        (1 + rng.below([300, 5000, 3 << 20][usize::from(op) % 3])).min(model.len() as u64 - at);
    let range = at as usize..(at + len) as usize;
    if rng.chance(1, 5) {
        disk.write_zeroes(GuestOffset(at), len, rng.chance(1, 2)).unwrap();
        model[range].fill(0);
    } else {
        disk.write_at(&vec![op | 1; len as usize], GuestOffset(at)).unwrap();
        model[range].fill(op | 1);
    }
}

#[test]
fn what_the_child_does_not_hold_is_its_parents() {
    let base = written();
    let child = child_of(&base);
    assert_eq!(DYNAMIC.found(&child, Repair::Nothing), (0, 0));
    let mut model = DYNAMIC.content(&base);
    let mut rng = Rng::new(9);
    for round in 0..6 {
        let disk = open(&child, &base, true);
        for op in 0..12 {
            write(&disk, &mut model, &mut rng, op * 7 + round);
        }
        assert!(read_all(&disk) == model, "round {round}");
        disk.close().unwrap();
        assert_eq!(DYNAMIC.found(&child, Repair::Nothing), (0, 0), "round {round}");
        assert!(read_all(&open(&child, &base, false)) == model, "round {round}, read again");
    }
}

/// A partial write copies the rest of a sector from the parent, not of a block.
#[test]
fn a_small_write_copies_a_sector_at_most() {
    let base = written();
    let child = child_of(&base);
    let disk = open(&child, &base, true);
    disk.write_at(&[9; 100], GuestOffset((1 << 21) + 1100)).unwrap();
    disk.close().unwrap();
    let alone = DYNAMIC.open(&child, false).unwrap();
    let place = alone.top().resolve(GuestOffset((1 << 21) + 1024), 4096).unwrap();
    assert_eq!(place.len, 512);
    assert!(child.allocated_bytes().unwrap() < 64 << 10);
}

/// Changed bitmaps are never evicted.
#[test]
fn bitmaps_are_bounded_under_a_guest_that_never_flushes() {
    const BLOCK: u64 = 1 << 30;
    const BITMAP: u64 = BLOCK / 512 / 8;
    const KEPT_BYTES_MAX: u64 = 8 << 20;
    let blocks = 3 * KEPT_BYTES_MAX / BITMAP;
    let base: Shared =
        Arc::new(vdkit_testbase::trials::Trial { guest_bytes: blocks * BLOCK, ..DYNAMIC }.image());
    let child = child_of(&base);
    put(&child, HEADER + 32, BLOCK as u32);
    sum(&child, HEADER, 1024, 36);
    let disk = open(&child, &base, true);
    for block in 0..blocks {
        disk.write_at(&[7; 512], GuestOffset(block * BLOCK)).unwrap();
    }
    let in_memory = (0..blocks).filter(|block| {
        let word = get(&child, TABLE + block * 4);
        word == u32::MAX || get(&child, u64::from(word) * 512) == 0
    });
    let in_memory = in_memory.count() as u64 * BITMAP;
    assert!(in_memory <= KEPT_BYTES_MAX, "{in_memory} bytes of changed bitmaps");
    disk.close().unwrap();
}

#[test]
fn a_power_cut_leaves_each_sector_old_or_new() {
    let base = written();
    let before = DYNAMIC.content(&base);
    let crash = CrashStorage::holding(&*child_of(&base));
    let child: Shared = crash.clone();
    let disk = open(&child, &base, true);
    disk.write_at(&[0x41; 3000], GuestOffset(512 * 7)).unwrap();
    disk.flush().unwrap();
    let flushed = crash.ops();
    disk.write_at(&[0x42; 2048], GuestOffset(512 * 8)).unwrap();
    disk.write_at(&[0x43; 700], GuestOffset((2 << 21) + 1000)).unwrap();
    disk.flush().unwrap();
    disk.close().unwrap();
    let after = read_all(&open(&child, &base, false));
    let mut between = before.clone();
    between[512 * 7..512 * 7 + 3000].fill(0x41);
    let mut rng = Rng::new(3);
    crash.for_each_crash(|ops, image| {
        for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
            let child: Shared = Arc::new(survivor);
            assert_eq!(DYNAMIC.found(&child, Repair::Nothing).0, 0, "after {ops} changes");
            let now = read_all(&open(&child, &base, false));
            for (n, sector) in now.chunks(512).enumerate() {
                let range = n * 512..n * 512 + 512;
                let old = if ops < flushed { &before } else { &between };
                let fits =
                    [old, &between, &after].iter().any(|state| state[range.clone()] == *sector);
                assert!(fits, "sector {n} after {ops} changes");
            }
        }
    });
}

#[test]
fn any_call_may_fail() {
    let base = written();
    let before = DYNAMIC.content(&base);
    for nth in 0.. {
        let faulty = FaultyStorage::new(child_of(&base));
        let child: Shared = faulty.clone();
        let disk = open(&child, &base, true);
        faulty.arm(FaultPlan::nth(&FaultKind::ALL, nth));
        let one = disk.write_at(&[0x51; 5000], GuestOffset(1000)).is_ok();
        let two = disk.write_at(&[0x52; 5000], GuestOffset(9 << 20)).is_ok();
        let kept = disk.flush().is_ok();
        let _ = disk.close();
        let fired = faulty.fired() > 0;
        faulty.heal();
        assert_eq!(DYNAMIC.found(&child, Repair::Nothing).0, 0, "fault {nth}");
        let now = read_all(&open(&child, &base, false));
        for (done, at, byte) in [(one, 1000, 0x51), (two, 9 << 20, 0x52)] {
            let new = now[at..at + 5000].iter().filter(|b| **b == byte).count();
            assert!(!(done && kept) || new == 5000, "fault {nth}: {new} bytes at {at}");
            assert!(now[at - 1] == before[at - 1] && now[at + 5000] == before[at + 5000], "{nth}");
        }
        if !fired {
            break;
        }
    }
}

#[test]
fn parents_are_told_by_name_and_unique_id() {
    let base = written();
    let id = VhdDriver.describe(&base, &Limits::default()).unwrap().identity;
    for (name, stored) in [
        ("base.vhd", "base.vhd"),
        ("./sub/base.vhd", "sub/base.vhd"),
        ("../base.vhd", "../base.vhd"),
        ("/srv/a b/base.vhd", "/srv/a b/base.vhd"),
    ] {
        let child: Shared = Arc::new(MemoryStorage::new("child"));
        create_over(&child, &base, name).unwrap();
        let info = VhdDriver.describe(&child, &Limits::default()).unwrap();
        assert_eq!(info.backing_file.as_deref(), Some(stored));
        assert_eq!(info.backing_format.as_deref(), Some("vpc"));
        assert_eq!(info.backing_identity, id);
        assert_ne!(info.identity, id);
    }
}

#[test]
fn a_parent_that_is_no_vhd_is_refused() {
    let storage: Shared = Arc::new(MemoryStorage::new("child"));
    let backing = Some(BackingRef::new("base.raw", Some("raw".to_owned())));
    let new = CreateRequest::new(storage, 1 << 20, Options::default());
    let request = CreateRequest { backing, ..new };
    let error = VhdDriver.create(&request).unwrap_err().to_string();
    assert!(error.contains("unique ID"), "{error}");
}

#[test]
fn libvhdi_reads_the_same_from_all_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let save = |name: &str, storage: &Shared| {
        let path = dir.path().join(name);
        let mut bytes = vec![0; storage.len().unwrap() as usize];
        storage.read_at(&mut bytes, HostOffset(0)).unwrap();
        let new = FileOptions::read_write().create(CreateMode::New);
        FileStorage::open(&path, &new).unwrap().write_at(&bytes, HostOffset(0)).unwrap();
        path
    };
    let base = written();
    let child = child_of(&base);
    let mut model = DYNAMIC.content(&base);
    let disk = open(&child, &base, true);
    let mut rng = Rng::new(31);
    for op in 0..20_u8 {
        // libvhdi does not mask the bits: it takes the sectors after a present one, up to the next
        // multiple of eight, as present too.
        let at = rng.below(model.len() as u64) & !4095;
        let len = (rng.below(400_000) + 1).next_multiple_of(4096).min(model.len() as u64 - at);
        disk.write_at(&vec![op | 1; len as usize], GuestOffset(at)).unwrap();
        model[at as usize..(at + len) as usize].fill(op | 1);
    }
    disk.close().unwrap();
    let fixed: Shared = Arc::new(support::FIXED.image());
    let disk = support::FIXED.open(&fixed, true).unwrap();
    disk.write_at(&[7; 70_000], GuestOffset(12345)).unwrap();
    disk.close().unwrap();

    let raw = dir.path().join("raw");
    let reads = |content: &[u8], images: &[&Path], what: &str| {
        std::fs::write(&raw, content).unwrap();
        libvhdi_reads(&raw, images, what);
    };
    let base_path = save("base.vhd", &base);
    reads(&DYNAMIC.content(&base), &[&base_path], "dynamic");
    reads(&model, &[&save("child.vhd", &child), &base_path], "differencing");
    let content = support::FIXED.content(&fixed);
    assert!(content[12345..12345 + 70_000].iter().all(|byte| *byte == 7), "fixed");
    reads(&content, &[&save("fixed.vhd", &fixed)], "fixed");
}
