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

use vdkit_block::{InFlight, Stamp};

/// A run of host space that was given up.
pub trait Run {
    /// Takes in `next` where it continues this run and is alike.
    fn join(&mut self, next: &Self) -> bool;
}

/// For formats that give up nothing while an image is open.
impl Run for () {
    fn join(&mut self, _next: &Self) -> bool {
        true
    }
}

/// A run with the moment at which it lost its reference.
#[derive(Clone, Copy, Debug)]
pub struct Stamped<R> {
    /// The run.
    pub run: R,
    stamp: Stamp,
}

impl<R> Stamped<R> {
    /// Another run, such as a part of this one, that lost its reference at the same moment.
    #[must_use]
    pub fn with(self, run: R) -> Self {
        Self { run, ..self }
    }
}

/// The runs of an image that were given up.
#[derive(Debug)]
pub struct Reclaim<R> {
    unlinked: Vec<Stamped<R>>,
    released: Vec<Stamped<R>>,
}

impl<R> Default for Reclaim<R> {
    fn default() -> Self {
        Self { unlinked: Vec::new(), released: Vec::new() }
    }
}

impl<R: Run> Reclaim<R> {
    /// Runs that the map in memory does not refer to any more. To be called after the reference is
    /// gone.
    pub fn unlink(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = R>) {
        push(&mut self.unlinked, flights.stamp(), runs);
    }

    /// Runs that neither the map in memory nor that on disk refers to. To be called after both
    /// references are gone.
    pub fn release(&mut self, flights: &InFlight, runs: impl IntoIterator<Item = R>) {
        push(&mut self.released, flights.stamp(), runs);
    }

    /// What is unlinked, to be kept with the commit that takes the changed map to disk.
    #[must_use]
    pub fn take_unlinked(&mut self) -> Vec<Stamped<R>> {
        std::mem::take(&mut self.unlinked)
    }

    /// The commit has ended that took these along: they are released, or still unlinked.
    pub fn committed(&mut self, runs: Vec<Stamped<R>>, durable: bool) {
        if durable {
            self.released.extend(runs);
        } else {
            let later = std::mem::replace(&mut self.unlinked, runs);
            self.unlinked.extend(later);
        }
    }

    /// Released runs that no request can use any more.
    pub fn expired(&mut self, flights: &InFlight) -> Vec<Stamped<R>> {
        let (ready, waiting) =
            std::mem::take(&mut self.released).into_iter().partition(|s| flights.passed(s.stamp));
        self.released = waiting;
        ready
    }

    /// Runs that were taken with [`Reclaim::expired`], or parts of them, and could not be freed.
    pub fn put_back(&mut self, runs: impl IntoIterator<Item = Stamped<R>>) {
        self.released.extend(runs);
    }

    /// What is released. The caller puts it back, or has freed it otherwise.
    pub fn take_released(&mut self) -> Vec<Stamped<R>> {
        std::mem::take(&mut self.released)
    }

    /// What waits for a commit.
    pub fn unlinked(&self) -> impl Iterator<Item = &R> {
        self.unlinked.iter().map(|stamped| &stamped.run)
    }

    /// What waits for requests in flight.
    pub fn released(&self) -> impl Iterator<Item = &R> {
        self.released.iter().map(|stamped| &stamped.run)
    }
}

/// Appends runs, joined where they go on.
fn push<R: Run>(list: &mut Vec<Stamped<R>>, stamp: Stamp, runs: impl IntoIterator<Item = R>) {
    for run in runs {
        if !list.last_mut().is_some_and(|last| last.stamp == stamp && last.run.join(&run)) {
            list.push(Stamped { run, stamp });
        }
    }
}
