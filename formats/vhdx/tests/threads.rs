//! Several threads: each has its own part of the disk and finds it unchanged, while others flush,
//! discard and read.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Kind, MIB, for_seeds, sound};
use vdkit_block::{GuestOffset, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::Rng;

const THREADS: u64 = 4;

/// A thread's groups of 8 sectors, interleaved with those of the others, so that all threads share
/// each block.
fn own(thread: u64, size: u64) -> Vec<u64> {
    (0..size / 4096).filter(|n| n % THREADS == thread).map(|n| n * 4096).collect()
}

fn work(disk: &Disk, thread: u64, seed: u64, size: u64, first: &[u8]) {
    let mut rng = Rng::new(seed ^ thread << 32);
    let pieces = own(thread, size);
    let mut held: Vec<Option<u8>> = vec![None; pieces.len()];
    for step in 0..400u64 {
        let index = rng.below(pieces.len() as u64) as usize;
        let at = GuestOffset(pieces[index]);
        match rng.below(10) {
            0 => {
                disk.write_zeroes(at, 4096, true).expect("zeroing");
                held[index] = Some(0);
            }
            1 => disk.flush().expect("flushing"),
            2..=6 => {
                let byte = (step % 250 + 1) as u8;
                disk.write_at(&[byte; 4096], at).expect("writing");
                held[index] = Some(byte);
            }
            _ => {
                let mut bytes = [0; 4096];
                disk.read_at(&mut bytes, at).expect("reading");
                let start = at.0 as usize;
                match held[index] {
                    Some(byte) => assert_eq!(bytes, [byte; 4096], "thread {thread} at {at}"),
                    None => assert_eq!(bytes, first[start..start + 4096], "never written"),
                }
            }
        }
    }
    for (at, byte) in pieces.iter().zip(&held) {
        let mut bytes = [0; 4096];
        disk.read_at(&mut bytes, GuestOffset(*at)).expect("reading");
        if let Some(byte) = byte {
            assert_eq!(bytes, [*byte; 4096], "thread {thread} at {at:#x}, in the end");
        }
    }
}

#[test]
fn threads_do_not_disturb_each_other() {
    for_seeds(2, |seed| {
        for kind in Kind::all().into_iter().filter(|kind| kind.size >= 4 * MIB) {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
            kind.create(&storage);
            let disk = kind.open(&storage, true).expect("opening");
            let first = kind.guest();
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (disk, first) = (&disk, &first);
                    scope.spawn(move || work(disk, thread, seed, 3 * MIB, first));
                }
            });
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
