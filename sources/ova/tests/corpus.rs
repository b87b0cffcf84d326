//! The stored inputs of the fuzz target, and mutations of them.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use vdkit_testkit::fuzz;

#[test]
fn kept_inputs_hold() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/corpus/ova_open");
    let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.collect();
    assert!(files.len() >= 10, "{} has {} inputs", folder.display(), files.len());
    for file in files {
        let input = fs::read(&file).unwrap();
        assert!(catch_unwind(|| fuzz::ova_open(&input)).is_ok(), "{}", file.display());
    }
}

/// Inputs of the corpus with a few bytes changed; `VDKIT_FUZZ_SEEDS` sets their number.
#[test]
fn inputs_near_the_kept_ones_hold() {
    let seeds = std::env::var("VDKIT_FUZZ_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/corpus/ova_open");
    let mut failed = Vec::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let sound = fs::read(&path).unwrap();
        for seed in 1..=seeds * 10 {
            let mut rng = vdkit_testkit::Rng::new(seed);
            let mut input = sound.clone();
            for _ in 0..1 + rng.below(5) {
                let at = rng.below(input.len() as u64) as usize;
                let signs = [0, b'0', b'7', b'<', b'"', 0x80, 0xff, rng.below(256) as u8];
                input[at] = signs[rng.below(8) as usize];
            }
            if catch_unwind(|| fuzz::ova_open(&input)).is_err() {
                failed.push((path.clone(), seed));
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}
