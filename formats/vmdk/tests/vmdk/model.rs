//! Random operations, compared with a flat buffer.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Repair, Storage};
use vdkit_chain::Disk;
use vdkit_testbase::{Rng, cases};

use super::{GUEST_BYTES, SHAPES, Shape, audit, check, read_all};

/// One operation on a disk and its model.
pub fn step(disk: &Disk, model: &mut [u8], rng: &mut Rng) {
    let len = [512, 1024, 4096, 16384, 70_144, 300_032][rng.below(6) as usize];
    let at = rng.below((GUEST_BYTES - len) / 512 + 1) * 512;
    // Mostly near one another, so that grains are shared; sometimes at the end.
    let at = match rng.below(8) {
        0 => GUEST_BYTES - len,
        1..=5 => at % (512 << 10),
        _ => at,
    };
    let range = at as usize..(at + len) as usize;
    match rng.below(12) {
        0..=5 => {
            let mut bytes = vec![0; len as usize];
            rng.fill(&mut bytes);
            model[range].copy_from_slice(&bytes);
            disk.write_at(&bytes, GuestOffset(at)).unwrap();
        }
        6 | 7 => {
            model[range].fill(0);
            disk.write_zeroes(GuestOffset(at), len, rng.chance(1, 2)).unwrap();
        }
        8 => {
            model[range].fill(0);
            disk.write_zeroes_persistent(GuestOffset(at), len).unwrap();
        }
        9 => {
            disk.discard(GuestOffset(at), len).unwrap();
            // Zero or as before, grain by grain: take what it reads as now.
            let mut bytes = vec![0; len as usize];
            disk.read_at(&mut bytes, GuestOffset(at)).unwrap();
            for (was, is) in model[range].chunks_mut(512).zip(bytes.chunks(512)) {
                assert!(was == is || is.iter().all(|&b| b == 0), "discard showed something else");
                was.copy_from_slice(is);
            }
        }
        10 => disk.flush().unwrap(),
        _ => {
            let mut bytes = vec![0xee; len as usize];
            disk.read_at(&mut bytes, GuestOffset(at)).unwrap();
            assert!(bytes == model[range], "read at {at:#x}");
        }
    }
}

fn life(shape: &Shape, seed: u64) {
    let mut rng = Rng::new(seed);
    let memory: Arc<dyn Storage> = shape.image();
    let mut model = shape.first_content();
    for session in 0..4 {
        let what = format!("VDKIT_SEED={seed} {shape:?} session {session}");
        let disk = shape.open(memory.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(read_all(&disk) == model, "{what}: opened");
        for _ in 0..60 {
            step(&disk, &mut model, &mut rng);
        }
        assert!(read_all(&disk) == model, "{what}: written");
        let closed = rng.chance(2, 3);
        if closed {
            disk.close().unwrap();
        } else {
            // Like a crash that loses nothing.
            disk.flush().unwrap();
        }
        drop(disk);
        audit(&memory, closed && session == 0, &what);
        if rng.chance(1, 2) {
            let report = check(&memory, Repair::Leaks).unwrap();
            assert_eq!(report.leaks_left(), 0, "{what}: {:#?}", report.findings);
            audit(&memory, true, &format!("{what}, leaks repaired"));
        }
    }
    let disk = shape.open(memory).unwrap();
    assert!(read_all(&disk) == model, "VDKIT_SEED={seed} {shape:?}: at last");
}

#[test]
fn any_operations_do_what_memory_does() {
    let seed = Rng::from_env(1).seed();
    for case in 0..cases(6) {
        for shape in SHAPES {
            life(shape, seed + case);
        }
    }
}

/// An emptied overlay reads as its backing image.
#[test]
fn an_emptied_overlay_shows_its_base() {
    for shape in SHAPES {
        let memory: Arc<dyn Storage> = shape.image();
        let disk = shape.open(memory.clone()).unwrap();
        let (mut rng, mut model) = (Rng::new(7), shape.first_content());
        for _ in 0..60 {
            step(&disk, &mut model, &mut rng);
        }
        disk.empty().unwrap();
        assert!(read_all(&disk) == shape.first_content(), "{shape:?}");
        disk.close().unwrap();
        audit(&memory, true, &format!("{shape:?}"));
    }
}
