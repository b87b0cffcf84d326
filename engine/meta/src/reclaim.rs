//! Host space on its way back: unlinked → durable → grace period → free.
//!
//! | state | what holds | what ends it |
//! |---|---|---|
//! | unlinked | the map in memory refers to it no more; the map on disk may | a commit |
//! | released | neither refers to it; requests in flight may still use it | their end |
//! | free | nobody can reach it | the allocator |
//!
//! The stamp of the grace period is taken here, by [`Reclaim::unlink`], and so after the caller has
//! removed the reference: a request that resolved the old reference entered before the stamp.

use crate::sync::{InFlight, Stamp};

/// A run of host space that was given up, in the format's units (clusters, bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// Which of the image's files it is in.
    pub file: u32,
    /// The first unit.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// The guest gave the bytes up: the file system may have the space.
    pub punch: bool,
}

impl Freed {
    /// The unit behind the last one.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Takes in `next` where it goes on from here and is alike.
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
    /// Another run, such as a part of this one, that lost its reference at the same moment.
    #[must_use]
    pub fn with(self, run: Freed) -> Self {
        Self { run, ..self }
    }
}

/// The runs of an image that were given up.
#[derive(Debug, Default)]
pub struct Reclaim {
    unlinked: Vec<Stamped>,
    /// Unlinked still, until the commit has ended that runs.
    committing: Vec<Stamped>,
    released: Vec<Stamped>,
}

impl Reclaim {
    /// Runs that the map in memory does not refer to any more. To be called after the reference is
    /// gone.
    pub fn unlink(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = Freed>) {
        push(&mut self.unlinked, flights.stamp(), runs);
    }

    /// Runs that neither the map in memory nor that on disk refers to. To be called after both
    /// references are gone.
    pub fn release(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = Freed>) {
        push(&mut self.released, flights.stamp(), runs);
    }

    /// A commit begins that takes the changed map to disk.
    pub fn begin_commit(&mut self) {
        debug_assert!(self.committing.is_empty(), "one commit at a time");
        self.committing = std::mem::take(&mut self.unlinked);
    }

    /// It has ended: what was unlinked when it began is released, or still unlinked.
    pub fn end_commit(&mut self, durable: bool) {
        let runs = std::mem::take(&mut self.committing);
        if durable {
            self.released.extend(runs);
        } else {
            self.unlinked.splice(0..0, runs);
        }
    }

    /// Released runs that no request can use any more.
    pub fn expired(&mut self, flights: &InFlight) -> Vec<Stamped> {
        let (ready, waiting) =
            std::mem::take(&mut self.released).into_iter().partition(|s| flights.passed(s.stamp));
        self.released = waiting;
        ready
    }

    /// Runs that were taken with [`Reclaim::expired`], or parts of them, and could not be freed.
    pub fn put_back(&mut self, runs: impl IntoIterator<Item = Stamped>) {
        self.released.extend(runs);
    }

    /// What is released. The caller puts it back, or has freed it otherwise.
    pub fn take_released(&mut self) -> Vec<Stamped> {
        std::mem::take(&mut self.released)
    }

    /// What waits for a commit, or for the end of the one that runs.
    pub fn unlinked(&self) -> impl Iterator<Item = &Freed> {
        self.committing.iter().chain(&self.unlinked).map(|stamped| &stamped.run)
    }

    /// What waits for requests in flight.
    pub fn released(&self) -> impl Iterator<Item = &Freed> {
        self.released.iter().map(|stamped| &stamped.run)
    }
}

/// Appends runs, joined where they go on.
fn push(list: &mut Vec<Stamped>, stamp: Stamp, runs: impl IntoIterator<Item = Freed>) {
    for run in runs {
        if !list.last_mut().is_some_and(|last| last.stamp == stamp && last.run.join(&run)) {
            list.push(Stamped { run, stamp });
        }
    }
}
