//! Reclaims host space: unlinked → durable → grace period → free.
//!
//! | state | references | ended by |
//! |---|---|---|
//! | unlinked | the map in memory does not refer to it; the map on disk may | a commit |
//! | released | neither refers to it; in-flight requests may still use it | the end of these requests |
//! | free | no request can use it | the allocator |
//!
//! The caller removes the reference first and then calls [`Reclaim::unlink`], which records the
//! start of the grace period. Every request that resolved the old reference entered before that.

use crate::sync::{InFlight, Stamp};

/// A run of host space that is being freed, in the format's units (clusters, bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Index of the image's file.
    pub file: u32,
    /// The first unit.
    pub first: u64,
    /// Number of units.
    pub count: u64,
    /// The guest discarded the bytes, so the space may be discarded in the file system.
    pub punch: bool,
}

impl Freed {
    /// One past the last unit.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Merges `next` if it continues this run and has the same kind. Returns whether it did.
    pub fn join(&mut self, next: &Self) -> bool {
        let joins = (self.file, self.end(), self.punch) == (next.file, next.first, next.punch);
        self.count += if joins { next.count } else { 0 };
        joins
    }
}

/// A run with the moment at which it lost its reference.
#[derive(Clone, Copy, Debug)]
pub struct Stamped {
    /// The run.
    pub run: Freed,
    stamp: Stamp,
}

impl Stamped {
    /// Another run with the same stamp, such as a part of this one.
    #[must_use]
    pub fn with(self, run: Freed) -> Self {
        Self { run, ..self }
    }
}

/// The freed runs of an image.
#[derive(Debug, Default)]
pub struct Reclaim {
    unlinked: Vec<Stamped>,
    /// Still unlinked, until the running commit has ended.
    committing: Vec<Stamped>,
    released: Vec<Stamped>,
}

impl Reclaim {
    /// Adds runs that the map in memory no longer refers to. Must be called after the reference is
    /// removed.
    pub fn unlink(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = Freed>) {
        push(&mut self.unlinked, flights.stamp(), runs);
    }

    /// Adds runs that neither the map in memory nor the map on disk refers to. Must be called after
    /// both references are removed.
    pub fn release(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = Freed>) {
        push(&mut self.released, flights.stamp(), runs);
    }

    /// Must be called when a commit of the changed map begins.
    pub fn begin_commit(&mut self) {
        debug_assert!(self.committing.is_empty(), "one commit at a time");
        self.committing = std::mem::take(&mut self.unlinked);
    }

    /// Must be called when the commit has ended: runs that were unlinked at its start are released
    /// if `durable`, else still unlinked.
    pub fn end_commit(&mut self, durable: bool) {
        let runs = std::mem::take(&mut self.committing);
        if durable {
            self.released.extend(runs);
        } else {
            self.unlinked.splice(0..0, runs);
        }
    }

    /// Takes released runs that no request can use any more.
    pub fn take_expired(&mut self, flights: &InFlight) -> Vec<Stamped> {
        let (ready, waiting) =
            std::mem::take(&mut self.released).into_iter().partition(|s| flights.passed(s.stamp));
        self.released = waiting;
        ready
    }

    /// Returns runs from [`Reclaim::take_expired`], or parts of them, that could not be freed.
    pub fn put_back(&mut self, runs: impl IntoIterator<Item = Stamped>) {
        self.released.extend(runs);
    }

    /// Takes all released runs. The caller puts them back or frees them otherwise.
    pub fn take_released(&mut self) -> Vec<Stamped> {
        std::mem::take(&mut self.released)
    }

    /// Runs that wait for a commit, or for the end of the running one.
    pub fn unlinked(&self) -> impl Iterator<Item = &Freed> {
        self.committing.iter().chain(&self.unlinked).map(|stamped| &stamped.run)
    }

    /// Runs that wait for in-flight requests.
    pub fn released(&self) -> impl Iterator<Item = &Freed> {
        self.released.iter().map(|stamped| &stamped.run)
    }
}

/// Appends runs, merging consecutive ones.
fn push(list: &mut Vec<Stamped>, stamp: Stamp, runs: impl IntoIterator<Item = Freed>) {
    for run in runs {
        if !list.last_mut().is_some_and(|last| last.stamp == stamp && last.run.join(&run)) {
            list.push(Stamped { run, stamp });
        }
    }
}
