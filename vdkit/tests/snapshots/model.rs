//! Random operations with snapshots against flat buffers, on each kind of image, with reopening.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use vdkit_testkit::Rng;

use super::support::{self, ops, ops::Op, rig::Rig, shape::Shape};
use super::world::{self, Move, World};

fn moves(most: usize) -> impl Strategy<Value = Vec<Move>> {
    let step = ops::steps(2).prop_map(|steps| Move::Disk(steps[0]));
    prop::collection::vec(
        prop_oneof![3 => step, 1 => world::deeds().prop_map(Move::SnapshotOp)],
        1..most,
    )
}

fn run(shape: &Shape, moves: &[Move]) {
    let (rig, guest) = Rig::new(shape);
    let mut world = World::of(&rig, guest);
    let mut disk = rig.open(true).expect("opening a good image");
    for (id, each) in moves.iter().enumerate() {
        let what = format!("after move {id}, {each:x?}");
        match *each {
            Move::SnapshotOp(deed) => {
                let done = world.perform(shape, &disk, deed);
                done.unwrap_or_else(|error| panic!("{what}: {error}"));
                // The metadata must be consistent at every moment.
                rig.audit(true, &what);
                world.compare_snapshots(&rig, &**disk.top(), &what);
            }
            Move::Disk(step) => match world::on_disk(step, shape, world.guest.len()) {
                Op::Reopen => {
                    disk.close().expect("closing");
                    drop(disk);
                    rig.audit(false, "after a clean close");
                    disk = rig.open(true).expect("re-opening");
                }
                op => world::step_on(shape, &disk, &mut world, op, id as u64 + 1)
                    .unwrap_or_else(|error| panic!("{what}, {op:x?}: {error}")),
            },
        }
        rig.compare(&disk, &world.guest, &what);
    }
    finish(&rig, disk, &world);
}

fn finish(rig: &Rig, disk: vdkit_chain::Disk, world: &World) {
    world.compare(rig, &disk, "at the end");
    disk.close().expect("closing");
    drop(disk);
    rig.audit(false, "at the end");
    world.compare(rig, &rig.open(false).expect("opening for reading"), "read-only at the end");
    rig.ask_qemu(Some(&world.guest), false, "at the end");
}

fn try_shape(shape: &Shape, cases: u64, most: usize) {
    let seed = support::seed();
    let config = Config {
        cases: cases as u32,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        max_shrink_iters: 1000,
        ..Config::default()
    };
    let result = TestRunner::new(config).run(&moves(most), |moves| {
        run(shape, &moves);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{shape:?}\nreplay with VDKIT_SEED={seed}\n{failure}");
    }
}

fn shard(index: usize, of: usize) {
    let shapes = Shape::all().into_iter().filter(|s| world::fits(s) && s.cluster <= 65536);
    for shape in shapes.skip(index).step_by(of) {
        try_shape(&shape, support::cases(1), 30);
    }
}

#[test]
fn each_kind_of_image_with_snapshots_equals_flat_buffers_0() {
    shard(0, 2);
}

#[test]
fn each_kind_of_image_with_snapshots_equals_flat_buffers_1() {
    shard(1, 2);
}

#[test]
fn any_mixture_of_options_with_snapshots_equals_flat_buffers() {
    support::for_seeds(12, |seed| {
        let mut rng = Rng::new(seed);
        let shape = loop {
            let mut shape = Shape::random(&mut rng);
            shape.wide = false;
            if world::fits(&shape) {
                break shape;
            }
        };
        try_shape(&shape, 1, 50);
    });
}
