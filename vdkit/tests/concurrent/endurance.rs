//! A short version of `cargo bench -p vdkit --bench endurance`.

use vdkit_testkit::concurrent::endurance::Endurance;
use vdkit_testkit::concurrent::shape::SHAPES;
use vdkit_testkit::{Rng, cases};

#[test]
fn images_live_on_after_power_cuts_and_faults() {
    let seed = Rng::from_env(19).seed();
    for (seed, shape) in (seed..).zip(SHAPES) {
        let operations = 2000 * cases(1);
        let endurance = Endurance { operations, seed, clients: 8, shape: Some(*shape) };
        let totals = endurance.run().unwrap_or_else(|error| panic!("{error}"));
        assert!(totals.cuts > 0 && totals.durable > 0, "{}: {totals:?}", shape.name);
    }
}
