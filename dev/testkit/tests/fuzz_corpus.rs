//! The kept inputs of the fuzz targets, and some fresh random ones, through the targets' own
//! functions.

use vdkit_testkit::Rng;
use vdkit_testkit::fuzz::{self, for_fuzz_seeds, near_corpus, replay};

#[test]
fn qcow2_open_read() {
    replay("qcow2_open_read", fuzz::qcow2_open_read);
}

#[test]
fn format_open() {
    replay("format_open", fuzz::format_open);
}

#[test]
fn vhdx_open() {
    replay("vhdx_open", fuzz::vhdx_open);
}

#[test]
fn luks_open() {
    replay("luks_open", fuzz::luks_open);
}

#[test]
fn qcow2_ops() {
    replay("qcow2_ops", fuzz::qcow2_ops);
}

/// Random changes where the structures of a VHDX are, checksums right or wrong.
#[test]
fn vhdx_open_at_random() {
    let places = [64 << 10, 128 << 10, 192 << 10, 1 << 20, (1 << 20) + 8192, 2 << 20];
    let more = [(2 << 20) + (64 << 10), 3 << 20, (3 << 20) + 65536, 4 << 20];
    for_fuzz_seeds(400, |seed| {
        let mut rng = Rng::new(seed);
        let mut input = vec![rng.below(5) as u8, rng.below(8) as u8];
        for _ in 0..1 + rng.below(4) {
            let place = places.iter().chain(&more).nth(rng.below(10) as usize).unwrap();
            let at: u64 = place + rng.below(30) * 4;
            let mut bytes = vec![0; 1 + rng.below(8) as usize];
            match rng.below(3) {
                0 => bytes.fill(0xff),
                1 => bytes[0] = 1 << rng.below(8),
                _ => rng.fill(&mut bytes),
            }
            input.extend([(at >> 16) as u8, (at >> 8) as u8, at as u8, bytes.len() as u8]);
            input.extend(bytes);
        }
        fuzz::vhdx_open(&input);
    });
}

/// Inputs of the corpus with a few bytes changed; `VDKIT_FUZZ_SEEDS` asks for more of them.
#[test]
fn format_open_near_the_corpus() {
    near_corpus("format_open", 40, fuzz::format_open, |rng, input| {
        for _ in 0..1 + rng.below(6) {
            // Headers are at the start and the end.
            let span = [600, 600, 2100, input.len() as u64][rng.below(4) as usize];
            let at = rng.below(span.min(input.len() as u64)) as usize;
            let at = if rng.chance(1, 4) { input.len() - 1 - at } else { at };
            input[at] = [0, 1, 0x7f, 0x80, 0xff, rng.below(256) as u8][rng.below(6) as usize];
        }
    });
}

/// Random operations, other ones for each seed; `VDKIT_FUZZ_SEEDS` asks for more of them.
#[test]
fn qcow2_ops_at_random() {
    at_random(300, fuzz::qcow2_ops);
}

#[test]
fn vdi_ops() {
    replay("vdi_ops", fuzz::vdi_ops);
}

#[test]
fn vdi_ops_at_random() {
    at_random(40, fuzz::vdi_ops);
}

#[test]
fn vhd_ops() {
    replay("vhd_ops", fuzz::vhd_ops);
}

#[test]
fn vhd_ops_at_random() {
    at_random(40, fuzz::vhd_ops);
}

#[test]
fn vhdx_ops() {
    replay("vhdx_ops", fuzz::vhdx_ops);
}

#[test]
fn vhdx_ops_at_random() {
    at_random(40, fuzz::vhdx_ops);
}

#[test]
fn vmdk_ops() {
    replay("vmdk_ops", fuzz::vmdk_ops);
}

#[test]
fn vmdk_ops_at_random() {
    at_random(40, fuzz::vmdk_ops);
}

fn at_random(usually: u64, run: fn(&[u8])) {
    for_fuzz_seeds(usually, |seed| {
        let mut state: u64 = seed;
        let input: Vec<u8> = (0..400)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        run(&input);
    });
}
