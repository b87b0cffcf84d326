//! The stored inputs of the fuzz target for sessions, and some random ones.

use std::panic::catch_unwind;
use std::path::Path;

use vdkit_testkit::{Rng, fuzz};

#[test]
fn kept_inputs_break_nothing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/corpus/nbd_session");
    let mut files: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{} has {} inputs", folder.display(), files.len());
    let failed: Vec<_> = files
        .iter()
        .filter(|file| {
            let input = std::fs::read(file).unwrap();
            catch_unwind(|| fuzz::nbd_session(&input)).is_err()
        })
        .collect();
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// `VDKIT_FUZZ_SEEDS` sets the number.
#[test]
fn requests_at_random_are_answered_as_they_must_be() {
    let seeds = std::env::var("VDKIT_FUZZ_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for seed in 0..seeds {
        let mut rng = Rng::new(seed);
        let mut input: Vec<u8> = (0..400).map(|_| rng.below(256) as u8).collect();
        // Requests, cycling through the styles.
        input[0] = (seed % 3 * 2) as u8;
        let done = catch_unwind(|| fuzz::nbd_session(&input));
        assert!(done.is_ok(), "seed {seed}");
    }
}
