//! Several threads: each has its own part of the disk and finds it unchanged, while others flush,
//! discard and read.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Kind, MIB, for_seeds, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::Rng;
use vdkit_testbase::trials::OwnUnits;

#[test]
fn threads_do_not_disturb_each_other() {
    for_seeds(2, |seed| {
        for kind in Kind::all().into_iter().filter(|kind| kind.size >= 4 * MIB) {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
            kind.create(&storage);
            let disk = kind.open(&storage, true).expect("opening");
            let threads = OwnUnits { threads: 4, unit: 4096, rounds: 400, seed };
            threads.run(&disk, &kind.guest()[..3 << 20]);
            disk.close().expect("closing");
            drop(disk);
            sound(&storage, false, &format!("{kind:?}"));
        }
    });
}

/// Blocks are freed and reallocated while others read: no reader ever sees another block's bytes.
#[test]
fn space_is_reused_only_when_nobody_reads_it() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
    common::create(&storage, 16 * MIB, "block_size=1M", None);
    let disk = common::disk_of(common::open_format(&storage, true).expect("opening"), true);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut rng = Rng::new(7);
                while !done.load(Ordering::Relaxed) {
                    let block = rng.below(8);
                    let mut bytes = vec![0; 64 << 10];
                    disk.read_at(&mut bytes, GuestOffset(block * MIB)).expect("reading");
                    let foreign = bytes.iter().find(|b| **b != 0 && **b != block as u8 + 1);
                    assert_eq!(foreign, None, "block {block}");
                }
            });
        }
        for round in 0..150u64 {
            let block = round % 8;
            disk.write_at(&vec![block as u8 + 1; 1 << 20], GuestOffset(block * MIB))
                .expect("writing");
            disk.discard(GuestOffset((round + 3) % 8 * MIB), MIB).expect("discarding");
            disk.flush().expect("flushing");
        }
        done.store(true, Ordering::Relaxed);
    });
    disk.close().expect("closing");
    drop(disk);
    sound(&storage, false, "in the end");
}
