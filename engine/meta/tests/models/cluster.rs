//! The life of one cluster: reserved, published, unlinked, released, reallocated.

use vdkit_block::{Result, Ticket};

use crate::engine::{Engine, Metadata, State};
use crate::in_flight::InFlight;
use crate::reclaim::{Freed, Reclaim};
use crate::sync::{Arc, AtomicU64, MutexGuard, Ordering, check, thread};
use crate::tickets::Tickets;

/// Content of a cluster.
const OLD: u64 = 1;
const SOMEBODY_ELSES: u64 = 2;

const CLUSTER: Freed = Freed { file: 0, first: 1, count: 1, punch: false };

#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    /// The stamp of the grace period is taken before the entry changes.
    StampTooEarly,
    /// The cluster is freed as soon as the entry in memory is cleared.
    FreedBeforeTheCommit,
}

/// The entry and the cluster that a request uses while the cluster changes its owner.
#[derive(Default)]
struct Shared {
    flights: InFlight,
    /// The map's entry: 0 refers to the cluster, 1 does not.
    entry: AtomicU64,
    content: AtomicU64,
}

fn a_reader_and_a_new_owner(mistake: Mistake) {
    check(3, move || {
        let shared = Arc::new(Shared::default());
        shared.content.store(OLD, Ordering::SeqCst);
        let other = shared.clone();
        let reader = thread::spawn(move || {
            let _guard = other.flights.enter();
            if other.entry.load(Ordering::SeqCst) == 0 {
                assert_eq!(other.content.load(Ordering::SeqCst), OLD, "read another's bytes");
            }
        });
        // Another thread checks without the metadata lock, so the phase may change at any moment.
        let other = shared.clone();
        let mover = thread::spawn(move || other.flights.passed(other.flights.stamp()));
        let early = shared.flights.stamp();
        shared.entry.store(1, Ordering::SeqCst);
        let stamp = if mistake == Mistake::StampTooEarly { early } else { shared.flights.stamp() };
        if shared.flights.passed(stamp) {
            shared.content.store(SOMEBODY_ELSES, Ordering::SeqCst);
        }
        reader.join().unwrap();
        mover.join().unwrap();
    });
}

#[test]
fn a_cluster_is_handed_out_when_no_request_can_use_it() {
    a_reader_and_a_new_owner(Mistake::None);
}

#[test]
#[should_panic(expected = "read another's bytes")]
fn a_stamp_that_is_taken_too_early_is_found() {
    a_reader_and_a_new_owner(Mistake::StampTooEarly);
}

/// An image of one entry, which refers to one cluster or none.
struct Image {
    meta: Engine<Meta, ()>,
    flights: InFlight,
    /// The entry as a power cut would leave it: 0 refers to the cluster.
    disk: AtomicU64,
    content: AtomicU64,
}

struct Meta {
    entry: u64,
    /// The entry as copied by a commit.
    taken: u64,
    tickets: Tickets<()>,
    reclaim: Reclaim,
}

impl State for Meta {
    fn reclaim(&mut self) -> &mut Reclaim {
        &mut self.reclaim
    }

    fn idle(&self) -> bool {
        self.tickets.is_empty()
    }
}

impl Metadata for Image {
    type State = Meta;
    type LeaderState = ();
    type Dirty = u64;

    fn take(&self, meta: &mut MutexGuard<'_, Meta>, _alone: bool) -> Result<u64> {
        meta.taken = meta.entry;
        Ok(meta.entry)
    }

    fn write(&self, entry: &u64, _order: &mut ()) -> Result<()> {
        self.disk.store(*entry, Ordering::SeqCst);
        Ok(())
    }

    fn end_write(&self, _meta: &mut Meta, _entry: u64, _durable: bool) {}

    fn is_dirty(&self, meta: &Meta) -> bool {
        meta.entry != meta.taken
    }

    fn recycle(&self) -> Result<()> {
        let freed = self.meta.lock().reclaim.take_expired(&self.flights);
        if !freed.is_empty() {
            self.hand_out();
        }
        Ok(())
    }

    fn trim(&self, meta: &mut MutexGuard<'_, Meta>, _order: &mut ()) -> Result<()> {
        assert!(meta.tickets.is_empty(), "space of an open reservation is given up");
        assert_eq!(self.disk.load(Ordering::SeqCst), meta.entry, "the file is cut too early");
        Ok(())
    }
}

impl Image {
    fn new() -> Self {
        let (tickets, reclaim) = (Tickets::default(), Reclaim::default());
        Self {
            meta: Engine::new(Meta { entry: 0, taken: 0, tickets, reclaim }, ()),
            flights: InFlight::default(),
            disk: AtomicU64::new(0),
            content: AtomicU64::new(OLD),
        }
    }

    fn reserve(&self, range: std::ops::Range<u64>) -> Ticket {
        let mut meta = self.meta.lock();
        while meta.tickets.find(&range, range.start, |()| true).is_none() {
            self.meta.wait(&mut meta);
        }
        meta.tickets.open(range, ())
    }

    fn hand_out(&self) {
        assert_eq!(self.disk.load(Ordering::SeqCst), 1, "a power cut now shows another's bytes");
        self.content.store(SOMEBODY_ELSES, Ordering::SeqCst);
    }
}

/// Two clients flush while one of them discards the cluster.
fn a_discard_and_flushes(mistake: Mistake) {
    check(2, move || {
        let image = Arc::new(Image::new());
        let other = image.clone();
        let discards = thread::spawn(move || {
            let mut meta = other.meta.lock();
            meta.entry = 1;
            meta.reclaim.unlink(&other.flights, [CLUSTER]);
            if mistake == Mistake::FreedBeforeTheCommit {
                drop(meta);
                other.hand_out();
                return;
            }
            drop(meta);
            other.meta.flush(&*other).unwrap();
            assert_eq!(other.disk.load(Ordering::SeqCst), 1, "an acknowledged discard is lost");
        });
        let other = image.clone();
        let reads = thread::spawn(move || {
            let _guard = other.flights.enter();
            let entry = other.meta.lock().entry;
            if entry == 0 {
                assert_eq!(other.content.load(Ordering::SeqCst), OLD, "read another's bytes");
            }
        });
        image.meta.flush(&*image).unwrap();
        discards.join().unwrap();
        reads.join().unwrap();
        image.meta.flush(&*image).unwrap();
    });
}

#[test]
fn a_cluster_is_free_when_its_entry_is_gone_on_disk() {
    a_discard_and_flushes(Mistake::None);
}

#[test]
#[should_panic(expected = "a power cut now shows another's bytes")]
fn a_cluster_that_is_freed_before_the_commit_is_found() {
    a_discard_and_flushes(Mistake::FreedBeforeTheCommit);
}

/// Three clients reserve overlapping ranges.
#[test]
fn overlapping_reservations_wait_for_each_other() {
    check(2, || {
        let image = Arc::new(Image::new());
        let holders = Arc::new(AtomicU64::new(0));
        let write = |range: std::ops::Range<u64>| {
            let (image, holders) = (image.clone(), holders.clone());
            move || {
                let ticket = image.reserve(range);
                assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two hold one cluster");
                thread::yield_now();
                holders.fetch_sub(1, Ordering::SeqCst);
                image.meta.lock().tickets.close(ticket);
                image.meta.ended();
            }
        };
        let threads = [thread::spawn(write(0..2)), thread::spawn(write(0..1))];
        write(0..3)();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(image.meta.lock().tickets.is_empty());
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_up_that_is_left_out_is_found() {
    check(2, || {
        let image = Arc::new(Image::new());
        let ticket = image.reserve(0..2);
        let other = image.clone();
        // Ends its reservation without a wake-up.
        thread::spawn(move || other.meta.lock().tickets.close(ticket));
        image.reserve(0..1);
    });
}

/// A client closes the image while another one reserves, changes the map, and flushes before it
/// ends its reservation.
fn a_close_beside_a_writer(close: impl Fn(&Image) -> Result<()> + Send + Sync + Copy + 'static) {
    check(3, move || {
        let image = Arc::new(Image::new());
        let other = image.clone();
        let writes = thread::spawn(move || {
            let ticket = other.reserve(0..1);
            other.meta.flush(&*other).unwrap();
            let mut meta = other.meta.lock();
            meta.entry = 1;
            meta.reclaim.unlink(&other.flights, [CLUSTER]);
            meta.tickets.close(ticket);
            drop(meta);
            other.meta.ended();
        });
        close(&image).unwrap();
        writes.join().unwrap();
        close(&image).unwrap();
        assert_eq!(image.disk.load(Ordering::SeqCst), 1);
        assert_eq!(image.content.load(Ordering::SeqCst), SOMEBODY_ELSES, "nobody recycled it");
    });
}

#[test]
fn closing_waits_for_reservations_and_what_they_publish() {
    a_close_beside_a_writer(|image| image.meta.close(image));
}

#[test]
#[should_panic(expected = "space of an open reservation is given up")]
fn a_close_that_waits_for_no_reservation_is_found() {
    a_close_beside_a_writer(|image| {
        loop {
            let mut meta = image.meta.lock();
            if !image.is_dirty(&meta) {
                return image.trim(&mut meta, &mut ());
            }
            drop(meta);
            image.meta.flush(image)?;
        }
    });
}

#[test]
#[should_panic(expected = "the file is cut too early")]
fn a_close_that_looks_at_the_map_before_the_lock_is_found() {
    a_close_beside_a_writer(|image| {
        image.meta.flush(image)?;
        let mut meta = image.meta.lock();
        while !meta.idle() {
            image.meta.wait(&mut meta);
        }
        image.trim(&mut meta, &mut ())
    });
}
