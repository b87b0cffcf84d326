//! The stored inputs of the fuzz target, and mutations of them.

use vdkit_testkit::fuzz::{near_corpus, ova_open, replay};

#[test]
fn kept_inputs_hold() {
    replay("ova_open", ova_open);
}

/// Inputs of the corpus with a few bytes changed; `VDKIT_FUZZ_SEEDS` sets their number.
#[test]
fn inputs_near_the_kept_ones_hold() {
    near_corpus("ova_open", 400, ova_open, |rng, input| {
        for _ in 0..1 + rng.below(5) {
            let at = rng.below(input.len() as u64) as usize;
            let signs = [0, b'0', b'7', b'<', b'"', 0x80, 0xff, rng.below(256) as u8];
            input[at] = signs[rng.below(8) as usize];
        }
    });
}
