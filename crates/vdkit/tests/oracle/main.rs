//! Chains of images, made and written by QEMU's programs and read here, and the other way round.
//!
//! Cases hold every pair of options, within one image and between the images of a chain: format and
//! version, cluster size, refcount width, extended L2, data file, compression, lazy refcounts,
//! preallocation, and sizes. Which cases those are is drawn by lot; `VDKIT_SEED` replays a failure.

#[path = "../support/mod.rs"]
mod support;

mod chain;
mod layer;
mod ours;
mod theirs;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::LazyLock;

use chain::Case;
use vdkit_testkit::{Rng, pairwise, require_peer};

/// How many tests share the cases, so that they run at once.
const SHARDS: usize = 4;

/// The cases of this process, with the seed that made them.
static CASES: LazyLock<(u64, Vec<Case>)> = LazyLock::new(|| {
    let seed = support::seed();
    let mut rng = Rng::new(seed);
    let mut cases = Vec::new();
    for _ in 0..support::cases(1) {
        cases.extend(pairwise(&chain::SIZES, chain::allowed, &mut rng));
    }
    (seed, cases.iter().map(|values| Case::new(values)).collect())
});

fn shard(index: usize, try_case: impl Fn(&Case, &mut Rng)) {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let (seed, cases) = &*CASES;
    for (number, case) in cases.iter().enumerate().skip(index).step_by(SHARDS) {
        let mut rng = Rng::new(seed ^ (number as u64) << 48);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| try_case(case, &mut rng))) {
            eprintln!("case {number} of VDKIT_SEED={seed}: {case:#?}");
            resume_unwind(panic);
        }
    }
}

macro_rules! shards {
    ($($name:ident: $index:literal $body:path;)*) => {
        $(#[test]
        fn $name() {
            shard($index, $body);
        })*
    };
}

shards! {
    what_qemu_writes_is_read_here_0: 0 theirs::run;
    what_qemu_writes_is_read_here_1: 1 theirs::run;
    what_qemu_writes_is_read_here_2: 2 theirs::run;
    what_qemu_writes_is_read_here_3: 3 theirs::run;
    what_is_written_here_is_read_by_qemu_0: 0 ours::run;
    what_is_written_here_is_read_by_qemu_1: 1 ours::run;
    what_is_written_here_is_read_by_qemu_2: 2 ours::run;
    what_is_written_here_is_read_by_qemu_3: 3 ours::run;
}

#[test]
fn each_option_of_each_layer_is_tried() {
    let cases = &CASES.1;
    let layers: Vec<_> = cases.iter().flat_map(|case| &case.layers).collect();
    for cluster in layer::CLUSTERS {
        for bits in layer::REFCOUNT_BITS {
            assert!(layers.iter().any(|l| l.cluster == cluster && l.refcount_bits == bits));
        }
    }
    let raw_base = |case: &&Case| case.layers[0].kind == layer::Kind::Raw;
    assert!(cases.iter().filter(raw_base).any(|case| case.sizes[1] > case.sizes[0]));
    assert!(cases.iter().filter(raw_base).any(|case| case.sizes[1] < case.sizes[0]));
    assert!(cases.iter().any(|case| case.layers.len() == 3));
}
