//! A long seeded run of the fuzz body for operations: short lives of many images, with writes,
//! discards, compressed clusters, resizes, snapshots, bitmaps, compaction, backing images and data
//! files in play, each compared with a flat model and checked.
//!
//! ```text
//! cargo bench -p vdkit-testkit --bench lives                                  a million operations
//! cargo bench -p vdkit-testkit --bench lives -- --operations 50000 --seed 7
//! ```
//!
//! Each life has a seed of its own, counted from the first one. The first failure ends the run,
//! and is preceded by its seed.

use std::time::Instant;

use vdkit_testkit::{Rng, explained, fuzz};

/// Bytes of one life: options, and more operations than are done.
const INPUT_BYTES: usize = 600;

fn main() {
    let (mut seed, mut operations) = (1, 1_000_000);
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let value = arguments.next().and_then(|text| text.parse().ok());
        let value = value.unwrap_or_else(|| panic!("{name} needs a number"));
        match name.as_str() {
            "--seed" => seed = value,
            "--operations" => operations = value,
            _ => panic!("{name}: known are --seed and --operations"),
        }
    }
    let (first, begin, mut done) = (seed, Instant::now(), 0);
    while done < operations {
        let mut rng = Rng::new(seed);
        let input: Vec<u8> = (0..INPUT_BYTES).map(|_| rng.below(256) as u8).collect();
        let about = || format!("failed: --seed {seed} --operations 1");
        done += explained(about, || fuzz::qcow2_life(&input));
        seed += 1;
    }
    let lives = seed - first;
    println!("{done} operations in {lives} lives from --seed {first}, {:.0?}", begin.elapsed());
}
