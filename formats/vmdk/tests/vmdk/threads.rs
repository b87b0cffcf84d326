//! Many threads at once: each byte is one thread's last write.

use std::sync::Arc;

use vdkit_block::{GuestOffset, Storage};
use vdkit_testbase::Rng;
use vdkit_testbase::trials::OwnUnits;

use super::{GUEST_BYTES, SHAPES, audit};

const WORKERS: u64 = 4;

/// The threads' sectors alternate, so that grains are shared.
#[test]
fn sectors_of_shared_grains_stay_their_writers() {
    for shape in SHAPES {
        let memory: Arc<dyn Storage> = shape.image();
        let disk = shape.open(memory.clone()).unwrap();
        let threads = OwnUnits { threads: 4, unit: 512, rounds: 300, seed: 1 };
        threads.run(&disk, &shape.first_content()[..(GUEST_BYTES / 4) as usize]);
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
