//! Storage calls fail while many clients use the disk. A failed request may have happened or not;
//! acknowledged durable data stays; without further faults everything works.

use std::collections::BTreeSet;

use vdkit_block::{CacheMode, GuestOffset};
use vdkit_chain::Disk;
use vdkit_testkit::concurrent::admin::Chores;
use vdkit_testkit::concurrent::history::{SECTOR, stamps};
use vdkit_testkit::concurrent::shape::{SHAPES, Shape};
use vdkit_testkit::concurrent::{Plan, Recording, go_on};
use vdkit_testkit::{FaultKind, FaultPlan, Rng, cases};

use super::plan;

/// Number of power cuts in a run.
const CUTS: u64 = 3;

/// Kinds of calls that fail together.
const KINDS: [&[FaultKind]; 4] = [
    &[FaultKind::Write],
    &[FaultKind::Zero, FaultKind::Discard, FaultKind::Allocate, FaultKind::SetLen],
    &[FaultKind::Sync],
    &[FaultKind::Read],
];

/// A seeded fault among the first calls of its kinds.
pub fn fault(kinds: &[FaultKind], lasting: bool, rng: &mut Rng) -> FaultPlan {
    let nth = match kinds {
        [FaultKind::Write | FaultKind::Read] => rng.below(60),
        [FaultKind::Sync] => rng.below(16),
        _ => rng.below(6),
    };
    let plan = FaultPlan::nth(kinds, nth).torn(rng.below(3));
    let plan = if lasting { plan.lasting() } else { plan };
    if rng.chance(1, 2) { plan.no_space() } else { plan }
}

/// Runs with a fault; returns whether it occurred.
fn stands(plan: &Plan, fault: &FaultPlan, rng: &mut Rng) -> bool {
    let recording = Recording::new(&plan.shape.make(plan.seed / 2 % 2 == 1));
    let file = rng.below(recording.faulty.len() as u64) as usize;
    let (run, disk) = plan.run(&recording, || recording.faulty[file].arm(fault.clone()));
    let what = format!("{}, {fault:?} of file {file}", plan.what());
    let mut fired = recording.heal();
    run.judge_now(&disk).unwrap_or_else(|error| panic!("{what}, healed: {error}"));
    let cut = run.cut(&recording, CUTS, rng).first;
    assert!(cut.is_none(), "{what}: {}", cut.unwrap_or_default());
    disk.flush().unwrap_or_else(|error| panic!("{what}: a flush, healed: {error}"));
    run.judge_now(&disk).unwrap_or_else(|error| panic!("{what}, flushed: {error}"));
    if rng.chance(1, 2) {
        let fault = FaultPlan::nth(&FaultKind::CHANGES, rng.below(8));
        recording.faulty[file].arm(fault.clone());
        if disk.close().is_err() {
            let what = format!("{what}, {fault:?} in closing");
            fired |= recording.heal();
            run.judge_now(&disk).unwrap_or_else(|error| panic!("{what}, healed: {error}"));
        }
        fired |= recording.heal();
    }
    disk.close().unwrap_or_else(|error| panic!("{what}: closing, healed: {error}"));
    drop(disk);
    let (shape, files) = (&plan.shape, recording.files());
    let closed = || {
        shape.audit(&files, fired)?;
        let disk = shape.open(&files, false, plan.cache).map_err(|error| error.to_string())?;
        run.judge_now(&disk)?;
        drop(disk);
        go_on(shape, &files)
    };
    closed().unwrap_or_else(|error: String| panic!("{what}, closed: {error}"));
    fired
}

fn each(lasting: bool, default_cases: u64) {
    let seed = Rng::from_env(7).seed();
    let mut unharmed: BTreeSet<&str> = SHAPES.iter().map(|shape| shape.name).collect();
    for seed in seed..seed + cases(default_cases) {
        for shape in SHAPES {
            let mut rng = Rng::new(seed);
            let chores = Chores {
                // In some formats a failed resize leaves noise.
                sizes: shape.resizes && !shape.noisy && rng.chance(1, 3),
                snapshots: shape.keeps && rng.chance(1, 3),
                bitmaps: false,
            };
            let fault = fault(KINDS[seed as usize % 4], lasting, &mut rng);
            let plan = Plan { faults: true, chores, ..plan(*shape, 64, seed) };
            if stands(&plan, &fault, &mut rng) {
                unharmed.remove(shape.name);
            }
        }
    }
    assert!(unharmed.is_empty(), "no fault came to {unharmed:?}");
}

#[test]
fn a_call_that_fails_once_loses_nothing() {
    each(false, 8);
}

#[test]
fn calls_that_fail_until_they_are_healed_lose_nothing() {
    each(true, 8);
}

/// After a failed sync no client gets an acknowledgement of durability.
#[test]
fn a_failed_sync_is_final_for_every_client() {
    let seed = Rng::from_env(11).seed();
    for seed in seed..seed + cases(4) {
        for shape in SHAPES {
            let mut rng = Rng::new(seed);
            let plan = Plan { faults: true, ..plan(*shape, 64, seed) };
            let recording = Recording::new(&shape.make(false));
            recording.faulty.iter().for_each(|file| file.final_syncs());
            let fault = FaultPlan::nth(&[FaultKind::Sync], rng.below(6));
            let file = rng.below(recording.faulty.len() as u64) as usize;
            let (run, disk) = plan.run(&recording, || recording.faulty[file].arm(fault.clone()));
            let lost = recording.faulty.iter().any(|file| file.lost());
            recording.heal();
            let what = format!("{}, {fault:?} of file {file}", plan.what());
            let cut = run.cut(&recording, CUTS, &mut rng).first;
            assert!(cut.is_none(), "{what}: {}", cut.unwrap_or_default());
            // With several files, a flush may need only the intact ones.
            if lost && recording.faulty.len() == 1 {
                nothing_is_acknowledged(&disk, shape, plan.cache, &what);
            }
        }
    }
}

fn nothing_is_acknowledged(disk: &Disk, shape: &Shape, cache: CacheMode, what: &str) {
    let first = shape.windows()[0].start;
    std::thread::scope(|scope| {
        for client in 0..4 {
            scope.spawn(move || {
                let sector = first + 8 * client;
                let at = GuestOffset(sector * SECTOR);
                let written = disk.write_at(&stamps(sector, 1, 1 << 50), at);
                assert!(
                    written.is_err() || !cache.write_durable(),
                    "{what}: a write was acknowledged after a sync had failed for good"
                );
                assert!(
                    disk.flush().is_err(),
                    "{what}: a flush was acknowledged after a sync had failed for good"
                );
            });
        }
    });
    assert!(disk.close().is_err(), "{what}: closed after a sync had failed for good");
}
