//! Each storage call of a run fails once: the error is reported, flushed data stays, the image is
//! sound, and writing continues.

mod common;

use std::sync::Arc;

use common::{Kind, Op, apply, for_seeds, random_op, same, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage, Rng, explained};

/// Runs operations; where one failed, the guest may hold old or new bytes.
fn run(kind: &Kind, seed: u64, plan: Option<FaultPlan>) -> u64 {
    let faulty = FaultyStorage::new(Arc::new(MemoryStorage::new("image")));
    let storage: Arc<dyn Storage> = faulty.clone();
    kind.create(&storage);
    let mut rng = Rng::new(seed);
    let mut guest = kind.guest();
    let disk = kind.open(&storage, true).expect("opening");
    if let Some(plan) = plan {
        faulty.arm(plan);
    } else {
        faulty.arm(FaultPlan::nth(&FaultKind::ALL, u64::MAX));
    }
    for id in 0..14 {
        let op = random_op(&mut rng, guest.len() as u64, true);
        if matches!(op, Op::Reopen | Op::Abandon) {
            continue;
        }
        let size = guest.len();
        if apply(&disk, &mut guest, op, id + 1).is_ok() {
            continue;
        }
        faulty.heal();
        // Any mixture of old and new bytes is allowed, but it must be stable.
        guest.resize(disk.guest_bytes() as usize, 0);
        let (from, to) = match op {
            Op::Write { at, len } | Op::Zero { at, len, .. } | Op::Discard { at, len } => {
                (at as usize, (at + len) as usize)
            }
            Op::Resize { .. } => (size.min(guest.len()), guest.len()),
            _ => (0, 0),
        };
        let mut bytes = vec![0; to - from];
        disk.read_at(&mut bytes, GuestOffset(from as u64)).expect("reading after a fault");
        let new = common::pattern(id + 1, from as u64, bytes.len());
        for (i, byte) in bytes.iter().enumerate() {
            let old = guest[from + i];
            let fine = *byte == old || *byte == 0 || *byte == new[i];
            assert!(fine, "{op:x?} failed and left {byte:#x} at {:#x}", from + i);
        }
        guest[from..to].copy_from_slice(&bytes);
    }
    let matched = faulty.matched();
    faulty.heal();
    same(&disk, &guest, "after a fault");
    disk.flush().expect("flushing after a fault");
    drop(disk);
    sound(&storage, true, "abandoned after a fault");
    let disk = kind.open(&storage, true).expect("opening after a fault");
    same(&disk, &guest, "opened after a fault");
    disk.close().expect("closing");
    drop(disk);
    sound(&storage, true, "closed after a fault");
    matched
}

#[test]
fn a_fault_at_any_call_loses_nothing_that_was_flushed() {
    for_seeds(1, |seed| {
        for kind in Kind::all() {
            let calls = run(&kind, seed, None);
            let mut rng = Rng::new(seed);
            for _ in 0..25 {
                let plan = FaultPlan::nth(&FaultKind::ALL, rng.below(calls));
                let plan = match rng.below(3) {
                    0 => plan.no_space(),
                    1 => plan.torn(3),
                    _ => plan,
                };
                let text = format!("{kind:?}: {plan:?}");
                explained(|| text, || run(&kind, seed, Some(plan)));
            }
        }
    });
}

/// Two concurrent writes to the same new block, of which one fails: the other's bytes stay, and the
/// rest reads as zero or as the failed write's bytes.
mod beside_a_write_that_fails {
    use vdkit_block::{Format, HostOffset, Reservation};

    use super::*;
    use crate::common::{MIB, disk_of, open_format};

    fn image() -> (Arc<dyn Storage>, Arc<dyn Format>) {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        common::create(&storage, 4 * MIB, "block_size=1M", None);
        let format = open_format(&storage, true).expect("opening");
        (storage, format)
    }

    fn reserve(format: &Arc<dyn Format>, at: u64, len: u64) -> Reservation<'_> {
        format.reserve(GuestOffset(at), len).expect("reserving").expect("a new block")
    }

    fn write(storage: &Arc<dyn Storage>, reservation: &Reservation<'_>, byte: u8) {
        let len = (reservation.write.end - reservation.write.start) as usize;
        let host: HostOffset = reservation.host_of(reservation.write.start);
        storage.write_at(&vec![byte; len], host).expect("writing");
    }

    fn read(format: &Arc<dyn Format>, at: u64, len: usize) -> Vec<u8> {
        let disk = disk_of(format.clone(), true);
        let mut bytes = vec![99; len];
        disk.read_at(&mut bytes, GuestOffset(at)).expect("reading");
        bytes
    }

    #[test]
    fn what_another_one_showed_stays() {
        let (storage, format) = image();
        let (good, bad) = (reserve(&format, 4096, 8192), reserve(&format, 8192, 8192));
        write(&storage, &bad, 2);
        write(&storage, &good, 1);
        good.publish().expect("publishing");
        drop(bad);
        assert_eq!(read(&format, 4096, 8192), [1; 8192]);
    }

    #[test]
    fn what_was_written_in_place_since_stays() {
        let (storage, format) = image();
        let (good, bad) = (reserve(&format, 0, 4096), reserve(&format, 8192, 8192));
        write(&storage, &good, 1);
        good.publish().expect("publishing");
        // The block is published now, so this writes in place, within the other reservation's
        // space.
        let disk = disk_of(format.clone(), true);
        disk.write_at(&[3; 4096], GuestOffset(8192)).expect("writing");
        drop(bad);
        assert_eq!(read(&format, 8192, 4096), [3; 4096]);
        assert_eq!(read(&format, 0, 4096), [1; 4096]);
    }

    #[test]
    fn what_another_one_wrote_and_shows_later_stays() {
        let (storage, format) = image();
        let (good, bad) = (reserve(&format, 4096, 8192), reserve(&format, 8192, 8192));
        write(&storage, &bad, 2);
        write(&storage, &good, 1);
        drop(bad);
        good.publish().expect("publishing");
        assert_eq!(read(&format, 4096, 8192), [1; 8192]);
        // The range of only the failed write is unchanged.
        assert_eq!(read(&format, 12288, 4096), [0; 4096]);
    }

    #[test]
    fn space_that_is_reserved_later_reads_as_zero() {
        let (storage, format) = image();
        let (good, bad) = (reserve(&format, 0, 4096), reserve(&format, 8192, 8192));
        write(&storage, &bad, 2);
        drop(bad);
        let later = reserve(&format, 8192, 8192);
        assert!(later.zeroed);
        // Its data is zero, so nothing is written.
        later.publish().expect("publishing");
        drop(good);
        assert_eq!(read(&format, 8192, 8192), [0; 8192]);
    }
}
