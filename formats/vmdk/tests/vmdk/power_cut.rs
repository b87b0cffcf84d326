//! After a crash at any moment, with any subset of unsynced sectors: the image opens, is
//! consistent, and each guest sector holds its flushed content or a later one.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::trials::{Promised, cut_in_each_step};
use vdkit_testbase::{CrashStorage, Rng, cases};

use super::{SHAPES, Shape, audit, model, read_all};

fn examine(shape: &Shape, guest: &Promised, survivor: MemoryStorage, what: &str) {
    let storage: Arc<dyn Storage> = Arc::new(survivor);
    audit(&storage, false, what);
    let disk = shape.open(storage.clone()).unwrap_or_else(|error| panic!("{what}: {error}"));
    guest.holds(&read_all(&disk), what);
    // It is usable: a write, a clean close, no damage.
    disk.write_at(&[0x77; 9000], GuestOffset(70_000)).unwrap();
    disk.close().unwrap();
    audit(&storage, false, &format!("{what}, used"));
    let report = super::check(&storage, vdkit_block::Repair::All).unwrap();
    assert_eq!((report.corruptions, report.leaks_left()), (0, 0), "{what}: {:#?}", report.findings);
    audit(&storage, true, &format!("{what}, repaired"));
}

fn run(shape: &Shape, seed: u64) {
    let name = format!("VDKIT_SEED={seed} {shape:?}");
    let storage = CrashStorage::holding(&*shape.image());
    let disk = shape.open(storage.clone() as Arc<dyn Storage>).unwrap();
    let mut number = 0;
    let step = |guest: &mut Promised, rng: &mut Rng| {
        number += 1;
        if number % 7 == 0 {
            disk.flush().unwrap();
            return guest.flush();
        }
        let mut after = guest.now().to_vec();
        model::step(&disk, &mut after, rng);
        guest.become_this(&after);
    };
    cut_in_each_step(
        &disk,
        &storage,
        30,
        &mut Rng::new(seed),
        shape.first_content(),
        step,
        |guest, survivor, what| examine(shape, guest, survivor, &format!("{name}, {what}")),
    );
    audit(&(storage as Arc<dyn Storage>), true, &format!("{name}: closed"));
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
