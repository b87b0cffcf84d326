//! One flush, as it is for every format.

use vdkit_block::Result;

use crate::commit::{Commit, Lead};
use crate::reclaim::Reclaim;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the writers of an image change, under one lock.
pub trait State {
    /// Where host space waits that was given up.
    fn reclaim(&mut self) -> &mut Reclaim;

    /// Whether no reservation is open.
    fn idle(&self) -> bool;
}

/// What a format alone knows about its metadata: what is dirty, and in which groups it goes to disk
/// behind which barriers.
pub trait Metadata {
    /// What writers change.
    type State: State;
    /// What only the leader of a commit touches.
    type Order;
    /// Copies of dirty metadata as it was at one moment.
    type Dirty;

    /// Copies what is dirty. From here on it counts as being written; on an error it does not. `alone`:
    /// the lock is held until it is written, so what [`Metadata::write`] can find need not be copied.
    ///
    /// # Errors
    /// What the storage returns.
    fn take(&self, state: &mut MutexGuard<'_, Self::State>, alone: bool) -> Result<Self::Dirty>;

    /// Writes the groups, each behind its barrier, and makes them durable, with all guest data that
    /// was written before. Must not take the lock of the state.
    ///
    /// # Errors
    /// What the storage returns.
    fn write(&self, dirty: &Self::Dirty, order: &mut Self::Order) -> Result<()>;

    /// What was taken is durable, or dirty again.
    fn settle(&self, state: &mut Self::State, dirty: Self::Dirty, durable: bool);

    /// Whether the map has changed since it was taken last.
    fn is_dirty(&self, state: &Self::State) -> bool;

    /// Frees space that nobody can reach any more; see [`Reclaim::expired`].
    ///
    /// # Errors
    /// What the storage returns.
    fn recycle(&self) -> Result<()>;

    /// The image is closed, no reservation is open, and the map is durable: gives up what was
    /// reserved ahead of need, and cuts the file. A commit makes durable what changes here.
    ///
    /// # Errors
    /// What the storage returns. Memory and file must agree then, too.
    fn trim(
        &self,
        _state: &mut MutexGuard<'_, Self::State>,
        _order: &mut Self::Order,
    ) -> Result<()> {
        Ok(())
    }

    /// All is durable: writes what says that the image was closed cleanly, durably. Called without
    /// the lock of the state.
    ///
    /// # Errors
    /// What the storage returns.
    fn finish(&self, _order: &mut Self::Order) -> Result<()> {
        Ok(())
    }
}

/// The lock of an image's writers, its open reservations' end, and its group commit.
///
/// Locks, in the order in which they are taken: the lead ([`Engine::lead`]), then the state
/// ([`Engine::lock`]).
#[derive(Debug)]
pub struct Engine<S, O> {
    state: Mutex<S>,
    ended: Condvar,
    commit: Commit<O>,
}

impl<S: State, O> Engine<S, O> {
    /// An image that was just opened.
    pub fn new(state: S, order: O) -> Self {
        Self { state: Mutex::new(state), ended: Condvar::new(), commit: Commit::new(order) }
    }

    /// What writers change.
    pub fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock()
    }

    /// Gives up the lock until a reservation, a flush or an exclusive change has ended.
    pub fn wait(&self, state: &mut MutexGuard<'_, S>) {
        self.ended.wait(state);
    }

    /// Gives up the lock until this holds.
    pub fn wait_until(&self, state: &mut MutexGuard<'_, S>, holds: impl Fn(&S) -> bool) {
        while !holds(state) {
            self.wait(state);
        }
    }

    /// Wakes all who wait.
    pub fn ended(&self) {
        self.ended.notify_all();
    }

    /// Waits until no flush runs, and keeps others from beginning one.
    pub fn lead(&self) -> Lead<'_, O> {
        self.commit.lead()
    }

    /// Makes durable what was done before this call, metadata and guest data: by one flush for all
    /// who ask meanwhile.
    ///
    /// # Errors
    /// What the storage returns.
    pub fn flush<F>(&self, format: &F) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        let number = self.commit.draw();
        self.commit.durable_up_to(number, |lead| self.commit_dirty(format, lead, false))
    }

    /// A flush by who has the lead.
    ///
    /// # Errors
    /// As [`Engine::flush`].
    pub fn flush_led<F>(&self, format: &F, lead: &mut Lead<'_, O>) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        lead.run(|lead| self.commit_dirty(format, lead, false))
    }

    /// Waits until no reservation is open and the map is durable. It stays so as long as both parts of
    /// the answer are held.
    ///
    /// # Errors
    /// As [`Engine::flush`].
    pub fn quiesce<F>(&self, format: &F) -> Result<(Lead<'_, O>, MutexGuard<'_, S>)>
    where
        F: Metadata<State = S, Order = O>,
    {
        let mut lead = self.lead();
        loop {
            let mut state = self.lock();
            if !state.idle() {
                // Whoever holds a reservation may need a flush to go on.
                drop(lead);
                self.wait(&mut state);
                drop(state);
                lead = self.lead();
            } else if state.reclaim().unlinked().next().is_some() || format.is_dirty(&state) {
                drop(state);
                lead.run(|lead| self.commit_dirty(format, lead, true))?;
            } else {
                return Ok((lead, state));
            }
        }
    }

    /// Flushes, gives back what nobody uses, and marks the image as closed. It can be used again: the
    /// next change begins as after opening.
    ///
    /// # Errors
    /// As [`Engine::flush`]. What a crash would leave is left then, and closing can be tried again.
    pub fn close<F>(&self, format: &F) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        format.recycle()?;
        let (mut lead, mut state) = self.quiesce(format)?;
        let trimmed = format.trim(&mut state, lead.order());
        drop(state);
        trimmed?;
        lead.run(|lead| self.commit_dirty(format, lead, true))?;
        format.finish(lead.order())
    }

    fn commit_dirty<F>(&self, format: &F, lead: &mut Lead<'_, O>, alone: bool) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        let mut state = self.lock();
        let dirty = format.take(&mut state, alone)?;
        // Those whose reference is gone from what was taken, and no others.
        state.reclaim().begin_commit();
        // Of an image that others use, copies are written, so that they can go on.
        let held = alone.then_some(state);
        let written = format.write(&dirty, lead.order());
        let mut state = held.unwrap_or_else(|| self.lock());
        format.settle(&mut state, dirty, written.is_ok());
        state.reclaim().end_commit(written.is_ok());
        drop(state);
        self.ended();
        written?;
        format.recycle()
    }
}
