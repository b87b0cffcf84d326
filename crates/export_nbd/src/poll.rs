//! When to look for the next bytes for a while before sleeping until they come.
//!
//! Waking a thread whose processor sleeps takes tens of microseconds, in a virtual machine several times
//! what a small request costs. A client that waits for its replies before it sends more pays that
//! again and again. So a connection whose bytes come soon after the last reply, but not at once as
//! they do where waking costs little, is looked at for [`WINDOW`] before its thread sleeps. It is what
//! KVM does with a processor that a guest halts (`halt_poll_ns`), and for the same reason.
//!
//! Looking is worse than sleeping on a busy machine: processors do not sleep there, so a thread is
//! woken in a few microseconds, and a processor that looks is one that the client may want. So every
//! [`PROBE`]th time it is slept all the same, and what that took decides.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// How long it is looked for.
pub const WINDOW: Duration = Duration::from_micros(50);
/// Bytes that were slept for and came within so long, the wake-up included, would have been seen.
const SOON: Duration = Duration::from_micros(100);
/// Bytes that were slept for and came within so long: waking costs little at present.
const CHEAP: Duration = Duration::from_micros(25);
/// Bytes that came within so long were there.
const THERE: Duration = Duration::from_micros(3);
/// The most a connection can save up, one for each time that bytes came soon.
const CREDIT_MAX: u32 = 16;
/// What a look costs that is in vain, and bytes that came late: so of those that come soon four pay
/// for each such look.
const LOSS: u32 = 4;
/// Of so many looks one is not made.
const PROBE: u32 = 128;

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

/// How soon one connection's bytes came. One thread at a time receives, so nothing here is a race
/// that matters.
#[derive(Debug)]
pub struct Poll {
    credit: AtomicU32,
    /// Looks since it was slept last.
    looks: AtomicU32,
    lookers: &'static Lookers,
}

impl Poll {
    /// A connection without credit yet.
    pub const fn new(lookers: &'static Lookers) -> Self {
        Self { credit: AtomicU32::new(0), looks: AtomicU32::new(0), lookers }
    }

    /// Leave to look before sleeping.
    pub fn look(&self) -> Option<Looking<'static>> {
        let looks = self.looks.load(Ordering::Relaxed) + 1;
        if self.credit() < LOSS || looks == PROBE {
            return None;
        }
        self.looks.store(looks, Ordering::Relaxed);
        self.lookers.enter()
    }

    /// A look saw bytes.
    pub fn seen(&self) {
        self.set_credit((self.credit() + 1).min(CREDIT_MAX));
    }

    /// Nothing came within the window.
    pub fn in_vain(&self) {
        self.set_credit(self.credit().saturating_sub(LOSS));
    }

    /// Bytes were slept for, so long.
    pub fn slept(&self, long: Duration) {
        self.looks.store(0, Ordering::Relaxed);
        if long > SOON {
            self.in_vain();
        } else if long > CHEAP {
            self.seen();
        } else if long > THERE {
            self.set_credit(0);
        }
    }

    fn credit(&self) -> u32 {
        self.credit.load(Ordering::Relaxed)
    }

    fn set_credit(&self, credit: u32) {
        self.credit.store(credit, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_micros(101);

    fn poll(most: usize) -> Poll {
        Poll::new(Box::leak(Box::new(Lookers::new(most))))
    }

    /// With all the credit there can be.
    fn trusted(most: usize) -> Poll {
        let poll = poll(most);
        for _ in 0..CREDIT_MAX + 1 {
            poll.slept(SOON);
        }
        poll
    }

    #[test]
    fn who_sends_soon_is_looked_for_and_who_does_not_is_not() {
        let poll = poll(1);
        for _ in 0..LOSS {
            assert!(poll.look().is_none());
            poll.slept(SOON);
        }
        assert!(poll.look().is_some());
        poll.slept(LATE);
        assert!(poll.look().is_none());
        // However long it was soon, so many late ones end it.
        let poll = trusted(1);
        for _ in 0..CREDIT_MAX / LOSS {
            assert!(poll.look().is_some());
            poll.slept(LATE);
        }
        assert!(poll.look().is_none());
    }

    #[test]
    fn four_that_came_soon_pay_for_a_look_in_vain() {
        let poll = poll(1);
        let (mut slept, mut vain) = (0, 0);
        for _ in 0..10_000 {
            match poll.look() {
                Some(_) => {
                    vain += 1;
                    poll.in_vain();
                }
                None => {
                    slept += 1;
                    poll.slept(SOON);
                }
            }
        }
        assert_eq!((slept, vain), (8000, 2000));
    }

    #[test]
    fn where_waking_costs_little_nobody_looks() {
        let fresh = poll(1);
        for _ in 0..100 {
            assert!(fresh.look().is_none());
            fresh.slept(CHEAP);
        }
        // Also once it has become so: at the next probe.
        let poll = trusted(1);
        let mut looks = 0;
        while poll.look().is_some() {
            poll.seen();
            looks += 1;
        }
        assert_eq!(looks, PROBE - 1);
        poll.slept(CHEAP);
        assert!(poll.look().is_none());
        // Bytes that were there tell nothing, and a probe that took its time lets looking go on.
        for long in [THERE, SOON] {
            let poll = trusted(1);
            for _ in 0..PROBE - 1 {
                assert!(poll.look().is_some());
            }
            assert!(poll.look().is_none());
            poll.slept(long);
            assert!(poll.look().is_some());
        }
    }

    #[test]
    fn no_more_look_at_once_than_may() {
        let (two, none) = (trusted(2), trusted(0));
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
