//! The kept inputs of the fuzz targets, and some fresh random ones, through the targets' own
//! functions.

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use vdkit_testkit::fuzz;

/// Runs every file of a target's corpus; says which of them failed.
fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{} has {} inputs", folder.display(), files.len());
    let failed: Vec<_> = files
        .iter()
        .filter(|file| {
            let input = fs::read(file).unwrap();
            catch_unwind(|| run(&input)).is_err()
        })
        .collect();
    assert!(failed.is_empty(), "failed: {failed:?}");
}

#[test]
fn qcow2_open_read() {
    replay("qcow2_open_read", fuzz::qcow2_open_read);
}

#[test]
fn luks_open() {
    replay("luks_open", fuzz::luks_open);
}

#[test]
fn qcow2_ops() {
    replay("qcow2_ops", fuzz::qcow2_ops);
}

/// Random operations, other ones for each seed; `VDKIT_FUZZ_SEEDS` asks for more of them.
#[test]
fn qcow2_ops_at_random() {
    let seeds = std::env::var("VDKIT_FUZZ_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let mut failed = Vec::new();
    for seed in 1..=seeds {
        let mut state: u64 = seed;
        let input: Vec<u8> = (0..400)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        if catch_unwind(|| fuzz::qcow2_ops(&input)).is_err() {
            failed.push(seed);
        }
    }
    assert!(failed.is_empty(), "failed seeds: {failed:?}");
}
