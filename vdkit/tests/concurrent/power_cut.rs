//! The power fails at any storage call. Acknowledged durable data survives and the image is
//! consistent, whichever other changes survive.

use vdkit_testkit::concurrent::admin::Chores;
use vdkit_testkit::concurrent::shape::{SHAPES, Shape};
use vdkit_testkit::concurrent::{CACHES, Plan, Recording, Verdict};
use vdkit_testkit::{Rng, cases};

use super::plan;

/// Number of power cuts per run.
const CUTS: u64 = 8;

fn cut(plan: &Plan) -> Verdict {
    let recording = Recording::new(&plan.shape.make(plan.seed / 2 % 2 == 1));
    let (run, disk) = plan.run(&recording, || {});
    drop(disk);
    run.cut(&recording, CUTS, &mut Rng::new(plan.seed))
}

fn stands(plan: &Plan) {
    let verdict = cut(plan);
    if let Some(first) = verdict.first {
        panic!("{} of {} power cuts lost something: {first}", verdict.bad_cuts, verdict.cuts);
    }
}

fn each(shapes: impl Iterator<Item = Shape>, chores: Chores, default_cases: u64) {
    let seed = Rng::from_env(1).seed();
    for shape in shapes {
        for seed in seed..seed + cases(default_cases) {
            stands(&Plan { chores, ..plan(shape, 96, seed) });
        }
    }
}

#[test]
fn acknowledged_writes_survive() {
    each(SHAPES.iter().copied(), Chores::default(), 6);
}

#[test]
fn acknowledged_writes_survive_beside_other_sizes() {
    let resizes = SHAPES.iter().filter(|shape| shape.resizes).copied();
    each(resizes, Chores { sizes: true, ..Chores::default() }, 4);
}

#[test]
fn acknowledged_writes_survive_beside_snapshots_and_bitmaps() {
    let keeps = || SHAPES.iter().filter(|shape| shape.keeps).copied();
    each(keeps(), Chores { snapshots: true, ..Chores::default() }, 2);
    each(keeps(), Chores { bitmaps: true, ..Chores::default() }, 2);
    each(keeps(), Chores { snapshots: true, bitmaps: true, sizes: true }, 2);
}

const NOTHING: Chores = Chores { snapshots: false, bitmaps: false, sizes: false };

/// Prints how many power cuts lose data, per kind of image and cache mode.
#[test]
#[ignore = "figures, no verdict"]
fn figures() {
    let all = [
        NOTHING,
        Chores { sizes: true, ..NOTHING },
        Chores { snapshots: true, ..NOTHING },
        Chores { bitmaps: true, ..NOTHING },
        Chores { snapshots: true, bitmaps: true, sizes: true },
    ];
    for (shape, chores) in SHAPES.iter().flat_map(|shape| all.map(|chores| (shape, chores))) {
        if (chores.sizes && !shape.resizes)
            || ((chores.snapshots || chores.bitmaps) && !shape.keeps)
        {
            continue;
        }
        for cache in CACHES {
            let mut all = Verdict::default();
            for case in 0..cases(4) {
                let verdict = cut(&Plan { chores, cache, ..plan(*shape, 96, 3 * case) });
                all.cuts += verdict.cuts;
                all.bad_cuts += verdict.bad_cuts;
                all.first = all.first.or(verdict.first);
            }
            println!("{} {cache} {chores:?}: {} of {}", shape.name, all.bad_cuts, all.cuts);
            if let Some(first) = all.first {
                println!("    {}", first.chars().take(600).collect::<String>());
            }
        }
    }
}
