//! Random operations against a flat buffer, on each kind of image, with reopening.

mod support;

use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, RngSeed, TestRunner};
use support::guest::Guest;
use support::ops::{self, Op, Step};
use support::rig::Rig;
use support::shape::Shape;
use vdkit_testkit::Rng;

fn config(cases: u64, seed: u64) -> Config {
    Config {
        cases: cases as u32,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        source_file: Some(file!()),
        max_shrink_iters: 2000,
        ..Config::default()
    }
}

/// One run on one image; panics on the first difference.
fn run(shape: &Shape, steps: &[Step]) {
    let (rig, mut guest) = Rig::new(shape);
    let mut disk = rig.open(true).expect("opening a good image");
    for (id, step) in steps.iter().enumerate() {
        let op = step.on(shape, guest.len());
        if op == Op::Reopen {
            disk.close().expect("closing");
            drop(disk);
            rig.audit(false, "after a clean close");
            disk = rig.open(true).expect("re-opening");
            continue;
        }
        if let Err(error) = ops::apply(shape, &disk, &mut guest, op, id as u64 + 1) {
            panic!("step {id}, {op:x?}: {error}");
        }
        rig.compare(&disk, &guest, &format!("after step {id}, {op:x?}"));
    }
    finish(&rig, disk, &guest);
}

fn finish(rig: &Rig, disk: vdkit_chain::Disk, guest: &Guest) {
    disk.close().expect("closing");
    drop(disk);
    rig.audit(false, "at the end");
    rig.compare(&rig.open(false).expect("opening for reading"), guest, "read-only at the end");
    rig.ask_qemu(Some(guest), false, "at the end");
}

fn try_shape(shape: &Shape, cases: u64, steps: usize) {
    let seed = support::seed();
    let mut runner = TestRunner::new(config(cases, seed));
    let result = runner.run(&ops::steps(steps), |steps| {
        run(shape, &steps);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{shape:?}\nreplay with VDKIT_SEED={seed}\n{failure}");
    }
}

/// Shards, so that the harness runs them in parallel.
fn shard(index: usize, of: usize) {
    let plain = Shape::all().into_iter().filter(|shape| shape.encryption.is_none());
    for shape in &plain.skip(index).step_by(of).collect::<Vec<_>>() {
        try_shape(shape, support::cases(2), 40);
    }
}

#[test]
fn each_kind_of_image_equals_a_flat_buffer_0() {
    shard(0, 4);
}

#[test]
fn each_kind_of_image_equals_a_flat_buffer_1() {
    shard(1, 4);
}

#[test]
fn each_kind_of_image_equals_a_flat_buffer_2() {
    shard(2, 4);
}

#[test]
fn each_kind_of_image_equals_a_flat_buffer_3() {
    shard(3, 4);
}

#[test]
fn each_kind_of_encrypted_image_equals_a_flat_buffer() {
    for shape in &Shape::encrypted() {
        try_shape(shape, support::cases(2), 40);
    }
}

#[test]
fn any_mixture_of_options_equals_a_flat_buffer() {
    let seed = support::seed();
    let mut runner = TestRunner::new(config(support::cases(24), seed));
    let strategy = (any::<u64>(), ops::steps(60));
    let result = runner.run(&strategy, |(options, steps)| {
        let shape = Shape::random(&mut Rng::new(options));
        eprintln!("{shape:?}");
        run(&shape, &steps);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("replay with VDKIT_SEED={seed}\n{failure}");
    }
}
