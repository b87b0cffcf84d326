//! The stored inputs of the fuzz target for sessions, and some random ones.

use vdkit_testkit::Rng;
use vdkit_testkit::fuzz::{for_fuzz_seeds, nbd_session, replay};

#[test]
fn kept_inputs_break_nothing() {
    replay("nbd_session", nbd_session);
}

/// `VDKIT_FUZZ_SEEDS` sets the number.
#[test]
fn requests_at_random_are_answered_as_they_must_be() {
    for_fuzz_seeds(60, |seed| {
        let mut rng = Rng::new(seed);
        let mut input: Vec<u8> = (0..400).map(|_| rng.below(256) as u8).collect();
        // Requests, cycling through the styles.
        input[0] = (seed % 3 * 2) as u8;
        nbd_session(&input);
    });
}
