//! The power fails at any storage operation. Whatever survives: the snapshot list and the disk are
//! both old or both new, each snapshot keeps its content, and nothing is damaged.

use vdkit_qcow2::header::Header;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CrashClock, Rng, explained};

use super::support::disks::{Survival, power_cut, survivors};
use super::support::ops::{self, Op};
use super::support::rig::Rig;
use super::support::shape::Shape;
use super::support::{self};
use super::world::{self, SnapshotOp, World};

/// A finished operation, with the expected state before and after. Everything before it is durable.
struct Done {
    deed: SnapshotOp,
    begin: usize,
    end: usize,
    before: World,
    after: World,
}

struct Run {
    rig: Rig,
    done: Vec<Done>,
}

fn random_deed(rng: &mut Rng) -> SnapshotOp {
    let n = rng.below(256) as u8;
    match rng.below(10) {
        0..=3 => SnapshotOp::Create(n),
        4..=6 => SnapshotOp::Apply(n),
        7 | 8 => SnapshotOp::Delete(n),
        _ => SnapshotOp::Rename(n),
    }
}

fn record(shape: &Shape, deeds: usize, rng: &mut Rng) -> Run {
    let clock = CrashClock::new();
    let (rig, guest) = Rig::recording(shape, &clock);
    let mut world = World::of(&rig, guest);
    let mut disk = rig.open(true).expect("opening a good image");
    let mut done = Vec::new();
    let mut id = 0;
    for _ in 0..deeds {
        for _ in 0..rng.below(5) {
            id += 1;
            match world::on_disk(ops::random_step(rng), shape, world.guest.len()) {
                Op::Reopen => {
                    disk.close().expect("closing");
                    drop(disk);
                    disk = rig.open(true).expect("re-opening");
                }
                op => world::step_on(shape, &disk, &mut world, op, id).expect("a step"),
            }
        }
        disk.flush().expect("a flush");
        let (deed, begin, before) = (random_deed(rng), clock.now(), world.clone());
        world.perform(shape, &disk, deed).expect("a deed");
        done.push(Done { deed, begin, end: clock.now(), before, after: world.clone() });
    }
    drop(disk);
    Run { rig, done }
}

/// Checks a survivor of a cut at `moment`, during an operation or right after it.
fn try_survivor(run: &Run, done: &Done, moment: usize, content: Vec<MemoryStorage>, rng: &mut Rng) {
    let rig = run.rig.with_content(content);
    let format = rig.format(false).expect("a survivor opens");
    let storage = rig.image().storage();
    let header = Header::read(&*storage, &rig.limits).expect("a survivor's header");
    let dirty = header.incompatible & 1 != 0;
    let old = moment < done.end && done.before.listed(&*format);
    let new = done.after.listed(&*format);
    assert!(old || new, "neither the old list nor the new one");
    let disk = rig.open(false).expect("a survivor opens");
    // If the lists are equal, the disk's content decides.
    let is_old = old && (!new || world::reads_as(&disk, &done.before.guest));
    let world = if is_old { &done.before } else { &done.after };
    world.compare(&rig, &disk, if is_old { "the old world" } else { "the new world" });
    if !dirty {
        rig.audit(true, "the survivor");
    }
    if rng.chance(1, 30) && !dirty {
        rig.ask_qemu(Some(&world.guest), true, "the survivor");
    }
    if dirty || rng.chance(1, 4) {
        go_on(&rig, world.clone(), rng);
    }
}

/// A survivor must be usable.
fn go_on(rig: &Rig, mut world: World, rng: &mut Rng) {
    let disk = rig.open(true).expect("a survivor opens for writing");
    for id in 0..4 {
        let op = world::on_disk(ops::random_step(rng), &rig.shape, world.guest.len());
        if op != Op::Reopen {
            world::step_on(&rig.shape, &disk, &mut world, op, 1000 + id).expect("writing on");
        }
        world.perform(&rig.shape, &disk, random_deed(rng)).expect("a deed");
    }
    world.compare(rig, &disk, "a survivor that was changed");
    disk.close().expect("closing a survivor");
    drop(disk);
    rig.audit(true, "a survivor that was closed");
}

fn case(shape: &Shape, seed: u64) {
    let mut rng = Rng::new(seed);
    let run = record(shape, 5, &mut rng);
    for done in &run.done {
        // Each moment within a short operation, samples of a long one.
        let step = ((done.end - done.begin) / 25).max(1);
        let moments = (done.begin..done.end).step_by(step).chain([done.end]);
        for moment in moments {
            let cuts = power_cut(&run.rig.disks, moment);
            for survival in
                [Survival::Nothing, Survival::Everything, Survival::Extreme, Survival::Lot]
            {
                let content = survivors(&cuts, survival, &mut rng);
                let about = || {
                    format!(
                        "{shape:?}\npower cut at {moment} of {}..{} of {:?}, surviving: {survival:?}",
                        done.begin, done.end, done.deed
                    )
                };
                explained(about, || try_survivor(&run, done, moment, content, &mut rng));
            }
        }
    }
}

#[test]
fn snapshots_survive_a_power_cut_on_each_kind_of_image() {
    let shapes: Vec<Shape> = Shape::all()
        .into_iter()
        .filter(|s| world::fits(s) && s.cluster <= 65536 && s.preallocation == "off")
        .collect();
    support::for_seeds(8, |seed| case(&shapes[seed as usize % shapes.len()], seed));
}

#[test]
fn snapshots_survive_a_power_cut_with_any_options() {
    support::for_seeds(6, |seed| {
        let mut rng = Rng::new(seed);
        let shape = loop {
            let mut shape = Shape::random(&mut rng);
            shape.wide = false;
            if world::fits(&shape) && shape.preallocation == "off" {
                break shape;
            }
        };
        case(&shape, seed);
    });
}
