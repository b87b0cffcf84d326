//! When to look for the next bytes for a while before sleeping until they come.
//!
//! Waking a thread whose processor sleeps takes tens of microseconds, in a virtual machine several times
//! what a small request costs. A client that waits for its replies before it sends more pays that
//! again and again. So a connection whose bytes come soon is looked at for [`WINDOW`] before its
//! thread sleeps. It is what KVM does with a processor that a guest halts (`halt_poll_ns`), and for the
//! same reason.
//!
//! Looking is worse than sleeping on a busy machine: processors do not sleep there, so a thread is
//! woken in a few microseconds, and a processor that looks is one that the client may want. What
//! waking costs is the difference between bytes that were slept for and bytes that were looked for;
//! so after [`PROBE`] looks one is left out, and where several
//! such probes find it small it is not looked for a while. And looks in vain become rare quickly.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// How long it is looked for.
pub const WINDOW: Duration = Duration::from_micros(50);
/// Bytes that were slept for and came within so long, the wake-up included, might have been seen.
const SOON: Duration = Duration::from_micros(200);
/// To sleep costs so much more than to look, or it is not worth to look.
const CHEAP: Duration = Duration::from_micros(15);
/// After so many looks it is slept once, to see what that costs.
const PROBE: u32 = 128;
/// The most that a connection saves up, one for each time that bytes came soon.
const CREDIT_MAX: i32 = 16;
/// What a look in vain costs: at first, and after many others.
const PRICE: [i32; 2] = [4, 1024];
/// So many probes one after the other must find waking cheap: a single one may have met bytes that
/// were about to come, such as a payload behind its header.
const PROBES: u32 = 4;
/// How far probes that found waking cheap set the connection back: at first, and after many others.
const DEBT: [i32; 2] = [64, 8192];

/// Those that look at the moment, in all of the program.
#[derive(Debug)]
pub struct Lookers {
    now: AtomicUsize,
    most: usize,
}

impl Lookers {
    /// At most so many at a time.
    pub const fn new(most: usize) -> Self {
        Self { now: AtomicUsize::new(0), most }
    }

    /// Those of this program: half of the processors, as a client wants one too; none on a machine
    /// with a single one.
    pub fn usual() -> &'static Self {
        static USUAL: LazyLock<Lookers> = LazyLock::new(|| {
            Lookers::new(std::thread::available_parallelism().map_or(0, |count| count.get() / 2))
        });
        &USUAL
    }

    fn enter(&self) -> Option<Looking<'_>> {
        let looking = Looking(self);
        // Counted down again where it is one too many.
        (self.now.fetch_add(1, Ordering::Relaxed) < self.most).then_some(looking)
    }
}

/// Leave to look, until dropped.
#[derive(Debug)]
pub struct Looking<'a>(&'a Lookers);

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How soon one connection's bytes came.
#[derive(Debug)]
pub struct Poll {
    /// One thread at a time receives: nobody ever waits for this.
    record: Mutex<Record>,
    lookers: &'static Lookers,
}

impl Poll {
    /// A connection of which nothing is known.
    pub const fn new(lookers: &'static Lookers) -> Self {
        Self { record: Mutex::new(Record::new()), lookers }
    }

    /// Leave to look before sleeping.
    pub fn look(&self) -> Option<Looking<'static>> {
        if self.record.lock().allows() { self.lookers.enter() } else { None }
    }

    /// A look saw bytes after so long.
    pub fn seen(&self, took: Duration) {
        self.record.lock().seen(took);
    }

    /// Nothing came within the window.
    pub fn in_vain(&self) {
        self.record.lock().in_vain();
    }

    /// Bytes were slept for, so long, and not looked for before.
    pub fn slept(&self, long: Duration) {
        self.record.lock().slept(long);
    }
}

#[derive(Debug)]
struct Record {
    /// A look may be made with [`Record::price`] of it.
    credit: i32,
    price: i32,
    debt: i32,
    /// Probes that found waking cheap, since one that did not.
    cheap: u32,
    /// Looks that saw bytes since it was slept last.
    looks: u32,
    /// What those took, of late ones more than of early ones.
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

    /// Down to nothing; debts are paid by what comes soon.
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

    /// What becomes of a connection whose bytes come so long after they were first waited for, and
    /// so much later where the thread must be woken: looks that saw them, looks in vain, sleeps.
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
        // It looks dear at first, as the client takes its time; each probe tells better, for longer.
        let mut record = Record::new();
        run(&mut record, micros(30), micros(5), 40_000);
        let [seen, _, slept] = run(&mut record, micros(30), micros(5), 100_000);
        assert!(seen <= 13 * PROBES * PROBE && slept > 90_000, "{seen} {slept}");
        // And once it is dear again, that is found out.
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
        // One of sixteen late: that takes little of what the others gain.
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
        // A payload comes right behind its header. Where that was looked for, there is nearly nothing
        // to wait for, and nothing that fell asleep; where it was slept for, the payload is there.
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
            let poll = Poll::new(Box::leak(Box::new(Lookers::new(most))));
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
