//! Grouped syncs of one file, with a sticky error.

use crate::sync::{Condvar, Mutex};

/// Most concurrent syncs. A device with a queue can run several in the time of one.
pub const LANES_MAX: usize = 24;

/// A sync serves all callers that requested one before it began. The first error is final: all
/// waiting and all later callers get it.
///
/// Concurrent syncs run in *lanes*, each with its own open file description. The kernel reports a
/// lost page once per description (`errseq_t`): of two concurrent syncs of one description, only
/// one would get the error. So the syncs of one lane run one after the other.
///
/// Callers that find all lanes busy wait: the first one to get a lane syncs for all of them.
#[derive(Debug)]
pub struct Syncs<E> {
    state: Mutex<State<E>>,
    ended: Condvar,
}

#[derive(Debug)]
struct State<E> {
    /// The number of the last caller. A caller draws its number after its writes.
    drawn: u64,
    /// Syncs have begun that cover all callers up to this number.
    begun: u64,
    /// Syncs have ended that cover all callers up to this number.
    durable: u64,
    busy: [bool; LANES_MAX],
    /// Number of lanes that may be used; `None` until the others are opened.
    lanes: Option<usize>,
    failed: Option<E>,
}

/// Why a sync failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncError<E> {
    /// This sync failed.
    Now(E),
    /// Another sync failed before or during this one.
    Earlier(E),
}

impl<E> Default for Syncs<E> {
    fn default() -> Self {
        let busy = [false; LANES_MAX];
        let state = State { drawn: 0, begun: 0, durable: 0, busy, lanes: None, failed: None };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }
}

#[cfg(test)]
impl<E> Syncs<E> {
    /// With so many lanes, all open.
    pub fn with_lanes(lanes: usize) -> Self {
        let new = Self::default();
        new.state.lock().lanes = Some(lanes);
        new
    }
}

impl<E: Clone> Syncs<E> {
    /// Returns when everything that was written before this call is durable. One of the waiting
    /// callers calls its `sync` with the number of a lane. `lanes` returns the number of lanes with
    /// their own description, at least 1; it is called once, when the first lane is busy.
    ///
    /// # Errors
    /// The error of `sync`, from now or an earlier call.
    pub fn sync(
        &self,
        lanes: impl FnOnce() -> usize,
        sync: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<(), SyncError<E>> {
        let mut state = self.state.lock();
        state.drawn += 1;
        let number = state.drawn;
        let mut lanes = Some(lanes);
        let lane = loop {
            if let Some(error) = &state.failed {
                return Err(SyncError::Earlier(error.clone()));
            }
            if state.durable >= number {
                return Ok(());
            }
            // A sync that began after this caller drew its number serves it too.
            if state.begun < number {
                let known = state.lanes.unwrap_or(1);
                if let Some(lane) = state.busy[..known].iter().position(|busy| !busy) {
                    break lane;
                }
                if state.lanes.is_none()
                    && let Some(lanes) = lanes.take()
                {
                    state.lanes = Some(1);
                    drop(state);
                    let opened = lanes().clamp(1, LANES_MAX);
                    state = self.state.lock();
                    // To a description that was opened after an error had been reported, that error
                    // is old: only the sync that got it can tell. So wait for its end.
                    let began = state.begun;
                    while state.busy[0] && state.begun == began && state.failed.is_none() {
                        self.ended.wait(&mut state);
                    }
                    state.lanes = Some(opened);
                    self.ended.notify_all();
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
