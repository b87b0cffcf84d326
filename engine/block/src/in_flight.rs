//! Detects when every request that resolved to a host cluster has ended.
//!
//! A request enters before it resolves and leaves after its I/O. A freed cluster may be reused once
//! every request that had entered before the free has left. This is sleepable RCU with two
//! counters: entering increments the counter of the current phase. A grace period is over when the
//! phase has flipped twice and each old counter was seen at zero. Nothing blocks: callers that free
//! clusters poll [`InFlight::passed`].

use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// A point in time of an image; see [`InFlight::passed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

/// Counts requests in flight, by phase.
#[derive(Debug, Default)]
pub struct InFlight {
    phase: AtomicU64,
    active: [PaddedCounter; 2],
}

// Padded to a cache line, so that the two counters do not contend.
#[derive(Debug, Default)]
#[repr(align(64))]
struct PaddedCounter(AtomicUsize);

/// Proof that a request is in flight; dropping it ends the request.
#[derive(Debug)]
#[must_use = "the request ends when the guard is dropped"]
pub struct InFlightGuard<'a> {
    counter: &'a AtomicUsize,
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, Ordering::SeqCst);
    }
}

impl InFlight {
    /// Marks a request as begun.
    pub fn enter(&self) -> InFlightGuard<'_> {
        loop {
            let phase = self.phase.load(Ordering::SeqCst);
            let counter = &self.active[(phase & 1) as usize].0;
            counter.fetch_add(1, Ordering::SeqCst);
            // A flip between the load and the add would count us in a phase that a reclaimer
            // believes to be empty.
            if self.phase.load(Ordering::SeqCst) == phase {
                return InFlightGuard { counter };
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Returns the current phase. Call it after removing the last reference to something: if the phase
    /// moved between an earlier call and the removal, a request that enters then could resolve the
    /// old reference, and nobody would wait for it.
    pub fn stamp(&self) -> Stamp {
        Stamp(self.phase.load(Ordering::SeqCst))
    }

    /// Whether every request that was in flight at `stamp` has ended. Advances the phase if
    /// possible, so that polling makes progress.
    pub fn passed(&self, stamp: Stamp) -> bool {
        let Stamp(stamp) = stamp;
        for _ in 0..2 {
            let phase = self.phase.load(Ordering::SeqCst);
            if phase >= stamp + 2 {
                return true;
            }
            // Entering requests use the counter of `phase`; the other one only drains. The phase
            // may advance once the draining counter is empty, since it is reused next.
            let draining = &self.active[((phase + 1) & 1) as usize].0;
            if draining.load(Ordering::SeqCst) != 0 {
                return false;
            }
            let _ =
                self.phase.compare_exchange(phase, phase + 1, Ordering::SeqCst, Ordering::SeqCst);
        }
        self.phase.load(Ordering::SeqCst) >= stamp + 2
    }
}
