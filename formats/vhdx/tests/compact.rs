//! Compaction in place: the guest content is unchanged, the file is shorter, and a power cut at any
//! moment leaves the old or new state of each block.

mod common;

use std::sync::Arc;

use common::{Kind, MIB, Op, apply, for_seeds, random_op, same, sound};
use vdkit_block::{
    CompactOptions, CompactReport, Compaction, FormatDriver, GuestOffset, HostOffset, Limits,
    OfflineImage, Storage,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng};
use vdkit_vhdx::VhdxDriver;

fn compact(storage: &Arc<dyn Storage>, zero_scan: bool) -> CompactReport {
    let options = CompactOptions::default().zero_scan(zero_scan);
    VhdxDriver.compact(&OfflineImage::new(storage), options).expect("compacting")
}

/// An image with data, written zeroes and gaps in its file, and its guest content.
fn used(kind: &Kind, rng: &mut Rng) -> (MemoryStorage, Vec<u8>) {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    kind.create(&storage);
    let mut guest = kind.guest();
    let disk = kind.open(&storage, true).expect("opening");
    let size = guest.len() as u64;
    for id in 0..25 {
        let op = random_op(rng, size, false);
        if !matches!(op, Op::Reopen | Op::Abandon) {
            apply(&disk, &mut guest, op, id + 1).expect("an operation");
        }
    }
    // Blocks of written zeroes.
    disk.write_at(&vec![0; 2 << 20], GuestOffset(2 * MIB)).expect("writing");
    guest[2 << 20..4 << 20].fill(0);
    disk.close().expect("closing");
    (MemoryStorage::clone(&memory), guest)
}

#[test]
fn blocks_move_into_gaps_and_zeroes_go() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    common::create(&storage, 16 * MIB, "block_size=1M", None);
    let open = |writable| {
        common::disk_of(common::open_format(&storage, writable).expect("opening"), writable)
    };
    let disk = open(true);
    let mut guest = vec![0; 16 << 20];
    for block in 0..16u8 {
        let at = usize::from(block) << 20;
        guest[at + 100..at + 5000].fill(if block == 9 { 0 } else { block + 1 });
        disk.write_at(&guest[at..at + 8192], GuestOffset(at as u64)).expect("writing");
    }
    disk.close().expect("closing");
    drop(disk);
    let disk = open(true);
    for block in [1u64, 4, 5] {
        disk.discard(GuestOffset(block * MIB), MIB).expect("discarding");
        guest[(block as usize) << 20..(block as usize + 1) << 20].fill(0);
    }
    disk.close().expect("closing");
    drop(disk);
    assert_eq!(storage.len().expect("length"), 20 * MIB, "gaps in the middle stay");
    let report = compact(&storage, true);
    assert_eq!((report.zero_clusters, report.moved_clusters), (1, 4), "{report:?}");
    assert_eq!((report.length_before, report.length_after), (20 * MIB, 16 * MIB));
    same(&open(false), &guest, "compacted");
    sound(&storage, false, "compacted");
    let again = compact(&storage, true);
    assert_eq!((again.moved_clusters, again.length_after), (0, 16 * MIB));
}

#[test]
fn every_kind_reads_as_before() {
    for_seeds(2, |seed| {
        for kind in Kind::all() {
            let mut rng = Rng::new(seed);
            let (image, guest) = used(&kind, &mut rng);
            for zero_scan in [false, true] {
                let storage: Arc<dyn Storage> = Arc::new(image.clone());
                let report = compact(&storage, zero_scan);
                assert!(report.length_after <= report.length_before, "{kind:?}: {report:?}");
                sound(&storage, false, "compacted");
                let disk = kind.open(&storage, true).expect("opening");
                same(&disk, &guest, &format!("{kind:?}"));
                disk.write_at(&[5; 3 << 20], GuestOffset(MIB)).expect("writing on");
                disk.close().expect("closing");
                drop(disk);
                sound(&storage, false, "written on");
            }
        }
    });
}

#[test]
fn a_power_cut_leaves_each_block_in_one_place() {
    for_seeds(1, |seed| {
        for kind in Kind::all() {
            let mut rng = Rng::new(seed);
            let (image, guest) = used(&kind, &mut rng);
            let crash = CrashStorage::holding(&image);
            compact(&(crash.clone() as Arc<dyn Storage>), true);
            let all = crash.ops();
            for _ in 0..25 {
                let cut = crash.crash_at(rng.below(all as u64 + 1) as usize);
                for survivor in [cut.only_durable(), cut.everything(), cut.survivor(&mut rng)] {
                    let storage: Arc<dyn Storage> = Arc::new(survivor);
                    same(&kind.open(&storage, false).expect("opening"), &guest, "cut");
                    sound(&storage, true, "cut");
                    compact(&storage, true);
                    same(&kind.open(&storage, false).expect("opening"), &guest, "done again");
                    sound(&storage, false, "done again");
                }
            }
        }
    });
}

/// Other programs refuse to read an image with a log that must be replayed.
#[test]
fn a_compaction_that_fails_leaves_no_log_to_replay() {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    common::create(&storage, 40 * MIB, "block_size=1M", None);
    let open = |storage: &Arc<dyn Storage>, writable| {
        common::disk_of(common::open_format(storage, writable).expect("opening"), writable)
    };
    let mut guest = vec![0; 40 << 20];
    let disk = open(&storage, true);
    for block in 0..40 {
        guest[block << 20..][..4096].fill(block as u8 + 1);
        disk.write_at(&[block as u8 + 1; 4096], GuestOffset((block << 20) as u64)).expect("write");
    }
    disk.discard(GuestOffset(0), 20 * MIB).expect("discarding");
    guest[..20 << 20].fill(0);
    disk.close().expect("closing");
    drop(disk);
    let mut failed = 0;
    for nth in 0.. {
        let faulty = FaultyStorage::new(Arc::new(MemoryStorage::clone(&memory)));
        let storage: Arc<dyn Storage> = faulty.clone();
        faulty.arm(FaultPlan::nth(&[FaultKind::Read], nth));
        let done = VhdxDriver.compact(&OfflineImage::new(&storage), CompactOptions::default());
        assert_eq!(done.is_err(), faulty.fired() > 0, "read {nth}");
        faulty.heal();
        let info = VhdxDriver.describe(&storage, &Limits::default()).expect("describing");
        assert!(!info.dirty, "read {nth}");
        sound(&storage, true, "after a failed compaction");
        if done.is_ok() {
            break;
        }
        failed += 1;
        if nth % 8 == 0 {
            same(&open(&storage, false), &guest, "after a failed compaction");
        }
    }
    assert!(failed > 20, "{failed}");
}

#[test]
fn damage_is_refused() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    common::create(&storage, 4 * MIB, "block_size=1M", None);
    // Two entries that name one block.
    storage.set_len(6 * MIB).expect("longer");
    for index in 0..2u64 {
        let entry = ((5 * MIB) | 6).to_le_bytes();
        storage.write_at(&entry, HostOffset(3 * MIB + index * 8)).expect("damage");
    }
    let options = CompactOptions::default().zero_scan(true);
    let result = VhdxDriver.compact(&OfflineImage::new(&storage), options);
    let error = result.expect_err("refused").to_string();
    assert!(error.contains("over another one"), "{error}");
}
