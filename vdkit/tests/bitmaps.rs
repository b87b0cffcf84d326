//! Dirty bitmaps: the cost of a flush, and marks after faults, power cuts and races.

#![allow(clippy::single_range_in_vec_init)] // lists of runs, of which there may be one

mod support;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use support::disks::{Survival, power_cut, survivors};
use support::guest::pattern;
use support::rig::{IntoGuest, Rig, disk};
use support::shape::{Content, Shape};
use vdkit_block::{
    BitmapStatus, Bitmaps, Format, Limits, NewBitmap, OpenRequest, Repair, Result, Storage,
    StorageExt,
};
use vdkit_chain::Disk;
use vdkit_qcow2::Qcow2;
use vdkit_qcow2::header::Header;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CrashClock, CrashStorage, FaultKind, FaultPlan, Rng, Watched};

const CLUSTER: u64 = 4096;

/// An image with two recording bitmaps: "dirt" with cluster granularity, "fine" with 512 bytes.
fn shape(content: Content) -> Shape {
    Shape { cluster: CLUSTER, bitmap: true, content, ..Shape::default() }
}

fn bitmaps(disk: &Disk) -> &dyn Bitmaps {
    disk.top().bitmaps().expect("a format with bitmaps")
}

fn dirty(bitmaps: &dyn Bitmaps, name: &str) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    let mut add = |run| {
        runs.push(run);
        Ok(())
    };
    bitmaps.for_each_dirty(name, &mut add).expect("a sound bitmap");
    runs
}

fn marks(runs: &[Range<u64>], at: u64, len: u64) -> bool {
    runs.iter().any(|run| run.start <= at && at + len <= run.end)
}

fn write(disk: &Disk, at: u64, len: u64) -> Result<()> {
    disk.write_at(&pattern(7, at, len), at.into_guest())
}

#[test]
fn a_flush_costs_one_barrier_more_at_most_and_only_for_new_marks() {
    for bitmap in [false, true] {
        let shape = Shape { bitmap, ..shape(Content::Filled) };
        let (rig, _) = Rig::new(&shape);
        let disk = rig.open(true).expect("opening");
        let syncs = |work: &dyn Fn()| {
            rig.image().counting().reset();
            work();
            disk.flush().expect("flushing");
            rig.image().counting().counts().syncs
        };
        let zero = |from: u64| {
            disk.write_zeroes((from * CLUSTER).into_guest(), 8 * CLUSTER, true).expect("zeroing");
        };
        zero(64);
        disk.flush().expect("flushing");
        let fill = |first: u64, clusters: u64| {
            for cluster in first..first + clusters {
                write(&disk, cluster * CLUSTER, 512).expect("writing");
            }
        };
        assert!(syncs(&|| fill(64, 8)) <= 2, "allocating");
        assert_eq!(syncs(&|| fill(64, 8)), 1, "in place, marked");
        let behind = || write(&disk, 64 * CLUSTER + 512, 512).expect("writing");
        assert_eq!(syncs(&behind), 1, "in place, new");
        // The reserved space's refcounts are durable now.
        zero(96);
        zero(128);
        disk.flush().expect("flushing");
        assert!(syncs(&|| fill(96, 1)) <= 2);
        let again = syncs(&|| fill(128, 1));
        assert!(again <= 2, "{again}");
        assert_eq!(syncs(&|| {}), 1);
        disk.close().expect("closing");
        drop(disk);
        rig.audit(false, "closed");
    }
}

#[test]
fn nothing_is_marked_that_was_not_written() {
    let (rig, _) = Rig::new(&shape(Content::Filled));
    let disk = rig.open(true).expect("opening");
    let size = disk.guest_bytes();
    let all = bitmaps(&disk);
    write(&disk, 1000, 10).expect("writing");
    write(&disk, 20 * CLUSTER + 511, 2).expect("writing");
    disk.discard((40 * CLUSTER).into_guest(), CLUSTER).expect("discarding");
    disk.write_zeroes((50 * CLUSTER).into_guest(), CLUSTER, false).expect("zeroing");
    write(&disk, size - 1, 1).expect("writing");
    let fine = [
        512..1024,
        20 * CLUSTER..20 * CLUSTER + 1024,
        40 * CLUSTER..41 * CLUSTER,
        50 * CLUSTER..51 * CLUSTER,
        size - 512..size,
    ];
    // Before a flush, after it, and in the file.
    assert_eq!(dirty(all, "fine"), fine);
    disk.flush().expect("flushing");
    assert_eq!(dirty(all, "fine"), fine);
    let last = size.next_multiple_of(CLUSTER) - CLUSTER;
    let coarse =
        [0..CLUSTER, 20 * CLUSTER..21 * CLUSTER, fine[2].clone(), fine[3].clone(), last..size];
    disk.close().expect("closing");
    drop(disk);
    let read_only = rig.open(false).expect("opening");
    assert_eq!(dirty(bitmaps(&read_only), "fine"), fine);
    assert_eq!(dirty(bitmaps(&read_only), "dirt"), coarse);
    rig.audit(false, "closed");
}

#[test]
fn everything_can_be_marked_at_once() {
    let (rig, _) = Rig::new(&shape(Content::Filled));
    let disk = rig.open(true).expect("opening");
    let all = bitmaps(&disk);
    all.set_enabled("fine", false).expect("disabling");
    write(&disk, 0, 512).expect("writing");
    all.mark_all_dirty().expect("marking");
    write(&disk, 5000, 512).expect("writing");
    assert_eq!(dirty(all, "dirt"), [0..disk.guest_bytes()]);
    assert!(dirty(all, "fine").is_empty());
    all.merge("fine", all, "dirt").expect("merging");
    assert_eq!(dirty(all, "fine"), [0..disk.guest_bytes()]);
    all.clear("dirt").expect("clearing");
    write(&disk, 5000, 512).expect("writing");
    assert_eq!(dirty(all, "dirt"), [CLUSTER..2 * CLUSTER]);
    disk.close().expect("closing");
    drop(disk);
    rig.audit(false, "closed");
    rig.ask_qemu(None, false, "closed");
}

/// Bitmap changes, in sequence.
const EDITS: [fn(&dyn Bitmaps) -> Result<()>; 8] = [
    |all| all.add(&NewBitmap { name: "new", granularity: Some(1024), enabled: false }),
    |all| all.merge("new", all, "fine"),
    |all| all.clear("fine"),
    |all| all.set_enabled("new", true),
    |all| all.remove("dirt"),
    |all| all.mark_all_dirty(),
    |all| all.remove("new"),
    |all| all.remove("fine"),
];

/// A write before each change.
fn edit(disk: &Disk, step: usize) -> Result<()> {
    write(disk, step as u64 * 3 * CLUSTER, 600)?;
    EDITS[step](bitmaps(disk))
}

fn list_of(rig: &Rig) -> Vec<BitmapStatus> {
    let format = rig.format(false).expect("opening");
    format.bitmaps().expect("a format with bitmaps").list().expect("a list")
}

#[test]
fn a_power_cut_leaves_the_old_or_the_new_bitmaps() {
    let clock = CrashClock::new();
    let (rig, _) = Rig::recording(&shape(Content::Filled), &clock);
    let disk = rig.open(true).expect("opening");
    let mut states = vec![(0, bitmaps(&disk).list().expect("a list"))];
    for (step, edit) in EDITS.iter().enumerate() {
        // The write is flushed before the change, so that states differ only in bitmaps.
        write(&disk, step as u64 * 3 * CLUSTER, 600).expect("writing");
        disk.flush().expect("flushing");
        states.push((clock.now(), bitmaps(&disk).list().expect("a list")));
        edit(bitmaps(&disk)).expect("editing");
        states.push((clock.now(), bitmaps(&disk).list().expect("a list")));
    }
    disk.close().expect("closing");
    let mut rng = Rng::new(3);
    for moment in 0..clock.now() {
        let before = states.iter().rposition(|(at, _)| *at <= moment).expect("the first");
        let allowed = &states[before..(before + 2).min(states.len())];
        for survival in [Survival::Nothing, Survival::Everything, Survival::Lot, Survival::Lot] {
            let cuts = power_cut(&rig.disks, moment);
            let rest = rig.with_content(survivors(&cuts, survival, &mut rng));
            let found = list_of(&rest);
            let names =
                |list: &[BitmapStatus]| -> Vec<_> { list.iter().map(|b| b.info.clone()).collect() };
            let fits = |(_, state): &(usize, Vec<BitmapStatus>)| names(state) == names(&found);
            assert!(
                allowed.iter().any(fits),
                "{moment} {survival:?}: {found:#?}, none of {allowed:#?}"
            );
            // Only some of the bits being set may be present.
            for bitmap in &found {
                let bytes = allowed.iter().flat_map(|(_, state)| state);
                let bytes = bytes.filter(|b| b.info.name == bitmap.info.name);
                let bytes: Vec<u64> = bytes.filter_map(|b| b.dirty_bytes).collect();
                let found = bitmap.dirty_bytes.expect("one that can be trusted");
                let (least, most) = (bytes.iter().min(), bytes.iter().max());
                assert!(
                    least <= Some(&found) && Some(&found) <= most,
                    "{moment}: {found} {bytes:?}"
                );
            }
            rest.audit(true, "a survivor");
        }
    }
}

#[test]
fn a_fault_at_any_call_leaves_bitmaps_that_can_be_trusted() {
    let kinds =
        [FaultKind::Read, FaultKind::Write, FaultKind::Zero, FaultKind::Sync, FaultKind::SetLen];
    for nth in 0.. {
        let (rig, _) = Rig::new(&shape(Content::Empty));
        let disk = rig.open(true).expect("opening");
        let faulty = rig.image().faulty();
        faulty.arm(FaultPlan::nth(&kinds, nth));
        let mut flushed = Vec::new();
        for (step, again) in EDITS.iter().enumerate().take(5) {
            // Repeat a failed change. The failed attempt may not have changed anything, or an
            // addition or a removal would fail now.
            if edit(&disk, step).is_err() {
                let again = again(bitmaps(&disk));
                assert!(again.is_ok(), "{nth} {step}: {again:?}");
            }
            let at = (100 + step as u64) * CLUSTER;
            if write(&disk, at, 512).is_ok() && disk.flush().is_ok() {
                flushed.push(at);
            }
        }
        let calls = faulty.matched();
        faulty.heal();
        disk.flush().expect("flushing");
        let after = 200 * CLUSTER;
        write(&disk, after, 1).expect("writing");
        disk.close().expect("closing");
        drop(disk);
        let read_only = rig.open(false).expect("opening");
        let list = bitmaps(&read_only).list().expect("a list");
        let names: Vec<&str> = list.iter().map(|b| b.info.name.as_str()).collect();
        assert_eq!(names, ["fine", "new"], "{nth}");
        assert!(list.iter().all(|b| !b.info.in_use && b.info.enabled), "{nth}: {list:?}");
        let fine = dirty(bitmaps(&read_only), "fine");
        // Cleared in the third step.
        for at in flushed.iter().filter(|at| **at >= 102 * CLUSTER).chain([&after]) {
            assert!(marks(&fine, *at, 1), "{nth}: {at:#x} is not among {fine:x?}");
        }
        rig.audit(true, "after a fault");
        if calls <= nth {
            assert!(nth > 60, "{nth} calls were failed");
            return;
        }
    }
}

/// The table of "fine" grows, so all bitmaps are invalid meanwhile. If the resize fails, the next
/// change of the directory must not declare them valid.
#[test]
fn a_resize_that_failed_leaves_no_bitmap_that_lies() {
    let kinds = [FaultKind::Read, FaultKind::Write, FaultKind::Zero, FaultKind::Sync];
    for nth in 0.. {
        let (rig, _) = Rig::new(&shape(Content::Empty));
        let disk = rig.open(true).expect("opening");
        let old = disk.guest_bytes();
        let faulty = rig.image().faulty();
        faulty.arm(FaultPlan::nth(&kinds, nth));
        let resized = disk.resize(old.next_multiple_of(16 << 20) + (16 << 20));
        let calls = faulty.matched();
        faulty.heal();
        let size = disk.guest_bytes();
        let at = size - CLUSTER;
        write(&disk, at, 512).expect("writing");
        let third = NewBitmap { name: "third", granularity: None, enabled: true };
        bitmaps(&disk).add(&third).expect("adding");
        write(&disk, at - CLUSTER, 512).expect("writing");
        disk.close().expect("closing");
        drop(disk);
        let read_only = rig.open(false).expect("opening");
        let list = bitmaps(&read_only).list().expect("a list");
        assert_eq!(list.len(), 3, "{nth}");
        for bitmap in list.iter().filter(|bitmap| !bitmap.info.in_use) {
            let name = bitmap.info.name.as_str();
            let found = dirty(bitmaps(&read_only), name);
            assert!(marks(&found, at - CLUSTER, 1), "{nth} {name}: {found:x?}");
            if name != "third" {
                assert!(marks(&found, at, 1), "{nth} {name}: {found:x?}");
                let grown = size > old;
                assert!(!grown || marks(&found, old, size - old), "{nth} {name}: {found:x?}");
            }
        }
        let trusted = list.iter().filter(|bitmap| !bitmap.info.in_use).count();
        assert!(trusted == 3 || resized.is_err(), "{nth}: {list:?}");
        rig.audit(true, "after a fault");
        if calls <= nth {
            assert!(nth > 10, "{nth} calls were failed");
            return;
        }
    }
}

#[test]
fn without_space_for_marks_everything_counts_as_marked() {
    // The disk is fully allocated, so that only the bitmaps need new clusters.
    let shape = Shape { preallocation: "full", ..shape(Content::Filled) };
    let (rig, _) = Rig::new(&shape);
    let disk = rig.open(true).expect("opening");
    let faulty = rig.image().faulty();
    let kinds = [FaultKind::SetLen, FaultKind::Allocate, FaultKind::Zero];
    faulty.arm(FaultPlan::nth(&kinds, 0).no_space().lasting());
    write(&disk, 5 * CLUSTER, 512).expect("writing in place");
    disk.flush().expect("flushing needs no space");
    faulty.heal();
    disk.close().expect("closing");
    drop(disk);
    let read_only = rig.open(false).expect("opening");
    for name in ["dirt", "fine"] {
        let found = dirty(bitmaps(&read_only), name);
        assert!(marks(&found, 5 * CLUSTER, 512), "{name}: {found:x?}");
    }
    rig.audit(true, "closed");
    rig.ask_qemu(None, true, "closed");
}

fn open(storage: Arc<dyn Storage>, writable: bool) -> Arc<Qcow2> {
    let limits = Limits::default();
    Qcow2::open(OpenRequest { storage, files: Vec::new(), writable, limits }).expect("opening")
}

#[test]
fn each_threads_flush_makes_its_own_marks_durable() {
    let prepared = shape(Content::Filled).prepare();
    let crash = CrashStorage::holding(&prepared.image);
    let storage: Arc<dyn Storage> = crash.clone();
    let disk = disk(open(storage, true), true);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|thread| {
                let (disk, crash) = (&disk, &crash);
                scope.spawn(move || {
                    let mut rng = Rng::new(thread);
                    for _ in 0..40 {
                        // Threads share pages and words, and sometimes bits.
                        let at = rng.below(disk.guest_bytes() / 512) * 512;
                        write(disk, at, 512).expect("writing");
                        disk.flush().expect("flushing");
                        let rest: Arc<dyn Storage> = Arc::new(crash.crash_now().only_durable());
                        let rest = open(rest, false);
                        let all = rest.bitmaps().expect("bitmaps");
                        for name in ["dirt", "fine"] {
                            assert!(marks(&dirty(all, name), at, 512), "{name} {at:#x}");
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let all = bitmaps(&disk);
            while !done.load(Ordering::Relaxed) {
                all.add(&NewBitmap { name: "x", granularity: None, enabled: true })
                    .expect("adding");
                all.merge("x", all, "fine").expect("merging");
                all.clear("x").expect("clearing");
                all.remove("x").expect("removing");
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(|end| end.is_ok()), "a writer failed");
    });
    disk.close().expect("closing");
    let rest: Arc<dyn Storage> = Arc::new(crash.crash_now().everything());
    let report = vdkit_qcow2::check::check(
        &rest,
        None,
        Repair::Nothing,
        &Limits::default(),
        &vdkit_block::Monitor::default(),
    );
    let report = report.expect("a check");
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{:#?}", report.findings);
}

#[test]
fn a_write_that_is_under_way_is_recorded_or_over_when_a_bitmap_has_been_added() {
    let (rig, _) = Rig::new(&shape(Content::Filled));
    let disk = rig.open(true).expect("opening");
    let all = bitmaps(&disk);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut rng = Rng::new(9);
            while !done.load(Ordering::Relaxed) {
                let at = rng.below(disk.guest_bytes() / 512) * 512;
                write(&disk, at, 512).expect("writing");
            }
        });
        for _ in 0..50 {
            let read = || {
                let mut bytes = vec![0; disk.guest_bytes() as usize];
                disk.read_at(&mut bytes, 0.into_guest()).expect("reading");
                bytes
            };
            all.add(&NewBitmap { name: "x", granularity: Some(512), enabled: true })
                .expect("adding");
            let before = read();
            let after = read();
            let runs = dirty(all, "x");
            for at in (0..disk.guest_bytes()).step_by(512) {
                let range = at as usize..at as usize + 512;
                let same = before[range.clone()] == after[range];
                assert!(same || marks(&runs, at, 512), "{at:#x}");
            }
            all.remove("x").expect("removing");
        }
        done.store(true, Ordering::Relaxed);
        writer.join().expect("the writer");
    });
    disk.close().expect("closing");
}

#[test]
fn a_bitmap_is_added_once_older_writes_have_ended() {
    let (rig, _) = Rig::new(&shape(Content::Empty));
    let disk = rig.open(true).expect("opening");
    let added = AtomicBool::new(false);
    let watched = Watched::default();
    std::thread::scope(|scope| {
        // One write has reserved space, one is about to write in place.
        let space = disk.top().reserve(0.into_guest(), 512).expect("reserving").expect("space");
        let guard = disk.top().in_flight().enter();
        let adder = scope.spawn(|| {
            watched.is_me();
            let new = NewBitmap { name: "x", granularity: None, enabled: true };
            bitmaps(&disk).add(&new).expect("adding");
            added.store(true, Ordering::SeqCst);
        });
        watched.until_it_waits();
        assert!(!added.load(Ordering::SeqCst), "with a reservation");
        drop(space);
        // Time to go on wrongly.
        std::thread::sleep(std::time::Duration::from_millis(60));
        assert!(!added.load(Ordering::SeqCst), "with a write in place");
        drop(guard);
        adder.join().expect("adding");
    });
    disk.close().expect("closing");
}

#[test]
fn bitmaps_without_sense_are_not_trusted_and_do_no_harm() {
    let prepared = shape(Content::Filled).prepare();
    let header = Header::read(&prepared.image, &Limits::default()).expect("a sound header");
    let directory = header.bitmaps().expect("bitmaps").directory_offset;
    let mut table = [0; 8];
    prepared.image.read_at(&mut table, directory).expect("memory");
    let table = u64::from_be_bytes(table);
    // Tables at the L1 table, at the header, outside the file; entries that point at the L1 table.
    let l1 = header.l1_offset.0;
    for (at, value) in
        [(directory.0, l1), (directory.0, 0), (directory.0, 1 << 50), (table, l1), (table, 0x300)]
    {
        let image: MemoryStorage = prepared.image.clone();
        image.write_at(&value.to_be_bytes(), vdkit_block::HostOffset(at)).expect("memory");
        let storage: Arc<dyn Storage> = Arc::new(image);
        let format = open(storage.clone(), true);
        assert!(format.warnings().iter().any(|w| w.contains("'dirt' is damaged")), "{value:#x}");
        let disk = disk(format, true);
        write(&disk, 0, 2 * CLUSTER).expect("writing");
        disk.close().expect("closing");
        drop(disk);
        let format = open(storage, false);
        let all = format.bitmaps().expect("bitmaps");
        let list = all.list().expect("a list");
        assert!(list[0].info.in_use && !list[1].info.in_use, "{value:#x}: {list:?}");
        assert_eq!(dirty(all, "fine"), [0..2 * CLUSTER]);
    }
}
