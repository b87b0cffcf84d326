//! A long life of images under many clients: power cuts, faults and closings follow each other, and
//! each round continues with what the one before left.
//!
//! A round is short, so that its record fits into memory: [`CrashStorage`](crate::CrashStorage)
//! forgets nothing, and a round begins with a new one.

use std::sync::Arc;

use vdkit_block::{Repair, Storage};
use vdkit_storage::MemoryStorage;

use super::admin::Chores;
use super::clients::Mix;
use super::cut::{CACHES, Plan, Recording, Run, Survival};
use super::history::WRITES;
use super::shape::{Files, SHAPES, Shape};
use crate::{CrashImage, FaultKind, FaultPlan, Rng};

/// Requests of one round, of all clients together.
const ROUND: u64 = 1000;
/// Rounds in the life of an image.
const ROUNDS: u64 = 10;
/// Power cuts of a round that are looked at, beside the one that it goes on from.
const CUTS: u64 = 4;

/// What is done.
#[derive(Clone, Copy, Debug)]
pub struct Endurance {
    /// Requests in all.
    pub operations: u64,
    /// The seed of the first image; the next one has the next seed.
    pub seed: u64,
    /// Threads.
    pub clients: u64,
    /// The kind of image; all in turn where none is given.
    pub shape: Option<Shape>,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Images.
    pub images: u64,
    /// Requests.
    pub operations: u64,
    /// Changes that were acknowledged as durable.
    pub durable: u64,
    /// Power cuts.
    pub cuts: u64,
    /// Images that a power cut may have left, judged.
    pub survivors: u64,
    /// Calls that failed.
    pub faults: u64,
    /// Images that were closed in good order.
    pub closed: u64,
}

impl Endurance {
    /// Goes on until all requests were made.
    ///
    /// # Errors
    /// What was lost, and by which seed.
    pub fn run(&self) -> Result<Totals, String> {
        let mut totals = Totals::default();
        while totals.operations < self.operations {
            let seed = self.seed + totals.images;
            let shape = self.shape.unwrap_or(SHAPES[seed as usize % SHAPES.len()]);
            self.live(shape, seed, &mut totals).map_err(|error| {
                format!("--seed {seed} --ops {} --shape {}: {error}", ROUND * ROUNDS, shape.name)
            })?;
            totals.images += 1;
        }
        Ok(totals)
    }

    /// The life of one image.
    fn live(&self, shape: Shape, seed: u64, totals: &mut Totals) -> Result<(), String> {
        let mut rng = Rng::new(seed);
        let mut content = shape.make(rng.chance(1, 2));
        for round in 0..ROUNDS {
            if totals.operations >= self.operations {
                break;
            }
            let plan = self.plan(shape, round, &mut rng);
            let what = |error| format!("round {round}: {error}");
            content = one_round(&plan, content, &mut rng, totals).map_err(what)?;
        }
        Ok(())
    }

    fn plan(&self, shape: Shape, round: u64, rng: &mut Rng) -> Plan {
        let calls = ROUND / self.clients;
        let faults = rng.chance(1, 3);
        Plan {
            shape,
            cache: CACHES[rng.below(4) as usize],
            clients: self.clients,
            calls,
            mix: if rng.chance(1, 4) { Mix::WRITES } else { Mix::ALL },
            chores: Chores {
                snapshots: shape.keeps && rng.chance(1, 3),
                bitmaps: shape.keeps && !faults && rng.chance(1, 3),
                // A resize that failed leaves noise in some formats.
                sizes: shape.resizes && !(faults && shape.noisy) && rng.chance(1, 3),
            },
            faults,
            first_write: WRITES + round * ROUND,
            seed: rng.next_u64() >> 16,
        }
    }
}

/// One round; its image is handed on.
fn one_round(
    plan: &Plan,
    content: Vec<MemoryStorage>,
    rng: &mut Rng,
    totals: &mut Totals,
) -> Result<Vec<MemoryStorage>, String> {
    let recording = Recording::new(&content);
    drop(content);
    let (run, disk) = plan.run(&recording, || {
        if plan.faults {
            let file = rng.below(recording.faulty.len() as u64) as usize;
            recording.faulty[file].arm(fault(rng));
        }
    });
    recording.heal();
    totals.faults += recording.faulty.iter().map(|file| file.fired()).sum::<u64>();
    totals.operations += plan.clients * plan.calls;
    totals.durable += run.durable_changes();
    run.judge_now(&disk)?;
    let verdict = run.cut(&recording, CUTS, rng);
    totals.cuts += verdict.cuts;
    totals.survivors += verdict.survivors;
    verdict.first.map_or(Ok(()), Err)?;
    let shape = &plan.shape;
    if rng.chance(1, 3) {
        disk.close().map_err(|error| format!("closing: {error}"))?;
        drop(disk);
        shape.audit(&recording.files(), true)?;
        totals.closed += 1;
        return Ok(recording.crash.iter().map(|file| file.crash_now().everything()).collect());
    }
    drop(disk);
    totals.cuts += 1;
    totals.survivors += 1;
    let survivor = survivor(&run, &recording, rng)?;
    if rng.chance(1, 2) {
        return repaired(shape, survivor);
    }
    Ok(survivor)
}

/// What a power cut at any moment left, judged.
fn survivor(run: &Run, recording: &Recording, rng: &mut Rng) -> Result<Vec<MemoryStorage>, String> {
    let range = run.ticks();
    let ticks = rng.within(range.start as u64..range.end as u64 + 1) as usize;
    let images: Vec<CrashImage> =
        recording.crash.iter().map(|file| file.crash_at_tick(ticks)).collect();
    let survivor: Vec<MemoryStorage> =
        images.iter().map(|image| Survival::Lot.of(image, rng)).collect();
    run.judge(survivor.clone(), &run.history.at(ticks), rng)?;
    Ok(survivor)
}

/// Without what a power cut leaked.
fn repaired(shape: &Shape, content: Vec<MemoryStorage>) -> Result<Vec<MemoryStorage>, String> {
    let made: Vec<Arc<MemoryStorage>> = content.into_iter().map(Arc::new).collect();
    let files: Files = made.iter().map(|file| file.clone() as Arc<dyn Storage>).collect();
    shape.check(&files, Repair::Leaks).map_err(|error| format!("a repair: {error}"))?;
    Ok(made.iter().map(|file| MemoryStorage::clone(file)).collect())
}

/// Some call fails, once or until the end of the round.
fn fault(rng: &mut Rng) -> FaultPlan {
    let kinds: &[FaultKind] = match rng.below(3) {
        0 => &[FaultKind::Read],
        1 => &[FaultKind::Sync],
        _ => &FaultKind::CHANGES,
    };
    let plan = FaultPlan::nth(kinds, rng.below(400)).torn(rng.below(3));
    let plan = if rng.chance(1, 2) { plan.no_space() } else { plan };
    if rng.chance(1, 4) { plan.lasting() } else { plan }
}
