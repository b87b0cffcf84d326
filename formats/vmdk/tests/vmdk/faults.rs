//! EIO and ENOSPC at each storage operation in turn.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Result, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, FaultPlan, FaultyStorage};

use super::{SHAPES, Shape, audit, read_all};

enum Step {
    Write(Vec<u8>),
    Zero(u64),
    Flush,
}

fn steps() -> Vec<(u64, Step)> {
    let mut steps = Vec::new();
    for i in 0..6u64 {
        steps.push((i * 300_032, Step::Write(vec![i as u8 + 1; 100_000])));
    }
    steps.push((0, Step::Flush));
    steps.push((65_536, Step::Zero(200_000)));
    steps.push((2 << 20, Step::Write(vec![9; 4096])));
    steps.push((600_000, Step::Zero(65_536)));
    steps.push((0, Step::Flush));
    steps.push((40_000, Step::Write(vec![10; 300_000])));
    steps
}

fn perform(disk: &Disk, at: u64, step: &Step) -> Result<()> {
    match step {
        Step::Write(bytes) => disk.write_at(bytes, GuestOffset(at)),
        Step::Zero(len) => disk.write_zeroes(GuestOffset(at), *len, true),
        Step::Flush => disk.flush(),
    }
}

fn apply(model: &mut [u8], at: u64, step: &Step) {
    let at = at as usize;
    match step {
        Step::Write(bytes) => model[at..at + bytes.len()].copy_from_slice(bytes),
        Step::Zero(len) => model[at..at + *len as usize].fill(0),
        Step::Flush => {}
    }
}

/// Runs the script with a fault at the `nth` operation; each failed step is repeated without the
/// fault. Returns whether the fault fired.
fn run(shape: &Shape, kinds: &[FaultKind], nth: u64, no_space: bool) -> bool {
    let what = format!("{shape:?}: {kinds:?} {nth}, no space: {no_space}");
    let memory: Arc<MemoryStorage> = shape.image();
    let faulty = FaultyStorage::new(memory.clone());
    let disk = shape.open(faulty.clone() as Arc<dyn Storage>).unwrap();
    let mut model = shape.first_content();
    let plan = FaultPlan::nth(kinds, nth).lasting().torn(1);
    faulty.arm(if no_space { plan.no_space() } else { plan });
    for (at, step) in steps() {
        if let Err(error) = perform(&disk, at, &step) {
            assert!(faulty.fired() > 0, "{what}: {error}");
            assert!(error.to_string().contains("image"), "{what}: {error} names no file");
            // A crash now must leave a consistent image.
            audit(&(memory.clone() as Arc<dyn Storage>), false, &format!("{what}, failed"));
            faulty.heal();
            perform(&disk, at, &step).unwrap_or_else(|error| panic!("{what}, healed: {error}"));
        }
        apply(&mut model, at, &step);
    }
    let fired = faulty.fired() > 0;
    faulty.heal();
    assert!(read_all(&disk) == model, "{what}: content");
    disk.close().unwrap();
    drop(disk);
    let image: Arc<dyn Storage> = memory;
    audit(&image, false, &what);
    let again = shape.open(image).unwrap();
    assert!(read_all(&again) == model, "{what}: content when opened again");
    fired
}

#[test]
fn each_operation_may_fail_and_work_later() {
    for shape in SHAPES {
        for (kinds, no_space) in [
            (&[FaultKind::Write][..], false),
            (&[FaultKind::Write, FaultKind::SetLen, FaultKind::Zero][..], true),
            (&[FaultKind::Read][..], false),
            (&[FaultKind::Sync][..], false),
            (&[FaultKind::Discard, FaultKind::Zero][..], false),
        ] {
            let mut nth = 0;
            while run(shape, kinds, nth, no_space) {
                nth += 1 + nth / 24;
            }
        }
    }
}
