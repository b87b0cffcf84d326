//! Adaptive polling: when to poll a socket before sleeping on it.
//!
//! Waking a thread on an idle processor takes tens of microseconds, in a virtual machine several
//! times the cost of a small request. A client that waits for each reply pays this on every
//! request. So if a connection's bytes usually arrive soon, its thread polls for [`WINDOW`] before
//! it sleeps, as KVM polls for a halted guest (`halt_poll_ns`).
//!
//! On a busy machine, polling is worse than sleeping: waking is fast, and the client may need the
//! processor. The cost of waking is the difference between the wait with sleeping and the wait with
//! polling. So one of [`PROBE`] polls is skipped to measure it, and if several such probes find it
//! small, polling pauses. Failed polls soon become rare too.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// Duration of one poll.
pub const WINDOW: Duration = Duration::from_micros(50);
/// Bytes that arrive within this time after falling asleep, wake-up included, could have been
/// polled for.
const SOON: Duration = Duration::from_micros(200);
/// Polling pays only if sleeping costs at least this much more.
const CHEAP: Duration = Duration::from_micros(15);
/// Sleep once after this many polls, to measure the cost of waking.
const PROBE: u32 = 128;
/// Maximum credit; one is earned each time that bytes arrive soon.
const CREDIT_MAX: i32 = 16;
/// Price of a failed poll: the first, and the maximum.
const PRICE: [i32; 2] = [4, 1024];
/// Consecutive cheap probes before polling pauses: a single one may have met bytes that were about
/// to arrive, such as a payload after its header.
const PROBES: u32 = 4;
/// Debt after cheap probes: the first, and the maximum.
const DEBT: [i32; 2] = [64, 8192];

/// Number of threads polling in this process.
#[derive(Debug)]
pub struct PollLimit {
    now: AtomicUsize,
    most: usize,
}

impl PollLimit {
    /// A limit of `most` polling threads.
    pub const fn new(most: usize) -> Self {
        Self { now: AtomicUsize::new(0), most }
    }

    /// The limit of this process: half of the processors, as clients need some too; none on a
    /// single processor.
    pub fn usual() -> &'static Self {
        static USUAL: LazyLock<PollLimit> = LazyLock::new(|| {
            PollLimit::new(std::thread::available_parallelism().map_or(0, |count| count.get() / 2))
        });
        &USUAL
    }

    fn enter(&self) -> Option<PollPermit<'_>> {
        let looking = PollPermit(self);
        // Dropping it undoes the count if it is one too many.
        (self.now.fetch_add(1, Ordering::Relaxed) < self.most).then_some(looking)
    }
}

/// Permission to poll, until dropped.
#[derive(Debug)]
pub struct PollPermit<'a>(&'a PollLimit);

impl Drop for PollPermit<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Arrival statistics of one connection.
#[derive(Debug)]
pub struct Poll {
    /// Never contended: one thread at a time receives.
    record: Mutex<Record>,
    lookers: &'static PollLimit,
}

impl Poll {
    /// A connection without history.
    pub const fn new(lookers: &'static PollLimit) -> Self {
        Self { record: Mutex::new(Record::new()), lookers }
    }

    /// Permission to poll before sleeping.
    pub fn look(&self) -> Option<PollPermit<'static>> {
        if self.record.lock().allows() { self.lookers.enter() } else { None }
    }

    /// A poll found bytes after `took`.
    pub fn seen(&self, took: Duration) {
        self.record.lock().seen(took);
    }

    /// A poll found nothing.
    pub fn in_vain(&self) {
        self.record.lock().in_vain();
    }

    /// Bytes arrived after sleeping, without polling before.
    pub fn slept(&self, long: Duration) {
        self.record.lock().slept(long);
    }
}

#[derive(Debug)]
struct Record {
    /// A poll needs a credit of [`Record::price`].
    credit: i32,
    price: i32,
    debt: i32,
    /// Consecutive probes that found waking cheap.
    cheap: u32,
    /// Successful polls since the last sleep.
    looks: u32,
    /// Moving average of their duration.
    took: Duration,
}

impl Record {
    const fn new() -> Self {
        Self { credit: 0, price: PRICE[0], debt: DEBT[0], cheap: 0, looks: 0, took: Duration::ZERO }
    }

    fn allows(&self) -> bool {
        self.credit >= self.price && self.looks < PROBE
    }

    fn earn(&mut self) {
        self.credit = (self.credit + 1).min(self.price.max(CREDIT_MAX));
    }

    fn seen(&mut self, took: Duration) {
        self.took = if self.looks == 0 { took } else { (self.took * 7 + took) / 8 };
        self.looks += 1;
        self.price = (self.price / 2).max(PRICE[0]);
        self.earn();
    }

    fn in_vain(&mut self) {
        self.credit -= self.price;
        self.price = (self.price * 2).min(PRICE[1]);
    }

    fn slept(&mut self, long: Duration) {
        let probe = std::mem::take(&mut self.looks) >= PROBE;
        let looked = if probe { self.took } else { Duration::ZERO };
        let dear = long.saturating_sub(looked) > CHEAP;
        if long > SOON {
            self.lose(PRICE[0]);
        } else if dear {
            self.earn();
        } else if !probe {
            self.lose(1);
        }
        if !probe {
            return;
        }
        self.cheap = if dear { 0 } else { self.cheap + 1 };
        if dear {
            self.debt = DEBT[0];
        } else if self.cheap == PROBES {
            self.cheap = 0;
            self.credit = -self.debt;
            self.debt = (self.debt * 2).min(DEBT[1]);
        }
    }

    /// Reduces the credit, at most to zero; later arrivals pay debts.
    fn lose(&mut self, credit: i32) {
        self.credit = self.credit.min((self.credit - credit).max(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Simulates a connection whose bytes arrive `gap` after the wait begins, and `waking` later if
    /// the thread must be woken. Counts successful polls, failed polls and sleeps.
    fn run(record: &mut Record, gap: Duration, waking: Duration, times: u32) -> [u32; 3] {
        let mut counts = [0; 3];
        for _ in 0..times {
            if !record.allows() {
                record.slept(gap + waking);
                counts[2] += 1;
            } else if gap <= WINDOW {
                record.seen(gap);
                counts[0] += 1;
            } else {
                record.in_vain();
                counts[1] += 1;
            }
        }
        counts
    }

    #[test]
    fn where_waking_is_dear_bytes_that_come_soon_are_looked_for() {
        for (gap, waking) in [(1, 16), (10, 40), (50, 16), (50, 150)] {
            let seen = run(&mut Record::new(), micros(gap), micros(waking), 10_000);
            let probes = (10_000 - 4) / (PROBE + 1);
            assert_eq!(seen, [10_000 - 4 - probes, 0, 4 + probes], "{gap} {waking}");
        }
    }

    #[test]
    fn where_waking_is_cheap_nobody_looks_for_long() {
        assert_eq!(run(&mut Record::new(), micros(5), micros(10), 10_000), [0, 0, 10_000]);
        // Waking looks expensive at first, as the client is slow; each probe corrects that, for
        // longer.
        let mut record = Record::new();
        run(&mut record, micros(30), micros(5), 40_000);
        let [seen, _, slept] = run(&mut record, micros(30), micros(5), 100_000);
        assert!(seen <= 13 * PROBES * PROBE && slept > 90_000, "{seen} {slept}");
        // When waking becomes expensive again, polling resumes.
        let [_, _, slept] = run(&mut record, micros(30), micros(50), 20_000);
        assert!(slept < DEBT[1] as u32 + 200, "{slept}");
        assert_eq!(record.debt, DEBT[0]);
    }

    #[test]
    fn a_machine_that_becomes_busy_is_noticed_by_the_next_probes() {
        let mut record = Record::new();
        run(&mut record, micros(20), micros(40), 1000);
        let [seen, vain, slept] = run(&mut record, micros(4), micros(2), 9000);
        assert!(seen <= PROBES * PROBE && vain == 0 && slept >= 8000, "{seen} {slept}");
    }

    #[test]
    fn looks_in_vain_become_rare_and_those_that_see_make_up_for_some() {
        let [seen, vain, slept] = run(&mut Record::new(), micros(60), micros(40), 100_000);
        assert_eq!(seen, 0);
        assert!((50..150).contains(&vain), "{vain} in vain, {slept} slept");
        // One of sixteen is late: that costs little of what the others gain.
        let (mut record, mut counts) = (Record::new(), [0; 3]);
        for _ in 0..1000 {
            for (gap, times) in [(20, 15), (70, 1)] {
                let more = run(&mut record, micros(gap), micros(40), times);
                counts.iter_mut().zip(more).for_each(|(count, more)| *count += more);
            }
        }
        assert!(counts[0] > 14_000 && counts[1] > 900, "{counts:?}");
    }

    #[test]
    fn bytes_about_to_come_do_not_make_waking_look_cheap() {
        // A payload follows right behind its header. With polling, there is almost no wait and no
        // sleep; after a sleep, the payload is already there.
        let (mut record, mut slept) = (Record::new(), 0);
        for _ in 0..10_000 {
            let header = run(&mut record, micros(20), micros(40), 1)[2];
            let payload = if header > 0 { 0 } else { run(&mut record, micros(2), micros(3), 1)[2] };
            slept += header + payload;
        }
        assert!(slept < 200, "{slept}");
    }

    #[test]
    fn who_comes_late_is_slept_for() {
        assert_eq!(run(&mut Record::new(), micros(300), micros(0), 1000), [0, 0, 1000]);
        let mut record = Record::new();
        run(&mut record, micros(20), micros(40), 1000);
        let [seen, vain, _] = run(&mut record, micros(1000), micros(40), 1000);
        assert!(seen == 0 && vain <= 3, "{vain}");
    }

    #[test]
    fn no_more_look_at_once_than_may() {
        let of = |most| {
            let poll = Poll::new(Box::leak(Box::new(PollLimit::new(most))));
            run(&mut poll.record.lock(), micros(20), micros(40), 100);
            poll
        };
        let (two, none) = (of(2), of(0));
        assert!(none.look().is_none());
        let first = two.look().unwrap();
        let second = two.look().unwrap();
        assert!(two.look().is_none());
        drop(first);
        let third = two.look().unwrap();
        assert!(two.look().is_none());
        drop((second, third));
        assert!(two.look().is_some());
    }
}
