//! After a crash at any moment, with any subset of unsynced sectors: the image opens, is
//! consistent, and each guest sector holds its flushed content or a later one.

use std::collections::HashMap;
use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{GuestOffset, Storage};
use vdkit_testkit::{CrashStorage, Rng};

use super::{GUEST_BYTES, SHAPES, Shape, audit, cases, read_all};

const SECTOR: usize = 512;

/// Expected content: each sector's flushed content, and what was written since.
struct Guest {
    flushed: Vec<u8>,
    now: Vec<u8>,
    /// Possible contents of a sector since the flush, without the flushed one.
    since: HashMap<usize, Vec<[u8; SECTOR]>>,
}

impl Guest {
    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.now[at..at + bytes.len()].copy_from_slice(bytes);
        for sector in at / SECTOR..(at + bytes.len()).div_ceil(SECTOR) {
            let content: [u8; SECTOR] =
                self.now[sector * SECTOR..(sector + 1) * SECTOR].try_into().unwrap();
            self.since.entry(sector).or_default().push(content);
        }
    }

    fn flush(&mut self) {
        self.flushed.clone_from(&self.now);
        self.since.clear();
    }

    fn holds(&self, found: &[u8], what: &str) {
        for (sector, content) in found.chunks(SECTOR).enumerate() {
            let flushed = &self.flushed[sector * SECTOR..(sector + 1) * SECTOR];
            let written = self.since.get(&sector);
            if content != flushed && written.is_none_or(|w| !w.iter().any(|w| w == content)) {
                panic!(
                    "{what}: guest sector {sector} begins with {:02x?}, flushed were {:02x?}, \
                     and {} contents written since",
                    &content[..4],
                    &flushed[..4],
                    written.map_or(0, Vec::len)
                );
            }
        }
    }
}

fn examine(shape: &Shape, guest: &Guest, survivor: MemoryStorage, what: &str) {
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

fn step(disk: &vdkit::Disk, guest: &mut Guest, rng: &mut Rng) {
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
                let same = guest.now[place..place + SECTOR] == *sector;
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
    let mut rng = Rng::new(seed);
    let storage = CrashStorage::holding(image);
    let disk = shape.open(storage.clone() as Arc<dyn Storage>).unwrap();
    let first = shape.first_content();
    let mut guest = Guest { flushed: first.clone(), now: first, since: HashMap::new() };
    let what = |point: usize, which: &str| {
        format!("VDKIT_SEED={seed} {shape:?}, crash after storage operation {point}, {which}")
    };
    for _ in 0..40 {
        let before = storage.ops();
        // Data flushed before the step must also survive a crash during it; an unfinished flush
        // guarantees nothing.
        let flushed = guest.flushed.clone();
        let since = guest.since.clone();
        step(&disk, &mut guest, &mut rng);
        let after = storage.ops();
        let mut during = Guest { flushed, now: guest.now.clone(), since };
        for (sector, contents) in &guest.since {
            let known = during.since.entry(*sector).or_default();
            known.extend(contents);
        }
        if after > before {
            let point = before + 1 + rng.below((after - before) as u64) as usize;
            let crash = storage.crash_at(point);
            examine(shape, &during, crash.survivor(&mut rng), &what(point, "random"));
        }
        let crash = storage.crash_at(after);
        examine(shape, &guest, crash.survivor(&mut rng), &what(after, "random, step done"));
        if rng.chance(1, 8) {
            for (which, survivor) in crash.extremes() {
                examine(shape, &guest, survivor, &what(after, &which));
            }
        }
    }
    assert!(read_all(&disk) == guest.now, "VDKIT_SEED={seed} {shape:?}: content");
    let before = storage.ops();
    disk.close().unwrap();
    for point in before..storage.ops() {
        let survivor = storage.crash_at(point + 1).survivor(&mut rng);
        examine(shape, &guest, survivor, &what(point + 1, "while closing"));
    }
    audit(&(storage as Arc<dyn Storage>), true, &format!("VDKIT_SEED={seed} {shape:?}: closed"));
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
