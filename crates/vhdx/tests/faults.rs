//! Each storage call of a run fails once: the error is told, what was flushed stays, the image is
//! sound, and writing goes on.

mod common;

use std::sync::Arc;

use common::{Kind, Op, apply, for_seeds, random_op, same, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{FaultKind, FaultPlan, FaultyStorage, Rng};

/// What is done, and a guest that may hold old or new bytes where an operation failed.
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
        // Whatever it is now, it is some mixture of old and new; and stays so.
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
                let result = std::panic::catch_unwind(|| run(&kind, seed, Some(plan)));
                if let Err(panic) = result {
                    eprintln!("{text}");
                    std::panic::resume_unwind(panic);
                }
            }
        }
    });
}
