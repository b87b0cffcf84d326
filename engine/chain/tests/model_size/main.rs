//! Loom model of the size that a disk shows, over all interleavings of a resize that fails, one that
//! succeeds, and a reader.

mod sync {
    pub use vdkit_testbase::loom_sync::*;
}

#[path = "../../src/shown_size.rs"]
mod shown_size;

use shown_size::ShownSize;
use sync::{Arc, AtomicU64, Ordering, check, thread};

const SMALL: u64 = 1;
const LARGE: u64 = 2;

#[derive(Default)]
struct Disk {
    /// The format's size.
    size: AtomicU64,
    shown: ShownSize,
    /// Resizes whose new part is ready.
    ready: AtomicU64,
}

impl Disk {
    fn guest_bytes(&self) -> u64 {
        self.shown.get(|| self.size.load(Ordering::Acquire))
    }

    /// Grows; a failure takes it back.
    fn grow(&self, fails: bool) {
        self.shown.hide_beyond(self.guest_bytes());
        self.size.store(LARGE, Ordering::Release);
        if fails {
            self.size.store(SMALL, Ordering::Release);
        } else {
            self.ready.store(1, Ordering::Release);
        }
        self.shown.show();
    }
}

fn model(preemptions: usize, failures: usize) {
    check(preemptions, move || {
        let disk = Arc::new(Disk::default());
        disk.size.store(SMALL, Ordering::Release);
        let other = disk.clone();
        let resizes = thread::spawn(move || {
            (0..failures).for_each(|_| other.grow(true));
            other.grow(false);
        });
        let seen = disk.guest_bytes();
        let ready = disk.ready.load(Ordering::Acquire);
        assert!(seen == SMALL || ready == 1, "a part was seen that is not ready");
        resizes.join().unwrap();
        assert_eq!(disk.guest_bytes(), LARGE);
    });
}

#[test]
fn no_part_is_seen_before_it_is_ready() {
    model(3, 0);
}

#[test]
fn no_part_is_seen_of_resizes_that_failed_before() {
    model(3, 1);
    model(2, 2);
}
