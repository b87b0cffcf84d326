//! Requests beside a change that must be alone: the gate, and the end of a flat disk.

use crate::gate::Gate;
use crate::in_flight::InFlight;
use crate::sync::{Arc, AtomicU64, Ordering, check, thread};

const WRITTEN: u64 = 7;

#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    /// The change does not ask the gate.
    NotClosed,
    /// The change lets requests in again before it is done.
    OpenedTooEarly,
    /// The request leaves before its I/O.
    LeftTooEarly,
}

/// An image whose block moves. All but the gate is relaxed: the gate alone orders it.
#[derive(Default)]
struct Image {
    gate: Gate,
    /// Place of the block.
    entry: AtomicU64,
    places: [AtomicU64; 2],
}

impl Image {
    fn content(&self) -> u64 {
        self.places[self.entry.load(Ordering::Relaxed) as usize].load(Ordering::Relaxed)
    }

    fn write(&self, mistake: Mistake) {
        let inside = self.gate.enter();
        let place = self.entry.load(Ordering::Relaxed) as usize;
        let left = (mistake != Mistake::LeftTooEarly).then_some(inside);
        self.places[place].store(WRITTEN, Ordering::Relaxed);
        drop(left);
    }

    /// Reads within a request, for instance to fill a block, after it has entered once already.
    fn read_again(&self) {
        let _inside = self.gate.enter();
        let seen = self.content();
        let _again = self.gate.enter();
        assert_eq!(self.content(), seen, "a block moved under a request");
    }

    fn move_block(&self, mistake: Mistake) {
        let mut alone = (mistake != Mistake::NotClosed).then(|| self.gate.close());
        if mistake == Mistake::OpenedTooEarly {
            alone = None;
        }
        let bytes = self.places[0].load(Ordering::Relaxed);
        self.places[1].store(bytes, Ordering::Relaxed);
        self.entry.store(1, Ordering::Relaxed);
        // Something else takes the place.
        self.places[0].store(0, Ordering::Relaxed);
        drop(alone);
    }
}

fn a_write_beside_a_move(mistake: Mistake) {
    check(3, move || {
        let image = Arc::new(Image::default());
        let other = image.clone();
        let writes = thread::spawn(move || other.write(mistake));
        image.move_block(mistake);
        writes.join().unwrap();
        let _inside = image.gate.enter();
        assert_eq!(image.content(), WRITTEN, "an acknowledged write is lost");
    });
}

#[test]
fn a_write_beside_a_move_stays() {
    a_write_beside_a_move(Mistake::None);
}

#[test]
#[should_panic(expected = "an acknowledged write is lost")]
fn a_move_that_closes_no_gate_is_found() {
    a_write_beside_a_move(Mistake::NotClosed);
}

#[test]
#[should_panic(expected = "an acknowledged write is lost")]
fn a_move_that_opens_the_gate_too_early_is_found() {
    a_write_beside_a_move(Mistake::OpenedTooEarly);
}

#[test]
#[should_panic(expected = "an acknowledged write is lost")]
fn a_request_that_leaves_before_its_io_is_found() {
    a_write_beside_a_move(Mistake::LeftTooEarly);
}

/// The content does not change: only a request over which the block moved could see two places.
fn a_request_in_a_request(image: &Arc<Image>) -> thread::JoinHandle<()> {
    image.places[0].store(WRITTEN, Ordering::Relaxed);
    let other = image.clone();
    thread::spawn(move || other.read_again())
}

#[test]
fn a_thread_that_is_inside_enters_again_while_a_change_waits() {
    check(3, || {
        let image = Arc::new(Image::default());
        let reads = a_request_in_a_request(&image);
        image.move_block(Mistake::None);
        reads.join().unwrap();
    });
}

#[test]
fn changes_are_alone_and_let_requests_in_again() {
    check(2, || {
        let (gate, alone) = (Arc::new(Gate::default()), Arc::new(AtomicU64::new(0)));
        let change = || {
            let (gate, alone) = (gate.clone(), alone.clone());
            move || {
                let _closed = gate.close();
                assert_eq!(alone.fetch_add(1, Ordering::Relaxed), 0, "two are alone");
                alone.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let second = thread::spawn(change());
        let (other, none) = (gate.clone(), alone.clone());
        let request = thread::spawn(move || {
            let inside = match other.try_enter() {
                Some(inside) => inside,
                None => other.enter(),
            };
            assert_eq!(none.load(Ordering::Relaxed), 0, "a request beside a change");
            drop(inside);
        });
        change()();
        second.join().unwrap();
        request.join().unwrap();
        assert!(gate.try_enter().is_some(), "the gate stays closed");
    });
}

/// A flat disk of two sectors becomes one of one; the second one is cut off the file.
#[derive(Default)]
struct Flat {
    flights: InFlight,
    sectors: AtomicU64,
    cut: AtomicU64,
}

fn a_write_beside_a_cut(compares_first: bool) {
    check(3, move || {
        let flat = Arc::new(Flat::default());
        flat.sectors.store(2, Ordering::SeqCst);
        let other = flat.clone();
        let writes = thread::spawn(move || {
            let early = other.sectors.load(Ordering::SeqCst);
            let _guard = other.flights.enter();
            let now = other.sectors.load(Ordering::SeqCst);
            let sectors = if compares_first { early } else { now };
            if sectors == 2 {
                assert_eq!(other.cut.load(Ordering::SeqCst), 0, "written beyond the cut");
            }
        });
        flat.sectors.fetch_min(1, Ordering::SeqCst);
        let stamp = flat.flights.stamp();
        if flat.flights.passed(stamp) {
            flat.cut.store(1, Ordering::SeqCst);
        }
        writes.join().unwrap();
    });
}

#[test]
fn a_file_is_cut_when_no_request_can_reach_beyond() {
    a_write_beside_a_cut(false);
}

#[test]
#[should_panic(expected = "written beyond the cut")]
fn a_request_that_compares_the_size_before_it_enters_is_found() {
    a_write_beside_a_cut(true);
}
