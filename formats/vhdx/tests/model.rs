//! Random operations on each kind of image: it always reads like a plain array of bytes, and is
//! sound when closed.

mod common;

use std::sync::Arc;

use common::{Kind, Op, apply, for_seeds, random_op, same, sound};
use vdkit_block::Storage;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::Rng;

fn case(kind: &Kind, seed: u64) {
    let mut rng = Rng::new(seed);
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    kind.create(&storage);
    let mut guest = kind.guest();
    let mut disk = kind.open(&storage, true).expect("opening");
    same(&disk, &guest, "new");
    for id in 0..60 {
        let op = random_op(&mut rng, guest.len() as u64, true);
        match op {
            Op::Reopen => {
                disk.close().expect("closing");
                drop(disk);
                sound(&storage, false, "closed");
                disk = kind.open(&storage, true).expect("opening again");
            }
            Op::Abandon => {
                disk.flush().expect("flushing");
                drop(disk);
                let read_only = kind.open(&storage, false).expect("opening through the log");
                same(&read_only, &guest, "read through the log");
                sound(&storage, true, "read through the log");
                disk = kind.open(&storage, true).expect("replaying");
            }
            op => {
                if let Err(error) = apply(&disk, &mut guest, op, id + 1) {
                    panic!("{op:x?}: {error}");
                }
            }
        }
        same(&disk, &guest, &format!("{kind:?}, step {id}: {op:x?}"));
    }
    disk.close().expect("closing");
    drop(disk);
    sound(&storage, false, "at the end");
    same(&kind.open(&storage, false).expect("opening"), &guest, "at the end");
}

#[test]
fn every_kind_reads_as_an_array_of_bytes() {
    for_seeds(2, |seed| Kind::all().iter().for_each(|kind| case(kind, seed)));
}
