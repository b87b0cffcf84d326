//! The syncs of one file, grouped, with an error that stays.

use crate::commit::Commit;

/// One sync for all who asked before it began. The first error is final: it reaches every one of
/// them, and everyone after.
///
/// The kernel reports a lost page once for an open file and then forgets it. Of two syncs side by
/// side one would hear of it and the other would not; a later one would lie.
#[derive(Debug)]
pub struct Syncs<E> {
    commit: Commit<Option<E>>,
}

/// Why a sync failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncError<E> {
    /// This one failed.
    Now(E),
    /// Another one failed before, or has failed for this one too.
    Earlier(E),
}

impl<E> Default for Syncs<E> {
    fn default() -> Self {
        Self { commit: Commit::new(None) }
    }
}

impl<E: Clone> Syncs<E> {
    /// Returns when everything that was written before this call is durable. `sync` is called by one
    /// of those who wait.
    ///
    /// # Errors
    /// What `sync` returned, now or once before.
    pub fn sync(&self, sync: impl FnOnce() -> Result<(), E>) -> Result<(), SyncError<E>> {
        let number = self.commit.draw();
        self.commit.durable_up_to(number, |lead| {
            if let Some(error) = lead.order() {
                return Err(SyncError::Earlier(error.clone()));
            }
            sync().map_err(|error| {
                *lead.order() = Some(error.clone());
                SyncError::Now(error)
            })
        })
    }
}
