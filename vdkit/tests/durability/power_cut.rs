//! After a crash at any moment, with any subset of unsynced sectors: the image opens, is
//! consistent, and each guest sector holds its flushed content or a later one.

use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{GuestOffset, Storage};
use vdkit_testkit::trials::{Promised, cut_in_each_step};
use vdkit_testkit::{CrashStorage, Rng, cases};

use super::{GUEST_BYTES, SHAPES, Shape, audit, read_all};

const SECTOR: usize = 512;

fn examine(shape: &Shape, guest: &Promised, survivor: MemoryStorage, what: &str) {
    let storage: Arc<dyn Storage> = Arc::new(survivor);
    if !shape.options.contains("lazy") {
        audit(&storage, false, what);
    }
    let disk = shape.open(storage.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    audit(&storage, false, &format!("{what}, opened"));
    guest.holds(&read_all(&disk), what);
    // It is usable: a write, a clean close, no damage.
    disk.write_at(&[0x77; 9000], GuestOffset(70_000)).unwrap();
    disk.close().unwrap();
    audit(&storage, false, &format!("{what}, used"));
}

fn step(disk: &vdkit::Disk, guest: &mut Promised, rng: &mut Rng) {
    let len = [512, 1024, 4096, 16384, 70_144][rng.below(5) as usize];
    let at = rng.below((GUEST_BYTES - len) / 512) * 512;
    // Mostly near one another, so that clusters are shared.
    let at = if rng.chance(3, 4) { at % (512 << 10) } else { at };
    match rng.below(10) {
        0..=5 => {
            let mut bytes = vec![0; len as usize];
            rng.fill(&mut bytes);
            guest.write(at as usize, &bytes);
            disk.write_at(&bytes, GuestOffset(at)).unwrap();
        }
        6 | 7 => {
            guest.write(at as usize, &vec![0; len as usize]);
            disk.write_zeroes(GuestOffset(at), len, rng.chance(1, 2)).unwrap();
        }
        8 => {
            disk.discard(GuestOffset(at), len).unwrap();
            // Zero or as before, cluster by cluster: take what it reads as now.
            let mut bytes = vec![0; len as usize];
            disk.read_at(&mut bytes, GuestOffset(at)).unwrap();
            for (i, sector) in bytes.chunks(SECTOR).enumerate() {
                let place = at as usize + i * SECTOR;
                let same = guest.now()[place..place + SECTOR] == *sector;
                assert!(same || sector.iter().all(|&b| b == 0), "discard showed something else");
                if !same {
                    guest.write(place, sector);
                }
            }
        }
        _ => {
            disk.flush().unwrap();
            guest.flush();
        }
    }
}

fn run(shape: &Shape, image: &MemoryStorage, seed: u64) {
    let name = format!("VDKIT_SEED={seed} {shape:?}");
    let storage = CrashStorage::holding(image);
    let disk = shape.open(storage.clone() as Arc<dyn Storage>).unwrap();
    cut_in_each_step(
        &disk,
        &storage,
        40,
        &mut Rng::new(seed),
        shape.first_content(),
        |guest, rng| step(&disk, guest, rng),
        |guest, survivor, what| examine(shape, guest, survivor, &format!("{name}, {what}")),
    );
    audit(&(storage as Arc<dyn Storage>), true, &format!("{name}: closed"));
}

#[test]
fn any_subset_of_unsynced_sectors_may_survive() {
    let seed = Rng::from_env(1).seed();
    for case in 0..cases(3) {
        for shape in SHAPES {
            run(shape, &shape.image(), seed + case);
        }
    }
}

/// Refcount blocks made behind a barrier, in an image without preallocated ones, and preallocated,
/// in an image whose blocks end at its original size.
#[test]
fn a_file_that_grows_beyond_its_refcount_blocks_survives() {
    const SMALL: &[Shape] = &[
        Shape { options: "cluster_size=512", backing: None },
        Shape { options: "cluster_size=512,refcount_bits=64", backing: None },
        Shape { options: "cluster_size=1K,refcount_bits=64,lazy_refcounts=on", backing: None },
        Shape { options: "cluster_size=512,compat=0.10", backing: None },
    ];
    let seed = Rng::from_env(1).seed();
    for case in 0..cases(3) {
        for shape in SMALL {
            run(shape, &shape.small_image(), seed + case);
            run(shape, &shape.grown_image(128 << 10), seed + case);
            run(shape, &shape.grown_image(512 << 10), seed + case);
        }
    }
}
