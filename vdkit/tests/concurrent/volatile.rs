//! Storages without syncs, as for new targets of a conversion: the format keeps no order of writes.
//! A failing call still loses nothing, and the closed image is consistent.

use vdkit_block::CacheMode;
use vdkit_testkit::concurrent::shape::SHAPES;
use vdkit_testkit::concurrent::{Plan, Recording, go_on};
use vdkit_testkit::{FaultKind, Rng, cases};

use super::faults::fault;
use super::plan;

const KINDS: [&[FaultKind]; 3] = [
    &[FaultKind::Write],
    &[FaultKind::Zero, FaultKind::Discard, FaultKind::Allocate, FaultKind::SetLen],
    &[FaultKind::Read],
];

#[test]
fn a_volatile_image_is_right_when_it_is_closed_whatever_failed_before() {
    let seed = Rng::from_env(13).seed();
    let mut fired = 0;
    for seed in seed..seed + cases(9) {
        for shape in SHAPES {
            let mut rng = Rng::new(seed);
            let recording = Recording::volatile(&shape.make(seed % 2 == 1));
            let plan = Plan { faults: true, cache: CacheMode::Unsafe, ..plan(*shape, 64, seed) };
            let fault = fault(KINDS[seed as usize % 3], seed / 3 % 2 == 1, &mut rng);
            let file = rng.below(recording.faulty.len() as u64) as usize;
            let arm = || recording.faulty[file].arm(fault.clone());
            let (run, disk) = plan.run(&recording, arm);
            let what = format!("{}, volatile, {fault:?} of file {file}", plan.what());
            let failed = recording.heal();
            fired += u64::from(failed);
            run.judge_now(&disk).unwrap_or_else(|error| panic!("{what}, healed: {error}"));
            disk.close().unwrap_or_else(|error| panic!("{what}: closing, healed: {error}"));
            drop(disk);
            let files = recording.files();
            let closed = || {
                shape.audit(&files, failed)?;
                let disk = shape.open(&files, false, plan.cache).map_err(|e| e.to_string())?;
                run.judge_now(&disk)?;
                drop(disk);
                go_on(shape, &files)
            };
            closed().unwrap_or_else(|error: String| panic!("{what}, closed: {error}"));
        }
    }
    assert!(fired > 0, "no call failed");
}
