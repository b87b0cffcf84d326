//! The flush procedure of all formats.

use vdkit_block::Result;

use crate::commit::{Commit, Lead};
use crate::reclaim::Reclaim;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// State that the writers of an image change, under one lock.
pub trait State {
    /// Freed host space that waits for its reuse.
    fn reclaim(&mut self) -> &mut Reclaim;

    /// Whether no reservation is open.
    fn idle(&self) -> bool;
}

/// The format-specific part of metadata: what is dirty, and the groups and barriers of its writes.
pub trait Metadata {
    /// State that writers change.
    type State: State;
    /// State that only the leader of a commit uses.
    type LeaderState;
    /// Copies of dirty metadata at one moment.
    type Dirty;

    /// Copies dirty metadata, and marks it as being written, except on an error. With `alone`, the
    /// lock is held until the write ends, so data that [`Metadata::write`] can access need not be
    /// copied.
    ///
    /// # Errors
    /// What the storage returns.
    fn take(&self, state: &mut MutexGuard<'_, Self::State>, alone: bool) -> Result<Self::Dirty>;

    /// Writes the groups, each after its barrier, and makes them durable, with all guest data that
    /// was written before. Must not take the lock of the state.
    ///
    /// # Errors
    /// What the storage returns.
    fn write(&self, dirty: &Self::Dirty, order: &mut Self::LeaderState) -> Result<()>;

    /// Marks the taken metadata as clean if `durable`, else as dirty again.
    fn end_write(&self, state: &mut Self::State, dirty: Self::Dirty, durable: bool);

    /// Whether the map has changed since the last `take`.
    fn is_dirty(&self, state: &Self::State) -> bool;

    /// Frees space that no request can use any more; see [`Reclaim::take_expired`].
    ///
    /// # Errors
    /// What the storage returns.
    fn recycle(&self) -> Result<()>;

    /// Called on close, when no reservation is open and the map is durable: frees preallocated
    /// space, and truncates the file. The following commit makes these changes durable.
    ///
    /// # Errors
    /// What the storage returns. Memory and file must agree even after an error.
    fn trim(
        &self,
        _state: &mut MutexGuard<'_, Self::State>,
        _order: &mut Self::LeaderState,
    ) -> Result<()> {
        Ok(())
    }

    /// Called when everything is durable: durably marks the image as closed cleanly. Called without
    /// the lock of the state.
    ///
    /// # Errors
    /// What the storage returns.
    fn finish(&self, _order: &mut Self::LeaderState) -> Result<()> {
        Ok(())
    }
}

/// The lock of an image's writers, the wake-up of waiting threads, and the group commit.
///
/// Lock order: the lead ([`Engine::lead`]), then the state ([`Engine::lock`]).
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

    /// Releases the lock until a reservation, a flush or an exclusive change has ended.
    pub fn wait(&self, state: &mut MutexGuard<'_, S>) {
        self.ended.wait(state);
    }

    /// Releases the lock until `holds` returns true.
    pub fn wait_until(&self, state: &mut MutexGuard<'_, S>, holds: impl Fn(&S) -> bool) {
        while !holds(state) {
            self.wait(state);
        }
    }

    /// Wakes all waiting threads.
    pub fn ended(&self) {
        self.ended.notify_all();
    }

    /// Waits until no flush runs, and prevents new ones while the lead is held.
    pub fn lead(&self) -> Lead<'_, O> {
        self.commit.lead()
    }

    /// Makes metadata and guest data that were written before this call durable. Concurrent callers
    /// share one flush.
    ///
    /// # Errors
    /// What the storage returns.
    pub fn flush<F>(&self, format: &F) -> Result<()>
    where
        F: Metadata<State = S, LeaderState = O>,
    {
        let number = self.commit.draw();
        self.commit.durable_up_to(number, |lead| self.commit_dirty(format, lead, false))
    }

    /// A flush by the holder of the lead.
    ///
    /// # Errors
    /// As [`Engine::flush`].
    pub fn flush_led<F>(&self, format: &F, lead: &mut Lead<'_, O>) -> Result<()>
    where
        F: Metadata<State = S, LeaderState = O>,
    {
        lead.run(|lead| self.commit_dirty(format, lead, false))
    }

    /// Waits until no reservation is open and the map is durable. That remains true while both
    /// returned guards are held.
    ///
    /// # Errors
    /// As [`Engine::flush`].
    pub fn quiesce<F>(&self, format: &F) -> Result<(Lead<'_, O>, MutexGuard<'_, S>)>
    where
        F: Metadata<State = S, LeaderState = O>,
    {
        let mut lead = self.lead();
        loop {
            let mut state = self.lock();
            if !state.idle() {
                // The holder of a reservation may need a flush to continue.
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

    /// Flushes, frees unused space, and marks the image as closed. The image stays usable: the next
    /// change starts as after opening.
    ///
    /// # Errors
    /// As [`Engine::flush`]. The image is then as after a crash, and closing can be retried.
    pub fn close<F>(&self, format: &F) -> Result<()>
    where
        F: Metadata<State = S, LeaderState = O>,
    {
        format.recycle()?;
        let (mut lead, mut state) = self.quiesce(format)?;
        let trimmed = format.trim(&mut state, lead.leader_state());
        drop(state);
        trimmed?;
        lead.run(|lead| self.commit_dirty(format, lead, true))?;
        format.finish(lead.leader_state())
    }

    fn commit_dirty<F>(&self, format: &F, lead: &mut Lead<'_, O>, alone: bool) -> Result<()>
    where
        F: Metadata<State = S, LeaderState = O>,
    {
        let mut state = self.lock();
        let dirty = format.take(&mut state, alone)?;
        // Exactly the space whose references are gone from the taken metadata.
        state.reclaim().begin_commit();
        // Unless `alone`, copies are written without the lock, so that writers can continue.
        let held = alone.then_some(state);
        let written = format.write(&dirty, lead.leader_state());
        let mut state = held.unwrap_or_else(|| self.lock());
        format.end_write(&mut state, dirty, written.is_ok());
        state.reclaim().end_commit(written.is_ok());
        drop(state);
        self.ended();
        written?;
        format.recycle()
    }
}
