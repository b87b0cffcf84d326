//! Group commit: one commit makes the changes of many callers durable.
//!
//! Every change has a number, drawn after the change was made. A caller that needs a change to be
//! durable requests all changes up to its number. The caller that gets the lead commits everything
//! that was drawn before the commit began. The others wait, and most find that a commit has covered
//! their number. The model is PostgreSQL's `XLogFlush` of a log sequence number.
//!
//! ```text
//!   writer 1   change, draw 7 ── durable_up_to(7) ─► leads: covers 1..=8 ──────────► returns
//!   writer 2   change, draw 8 ── durable_up_to(8) ─► waits ........................► returns
//!   writer 3          change, draw 9 (the commit runs) ── durable_up_to(9) ─► waits, leads the next
//! ```
//!
//! There is no "clean" flag: a change that is made while a commit runs has a larger number than
//! that commit covers.

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Numbers changes and commits them in groups. `O` is state that only the leader uses.
#[derive(Debug, Default)]
pub struct Commit<O> {
    drawn: AtomicU64,
    leader: Mutex<Leader<O>>,
}

#[derive(Debug, Default)]
struct Leader<O> {
    /// All changes up to this number are durable.
    durable: u64,
    order: O,
}

/// The lead of a [`Commit`]: no other thread can commit while it is held.
#[derive(Debug)]
pub struct Lead<'a, O> {
    commit: &'a Commit<O>,
    leader: MutexGuard<'a, Leader<O>>,
}

impl<O> Commit<O> {
    /// A commit group without changes.
    pub fn new(order: O) -> Self {
        Self { drawn: AtomicU64::new(0), leader: Mutex::new(Leader { durable: 0, order }) }
    }

    /// Returns a new sequence number. Call it after a change: [`Commit::durable_up_to`] with this
    /// number makes that change durable.
    pub fn draw(&self) -> u64 {
        self.drawn.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns when all changes up to `number` are durable. Runs `commit` unless another caller's
    /// commit has covered `number`. A commit covers all changes numbered before it began.
    ///
    /// # Errors
    /// Those of `commit`. The numbers that it would have covered stay open: each of their callers
    /// then leads its own commit and gets its own error.
    pub fn durable_up_to<E>(
        &self,
        number: u64,
        commit: impl FnOnce(&mut Lead<'_, O>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut lead = self.lead();
        if lead.leader.durable >= number {
            return Ok(());
        }
        lead.run(commit)
    }

    /// Waits for the lead, and takes it.
    pub fn lead(&self) -> Lead<'_, O> {
        Lead { commit: self, leader: self.leader.lock() }
    }
}

impl<O> Lead<'_, O> {
    /// Commits: `commit` makes everything durable that was changed before it began.
    ///
    /// # Errors
    /// Those of `commit`.
    pub fn run<E>(&mut self, commit: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        // Read before the commit collects changes: it may miss later ones.
        let covers = self.commit.drawn.load(Ordering::SeqCst);
        commit(self)?;
        self.leader.durable = covers;
        Ok(())
    }

    /// State that only the leader uses.
    pub fn leader_state(&mut self) -> &mut O {
        &mut self.leader.order
    }
}
