//! The syncs of one file, grouped, with an error that stays.

use crate::sync::{Condvar, Mutex};

/// Syncs that run side by side at most. A device with a queue does several in the time of one.
pub const LANES_MAX: usize = 24;

/// A sync serves all who asked before it began. The first error is final: it reaches every one who
/// waits, and everyone after.
///
/// Syncs run side by side in *lanes*, each with an open file description of its own. The kernel reports
/// a lost page once for each description (`errseq_t`): of two syncs of one description side by side one
/// would hear of it and the other would not. So the syncs of a lane run one after the other.
///
/// Callers that find all lanes busy wait together: the first one to get a lane syncs for all of them.
#[derive(Debug)]
pub struct Syncs<E> {
    state: Mutex<State<E>>,
    ended: Condvar,
}

#[derive(Debug)]
struct State<E> {
    /// The number of the last caller. A caller's number is drawn after what it wants to be durable was
    /// written.
    drawn: u64,
    /// Syncs have begun after all callers up to this number had asked.
    begun: u64,
    /// Such a sync has ended for all callers up to this number.
    durable: u64,
    busy: [bool; LANES_MAX],
    failed: Option<E>,
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
        let state =
            State { drawn: 0, begun: 0, durable: 0, busy: [false; LANES_MAX], failed: None };
        Self { state: Mutex::new(state), ended: Condvar::new() }
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
        let mut state = self.state.lock();
        state.drawn += 1;
        let number = state.drawn;
        let (mut known, mut lanes) = (1, Some(lanes));
        let lane = loop {
            if let Some(error) = &state.failed {
                return Err(SyncError::Earlier(error.clone()));
            }
            if state.durable >= number {
                return Ok(());
            }
            // A sync that began after this caller had asked serves it too.
            if state.begun < number {
                if let Some(lane) = state.busy[..known].iter().position(|busy| !busy) {
                    break lane;
                }
                if let Some(lanes) = lanes.take() {
                    drop(state);
                    known = lanes().clamp(1, LANES_MAX);
                    state = self.state.lock();
                    continue;
                }
            }
            self.ended.wait(&mut state);
        };
        let covers = state.drawn;
        (state.begun, state.busy[lane]) = (covers, true);
        drop(state);
        let done = sync(lane);
        let mut state = self.state.lock();
        state.busy[lane] = false;
        let earlier = state.failed.clone();
        match &done {
            Ok(()) => state.durable = state.durable.max(covers),
            Err(error) => {
                state.failed.get_or_insert_with(|| error.clone());
            }
        }
        drop(state);
        self.ended.notify_all();
        match (done, earlier) {
            (Err(error), _) => Err(SyncError::Now(error)),
            (Ok(()), Some(error)) => Err(SyncError::Earlier(error)),
            (Ok(()), None) => Ok(()),
        }
    }
}
