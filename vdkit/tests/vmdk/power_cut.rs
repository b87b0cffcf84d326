//! After a crash at any moment, with any subset of unsynced sectors: the image opens, is
//! consistent, and each guest sector holds its flushed content or a later one.

use std::collections::HashMap;
use std::sync::Arc;

use vdkit::storage::MemoryStorage;
use vdkit::{GuestOffset, Storage};
use vdkit_testkit::{CrashStorage, Rng};

use super::{SHAPES, Shape, audit, cases, model, read_all};

const SECTOR: usize = 512;

/// Expected content: each sector's flushed content, and later ones.
#[derive(Clone)]
struct Guest {
    flushed: Vec<u8>,
    now: Vec<u8>,
    since: HashMap<usize, Vec<Vec<u8>>>,
}

impl Guest {
    /// Records the changes of a step.
    fn note(&mut self, after: Vec<u8>) {
        for (sector, (old, new)) in self.now.chunks(SECTOR).zip(after.chunks(SECTOR)).enumerate() {
            if old != new {
                self.since.entry(sector).or_default().push(new.to_vec());
            }
        }
        self.now = after;
    }

    fn holds(&self, found: &[u8], what: &str) {
        for (sector, content) in found.chunks(SECTOR).enumerate() {
            let flushed = &self.flushed[sector * SECTOR..(sector + 1) * SECTOR];
            let written = self.since.get(&sector);
            // An interrupted discard or zeroing may be half done.
            let known =
                content == flushed || written.is_some_and(|w| w.iter().any(|w| w == content));
            assert!(
                known,
                "{what}: guest sector {sector} begins with {:02x?}, flushed were {:02x?}, and {} \
                 contents written since",
                &content[..4],
                &flushed[..4],
                written.map_or(0, Vec::len)
            );
        }
    }
}

fn examine(shape: &Shape, guest: &Guest, survivor: MemoryStorage, what: &str) {
    let storage: Arc<dyn Storage> = Arc::new(survivor);
    audit(&storage, false, what);
    let disk = shape.open(storage.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    guest.holds(&read_all(&disk), what);
    // It is usable: a write, a clean close, no damage.
    disk.write_at(&[0x77; 9000], GuestOffset(70_000)).unwrap();
    disk.close().unwrap();
    audit(&storage, false, &format!("{what}, used"));
    let report = super::check(&storage, vdkit::Repair::All).unwrap();
    assert_eq!((report.corruptions, report.leaks_left()), (0, 0), "{what}: {:#?}", report.findings);
    audit(&storage, true, &format!("{what}, mended"));
}

fn run(shape: &Shape, seed: u64) {
    let mut rng = Rng::new(seed);
    let storage = CrashStorage::holding(&*shape.image());
    let disk = shape.open(storage.clone() as Arc<dyn Storage>).unwrap();
    let first = shape.first_content();
    let mut guest = Guest { flushed: first.clone(), now: first, since: HashMap::new() };
    let what = |point: usize, which: &str| {
        format!("VDKIT_SEED={seed} {shape:?}, crash after storage operation {point}, {which}")
    };
    for number in 0..30 {
        let before = storage.ops();
        let mut during = guest.clone();
        let mut after = guest.now.clone();
        if number % 7 == 6 {
            disk.flush().unwrap();
            guest.flushed.clone_from(&guest.now);
            guest.since.clear();
        } else {
            model::step(&disk, &mut after, &mut rng);
            guest.note(after.clone());
            during.note(after);
        }
        let ops = storage.ops();
        if ops > before {
            let point = before + 1 + rng.below((ops - before) as u64) as usize;
            let crash = storage.crash_at(point);
            examine(shape, &during, crash.survivor(&mut rng), &what(point, "random"));
        }
        let crash = storage.crash_at(ops);
        examine(shape, &guest, crash.survivor(&mut rng), &what(ops, "random, step done"));
        if rng.chance(1, 8) {
            for (which, survivor) in crash.extremes() {
                examine(shape, &guest, survivor, &what(ops, &which));
            }
        }
    }
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
    for case in 0..cases(2) {
        for shape in SHAPES {
            run(shape, seed + case);
        }
    }
}
