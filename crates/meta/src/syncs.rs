//! The syncs of one file, grouped, with an error that stays.

use crate::commit::Commit;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Syncs that run side by side at most. A device with a queue does several in the time of one.
pub const LANES_MAX: usize = 16;

/// A sync serves all who asked before it began. The first error is final: it reaches every one who
/// waits, and everyone after.
///
/// Syncs run side by side in *lanes*, each with an open file description of its own. The kernel reports
/// a lost page once for each description (`errseq_t`): of two syncs of one description side by side one
/// would hear of it and the other would not. So the syncs of a lane run one after the other.
#[derive(Debug)]
pub struct Syncs<E> {
    lanes: [Commit<()>; LANES_MAX],
    /// Whose turn it is where all lanes are busy.
    turn: AtomicU64,
    failed: Mutex<Option<E>>,
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
        Self {
            lanes: std::array::from_fn(|_| Commit::new(())),
            turn: AtomicU64::new(0),
            failed: Mutex::new(None),
        }
    }
}

impl<E: Clone> Syncs<E> {
    /// Returns when everything that was written before this call is durable. `sync` is called with
    /// the number of a lane by one of those who wait. `lanes` says how many lanes have a description of
    /// their own, at least 1; it is asked where the first one is busy.
    ///
    /// # Errors
    /// What `sync` returned, now or once before.
    pub fn sync(
        &self,
        lanes: impl FnOnce() -> usize,
        sync: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<(), SyncError<E>> {
        if let Some(mut lead) = self.lanes[0].try_lead() {
            return lead.run(|_| self.attempt(|| sync(0)));
        }
        let lanes = lanes().clamp(1, LANES_MAX);
        let free = |lane: usize| Some((lane, self.lanes[lane].try_lead()?));
        if let Some((lane, mut lead)) = (1..lanes).find_map(free) {
            return lead.run(|_| self.attempt(|| sync(lane)));
        }
        let lane = self.turn.fetch_add(1, Ordering::Relaxed) as usize % lanes;
        let number = self.lanes[lane].draw();
        self.lanes[lane].durable_up_to(number, |_| self.attempt(|| sync(lane)))
    }

    fn attempt(&self, sync: impl FnOnce() -> Result<(), E>) -> Result<(), SyncError<E>> {
        let earlier =
            |failed: &Option<E>| failed.clone().map_or(Ok(()), |e| Err(SyncError::Earlier(e)));
        earlier(&self.failed.lock())?;
        let done = sync();
        let mut failed = self.failed.lock();
        match done {
            Ok(()) => earlier(&failed),
            Err(error) => {
                failed.get_or_insert_with(|| error.clone());
                Err(SyncError::Now(error))
            }
        }
    }
}
