//! One flush, as it is for every format.

use vdkit_block::Result;

use crate::commit::{Commit, Lead};
use crate::reclaim::Reclaim;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the writers of an image change, under one lock.
pub trait State {
    /// Where host space waits that was given up.
    fn reclaim(&mut self) -> &mut Reclaim;
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

    /// Copies what is dirty. From here on it counts as being written; on an error it does not.
    ///
    /// # Errors
    /// What the storage returns.
    fn take(
        &self,
        state: &mut MutexGuard<'_, Self::State>,
        order: &mut Self::Order,
    ) -> Result<Self::Dirty>;

    /// Writes the groups, each behind its barrier, and makes them durable, with all guest data that
    /// was written before. Called without the lock of the state.
    ///
    /// # Errors
    /// What the storage returns.
    fn write(&self, dirty: &Self::Dirty, order: &mut Self::Order) -> Result<()>;

    /// What was taken is durable, or dirty again.
    fn settle(&self, state: &mut Self::State, dirty: Self::Dirty, durable: bool);

    /// Frees space that nobody can reach any more; see [`Reclaim::expired`].
    ///
    /// # Errors
    /// What the storage returns.
    fn recycle(&self) -> Result<()>;
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
        self.commit.durable_up_to(number, |lead| self.commit_dirty(format, lead))
    }

    /// A flush by who has the lead.
    ///
    /// # Errors
    /// As [`Engine::flush`].
    pub fn flush_led<F>(&self, format: &F, lead: &mut Lead<'_, O>) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        lead.run(|lead| self.commit_dirty(format, lead))
    }

    fn commit_dirty<F>(&self, format: &F, lead: &mut Lead<'_, O>) -> Result<()>
    where
        F: Metadata<State = S, Order = O>,
    {
        // Copies, so that others can go on while they are written.
        let (dirty, unlinked) = {
            let mut state = self.lock();
            let dirty = format.take(&mut state, lead.order())?;
            // Those whose reference is gone from what was copied, and no others.
            (dirty, state.reclaim().take_unlinked())
        };
        let written = format.write(&dirty, lead.order());
        {
            let mut state = self.lock();
            format.settle(&mut state, dirty, written.is_ok());
            state.reclaim().committed(unlinked, written.is_ok());
        }
        self.ended();
        written?;
        format.recycle()
    }
}
