//! Repairs that a power cut or an error interrupts: the image is no worse, and the next repair has
//! the same result as an uninterrupted one.

use std::sync::Arc;

use vdkit_block::{Limits, Monitor, Repair, Result, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng};

use super::support::{Image, check_storage, guest_view, kind, our_check, peers, qemu_check};
use crate::check;
use crate::layout::{COPIED, OFFSET_MASK};

type Damage = (&'static str, &'static str, fn(&Image));

/// One damage for each kind of repair.
const DAMAGES: &[Damage] = &[
    ("refcounts too low and too high", "refcounts-4", |image| {
        let entry = image.word(image.l2_entry(0)) & OFFSET_MASK;
        image.set_refcount(entry, 0);
        image.set_refcount(0, 3);
        image.append_cluster(2, 7);
        let at = image.l2_entry(1024);
        image.put_word(at, image.word(at) ^ COPIED);
    }),
    ("entries to let go", "refcounts-2", |image| {
        image.put_word(image.l2_entry(0), 1 << 44);
        image.put_word(image.l1(), image.word(image.l1()) | 1 << 58);
    }),
    ("a lost refcount table", "cluster-512", |image| image.put(56, &[0; 4])),
    ("data in the L1 table", "refcounts-4", |image| {
        image.put_word(image.l2_entry(0), image.l1() | COPIED);
    }),
    ("data in an L2 table", "refcounts-2", |image| {
        image.put_word(image.l2_entry(0), image.l2(0) | COPIED);
    }),
    ("data in an L2 table that dangles", "refcounts-2", |image| {
        image.put_word(image.l2_entry(0), image.l2(0) | COPIED);
        let end = image.len().next_multiple_of(4096);
        image.put_word(image.l2_entry(512 << 10), end | COPIED);
        image.put_word(image.l2_entry(516 << 10), (end + 8192) | COPIED);
    }),
    ("data in an L1 table that dangles", "refcounts-4", |image| {
        image.put_word(image.l2_entry(0), image.l1() | COPIED);
        let end = image.len().next_multiple_of(1024);
        let free = (0..32).find(|&i| image.l2(i) == 0).unwrap();
        image.put_word(image.l1() + free * 8, end | COPIED);
    }),
    ("data in a refcount block", "zstd", |image| {
        image.put_word(image.l2_entry(0), image.refcount(0).0 | COPIED);
    }),
    ("two snapshots with one L1 table", "refcounts-4", |image| {
        let table = image.header().snapshots_offset.0;
        let second = table + (40 + 24 + 1 + 5u64).next_multiple_of(8);
        image.put_word(second, image.word(table));
    }),
    ("a lost snapshot", "refcounts-2", |image| {
        image.put_word(image.header().snapshots_offset.0, 1 << 40);
    }),
];

/// All except discards, which are hints that may fail.
const CHANGES: [FaultKind; 4] =
    [FaultKind::Write, FaultKind::Zero, FaultKind::Sync, FaultKind::SetLen];

fn repair(storage: &Arc<dyn Storage>) -> Result<vdkit_block::CheckReport> {
    check_storage(storage, Repair::AllForced)
}

fn damaged(damage: &Damage) -> (Image, MemoryStorage) {
    let image = Image::make(kind(damage.1));
    damage.2(&image);
    let memory = image.memory();
    (image, memory)
}

/// Allowed content of each guest cluster: before or after the repair, or zeroes if it was lost.
struct Expected {
    before: Vec<Option<u64>>,
    after: Vec<Option<u64>>,
}

impl Expected {
    fn assert_no_worse(&self, storage: &dyn Storage, what: &str) {
        let view = guest_view(storage);
        for (i, now) in view.iter().enumerate() {
            let fine = *now == self.before[i] || *now == self.after[i] || self.before[i].is_none();
            assert!(
                fine,
                "{what}: guest cluster {i} is {now:?}, was {:?}, should become {:?}",
                self.before[i], self.after[i]
            );
        }
    }

    fn assert_mended(&self, storage: &Arc<dyn Storage>, image: &Image, what: &str) {
        let report = repair(storage).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(
            (report.corruptions_left(), report.leaks_left()),
            (0, 0),
            "{what}: {:#?}",
            report.findings
        );
        assert_eq!(guest_view(&**storage), self.after, "{what}");
        image.assert_sound_for_qemu(&**storage, what);
    }
}

fn expected(memory: &MemoryStorage) -> Expected {
    let storage: Arc<dyn Storage> = Arc::new(memory.clone());
    let before = guest_view(&*storage);
    let report = repair(&storage).unwrap();
    assert!(report.corruptions_fixed > 0 && report.corruptions_left() == 0);
    Expected { before, after: guest_view(&*storage) }
}

#[test]
fn a_power_cut_at_any_point_of_a_repair_leaves_nothing_worse() {
    if !peers() {
        return;
    }
    let mut rng = Rng::from_env(3);
    for damage in DAMAGES {
        let (image, memory) = damaged(damage);
        let expected = expected(&memory);
        let crash = CrashStorage::holding(&memory);
        repair(&(Arc::clone(&crash) as Arc<dyn Storage>)).unwrap();
        println!("{}: {} changes, seed {}", damage.0, crash.ops(), rng.seed());
        crash.for_each_crash(|ops, moment| {
            let mut survivors = vec![moment.only_durable(), moment.everything()];
            if moment.unsynced() > 1 {
                survivors.push(moment.survivor(&mut rng));
                survivors.push(moment.survivor(&mut rng));
            }
            for (i, survivor) in survivors.into_iter().enumerate() {
                let what = format!("{} after {ops} changes, survivor {i}", damage.0);
                let survivor: Arc<dyn Storage> = Arc::new(survivor);
                expected.assert_no_worse(&*survivor, &what);
                expected.assert_mended(&survivor, &image, &what);
            }
        });
    }
}

#[test]
fn an_error_at_any_point_of_a_repair_leaves_nothing_worse() {
    if !peers() {
        return;
    }
    for damage in DAMAGES {
        let (image, memory) = damaged(damage);
        let expected = expected(&memory);
        for nth in 0.. {
            for plan in [
                FaultPlan::nth(&CHANGES, nth),
                FaultPlan::nth(&CHANGES, nth).no_space().lasting().torn(3),
            ] {
                let what = format!("{}, change {nth}: {plan:?}", damage.0);
                let copy = Arc::new(memory.clone());
                let faulty = FaultyStorage::new(Arc::clone(&copy) as Arc<dyn Storage>);
                faulty.arm(plan);
                let result = repair(&(Arc::clone(&faulty) as Arc<dyn Storage>));
                if faulty.fired() == 0 {
                    assert!(result.is_ok(), "{what}");
                    continue;
                }
                assert!(result.is_err(), "{what}");
                expected.assert_no_worse(&*copy, &what);
                expected.assert_mended(&(copy as Arc<dyn Storage>), &image, &what);
            }
            let faulty = FaultyStorage::new(Arc::new(memory.clone()) as Arc<dyn Storage>);
            faulty.arm(FaultPlan::nth(&CHANGES, nth));
            let _ = repair(&(Arc::clone(&faulty) as Arc<dyn Storage>));
            if faulty.fired() == 0 {
                break;
            }
        }
    }
}

#[test]
fn recovery_sets_refcounts_right_and_refuses_more() {
    if !peers() {
        return;
    }
    let recover = |image: &Image| {
        let storage = super::support::open(&image.path);
        check::rebuild_refcounts(&storage, &Limits::default(), &Monitor::default())
    };
    let image = Image::make(kind("lazy"));
    let sound = image.copy();
    image.put(79, &[1]);
    image.set_refcount(image.word(image.l2_entry(0)) & OFFSET_MASK, 0);
    image.append_cluster(1, 7);
    // A refcount block that never reached the disk.
    let table = image.header().refcount_table_offset.0;
    let block = image.word(table);
    image.put_word(table, 0);
    recover(&image).unwrap();
    assert_eq!(image.bytes(79, 1), [0]);
    assert_ne!(image.header().refcount_table_offset.0, table);
    assert_eq!(qemu_check(&image.path).exit, 0);
    assert!(super::support::same_guest(&image.path, &sound.path));

    let image = sound.copy();
    image.put(79, &[1]);
    image.set_refcount(block, 3);
    recover(&image).unwrap();
    assert_eq!(image.bytes(79, 1), [0]);
    assert_eq!(image.get_refcount(block), 1);

    let image = sound.copy();
    image.put(79, &[1]);
    image.put_word(image.l1(), image.word(image.l1()) | 512);
    let before = std::fs::read(&image.path).unwrap();
    let error = recover(&image).unwrap_err();
    assert!(error.to_string().contains("L1"), "{error}");
    assert!(before == std::fs::read(&image.path).unwrap());
}

#[test]
fn a_device_is_not_grown() {
    if !peers() {
        return;
    }
    let (_, memory) = damaged(&DAMAGES[2]);
    let bytes = memory.to_vec();
    let full: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("device", &bytes).fixed_len());
    let error = repair(&full).unwrap_err();
    assert_eq!(error.kind(), vdkit_block::ErrorKind::NoSpace, "{error}");
    let mut roomy = bytes.clone();
    roomy.resize(bytes.len() + (1 << 20), 0xaa);
    let roomy: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("device", &roomy).fixed_len());
    let report = repair(&roomy).unwrap();
    assert_eq!((report.corruptions_left(), report.leaks_left()), (0, 0));
    assert_eq!(roomy.len().unwrap(), bytes.len() as u64 + (1 << 20));
    let image = Image::make(kind("plain"));
    assert_eq!(our_check(&image.path, Repair::Nothing).unwrap().leaks, 0);
}
