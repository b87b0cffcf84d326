//! Adaptive polling: how long to poll a socket before sleeping on it.
//!
//! Waking a thread on an idle processor takes tens of microseconds, in a virtual machine several
//! times the cost of a small request. A client that waits for each reply pays this on every
//! request. So a connection whose bytes arrive soon is polled before its thread sleeps.
//!
//! The polling time grows and shrinks as in QEMU's event loop (`poll-max-ns`, `poll-grow`,
//! `poll-shrink`): it doubles while waits are short, and a long wait sets it to zero.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Default of the maximum polling time.
pub const POLL_MAX: Duration = Duration::from_micros(50);
/// The polling time after zero.
const FIRST: Duration = Duration::from_micros(4);
/// A wait of up to this many times the maximum is short. It includes waking the thread, which
/// polling saves.
const SHORT: u32 = 4;

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
        let permit = PollPermit(self);
        // Dropping it undoes the count if it is one too many.
        (self.now.fetch_add(1, Ordering::Relaxed) < self.most).then_some(permit)
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

/// The polling time of one connection.
#[derive(Debug)]
pub struct Poll {
    /// Nanoseconds. One thread at a time receives, so no update is lost.
    time: AtomicU64,
    max: Duration,
    limit: &'static PollLimit,
}

impl Poll {
    /// A new connection, polled for at most `max`; never if that is zero.
    pub const fn new(max: Duration, limit: &'static PollLimit) -> Self {
        Self { time: AtomicU64::new(0), max, limit }
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.time.load(Ordering::Relaxed))
    }

    /// How long to poll before sleeping, and the permission to.
    pub fn begin(&self) -> Option<(Duration, PollPermit<'static>)> {
        let time = self.time();
        if time.is_zero() { None } else { Some((time, self.limit.enter()?)) }
    }

    /// Bytes arrived after a wait of `long`, polling and sleeping.
    pub fn waited(&self, long: Duration) {
        let time = self.time();
        if long <= time {
            return;
        }
        // A full poll that found nothing has shown that polling does not help.
        let short = time < self.max && long <= self.max.saturating_mul(SHORT);
        let next =
            if short { time.saturating_mul(2).max(FIRST).min(self.max) } else { Duration::ZERO };
        self.time.store(next.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(max: u64, most: usize) -> Poll {
        Poll::new(Duration::from_micros(max), Box::leak(Box::new(PollLimit::new(most))))
    }

    /// Simulates waits for bytes that arrive after `gap`, and `waking` later if the thread must be
    /// woken. Returns the polling time after each, in microseconds.
    fn run(poll: &Poll, gap: u64, waking: u64, times: usize) -> Vec<u64> {
        let wait = || {
            let polled = poll.begin().is_some_and(|(time, _)| time >= Duration::from_micros(gap));
            poll.waited(Duration::from_micros(if polled { gap } else { gap + waking }));
            poll.time().as_micros() as u64
        };
        std::iter::repeat_with(wait).take(times).collect()
    }

    #[test]
    fn the_time_grows_until_bytes_are_met_and_falls_when_they_come_late() {
        let poll = poll(50, 1);
        assert_eq!(run(&poll, 20, 40, 5), [4, 8, 16, 32, 32]);
        assert_eq!(run(&poll, 45, 40, 3), [50, 50, 50]);
        assert_eq!(run(&poll, 1000, 40, 2), [0, 0]);
        // Waking makes a wait longer than the maximum, and polling would save just that.
        assert_eq!(run(&poll, 45, 150, 6), [4, 8, 16, 32, 50, 50]);
        // Full polls that find nothing.
        assert_eq!(run(&poll, 60, 40, 6), [0, 4, 8, 16, 32, 50]);
    }

    #[test]
    fn zero_turns_it_off_and_a_small_maximum_is_kept() {
        assert_eq!(run(&poll(0, 1), 1, 10, 3), [0, 0, 0]);
        assert_eq!(run(&poll(3, 1), 2, 5, 3), [3, 3, 3]);
    }

    #[test]
    fn no_more_poll_at_once_than_may() {
        let (two, none) = (poll(50, 2), poll(50, 0));
        run(&two, 20, 40, 9);
        run(&none, 20, 40, 9);
        assert!(none.begin().is_none());
        let first = two.begin().unwrap();
        let _second = two.begin().unwrap();
        assert!(two.begin().is_none());
        drop(first);
        assert!(two.begin().is_some());
    }
}
