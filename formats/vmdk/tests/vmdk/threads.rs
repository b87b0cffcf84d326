//! Many threads at once: each byte is one thread's last write.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vdkit_block::{GuestOffset, Storage};
use vdkit_testbase::Rng;

use super::{GUEST_BYTES, SHAPES, audit};

const WORKERS: u64 = 4;

/// Each worker has the sectors with its own number modulo the worker count, so that grains are
/// shared and bytes are not.
#[test]
fn sectors_of_shared_grains_stay_their_writers() {
    for shape in SHAPES {
        let memory: Arc<dyn Storage> = shape.image();
        let disk = shape.open(memory.clone()).unwrap();
        let stop = AtomicBool::new(false);
        let contents: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let flusher = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    disk.flush().unwrap();
                    std::thread::yield_now();
                }
            });
            let workers: Vec<_> = (0..WORKERS)
                .map(|me| {
                    let (disk, shape) = (&disk, shape);
                    scope.spawn(move || {
                        let mut rng = Rng::new(me + 1);
                        let mut mine = shape.first_content();
                        for round in 0..300u64 {
                            let sector = rng.below(GUEST_BYTES / 512 / WORKERS / 4) * WORKERS + me;
                            let at = sector * 512;
                            let range = at as usize..at as usize + 512;
                            if rng.chance(1, 6) {
                                let mut bytes = [0; 512];
                                disk.read_at(&mut bytes, GuestOffset(at)).unwrap();
                                assert!(bytes == mine[range], "{shape:?}: sector {sector}");
                                continue;
                            }
                            let bytes = [(round % 250) as u8 + 1; 512];
                            disk.write_at(&bytes, GuestOffset(at)).unwrap();
                            mine[range].copy_from_slice(&bytes);
                        }
                        mine
                    })
                })
                .collect();
            let contents = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
            stop.store(true, Ordering::Relaxed);
            flusher.join().unwrap();
            contents
        });
        for sector in 0..GUEST_BYTES / 512 {
            let range = (sector * 512) as usize..(sector * 512 + 512) as usize;
            let mut bytes = [0; 512];
            disk.read_at(&mut bytes, GuestOffset(sector * 512)).unwrap();
            let owner = (sector % WORKERS) as usize;
            assert!(bytes == contents[owner][range], "{shape:?}: sector {sector}");
        }
        disk.close().unwrap();
        audit(&memory, true, &format!("{shape:?}"));
    }
}

/// Writes, zeroing and discards of the same grains: no deadlock, no damage.
#[test]
fn overlapping_requests_leave_a_sound_image() {
    for shape in SHAPES {
        let memory: Arc<dyn Storage> = shape.image();
        let disk = shape.open(memory.clone()).unwrap();
        std::thread::scope(|scope| {
            for me in 0..WORKERS {
                let disk = &disk;
                scope.spawn(move || {
                    let mut rng = Rng::new(100 + me);
                    for _ in 0..150 {
                        let len = 512 << rng.below(8);
                        let at = rng.below((GUEST_BYTES / 4 - len) / 512) * 512;
                        match rng.below(5) {
                            0 => disk.discard(GuestOffset(at), len).unwrap(),
                            1 => disk.write_zeroes(GuestOffset(at), len, true).unwrap(),
                            2 => disk.flush().unwrap(),
                            _ => disk.write_at(&vec![9; len as usize], GuestOffset(at)).unwrap(),
                        }
                    }
                });
            }
        });
        disk.close().unwrap();
        audit(&memory, true, &format!("{shape:?}"));
    }
}
