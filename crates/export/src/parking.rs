//! Changes that found no space, and wait for some.
//!
//! A change that is kept holds its bytes and no thread, so that reads and writes elsewhere go on
//! however many wait. One thread, which lives while something is kept, tries the oldest again
//! every second, and all others once one came through. `vdkit ctl SOCKET resume` makes it try at
//! once.
//!
//! What was kept is written in any order relative to later requests: a client that has not been
//! answered has no claim to an order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use vdkit_block::Error;

use crate::export::{Change, Done, Export};

/// How long between two attempts.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// At most so many bytes are kept, of all clients together; who comes then waits on its thread.
const KEPT_BYTES_MAX: u64 = 256 << 20;

/// What a change takes besides its bytes: its place here, its claim, and what is to be done when it is
/// done. Zeroes have no bytes, and a client may send millions of them.
const KEPT_BYTES_EACH: u64 = 256;

/// Who waits for a change that is kept. Whoever will not be answered any more must withdraw what
/// it asked for: the change would be done later, over what others have written since.
#[derive(Debug, Default)]
pub struct Claim(Mutex<ClaimState>);

#[derive(Debug, Default, PartialEq)]
enum ClaimState {
    #[default]
    Waits,
    Answered,
    Withdrawn,
}

impl Claim {
    /// Gives the change up, after an attempt that is under way. `false`: it has been done, or has
    /// failed, and was answered or is about to be. `true`: it will never be.
    pub fn withdraw(&self) -> bool {
        let mut state = self.0.lock();
        if *state == ClaimState::Waits {
            *state = ClaimState::Withdrawn;
        }
        *state == ClaimState::Withdrawn
    }

    fn withdrawn(&self) -> bool {
        *self.0.lock() == ClaimState::Withdrawn
    }

    /// Whether there is still somebody to answer, which happens now.
    fn answer(&self) -> bool {
        let mut state = self.0.lock();
        let waits = *state == ClaimState::Waits;
        if waits {
            *state = ClaimState::Answered;
        }
        waits
    }
}

struct Parked {
    claim: Arc<Claim>,
    change: Change,
    at: u64,
    durable: bool,
    done: Done,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Parked>,
    bytes: u64,
    /// Memory that all of it takes, `bytes` among it.
    memory: u64,
    /// Requests that wait for what is in the queue or is tried now.
    requests: u64,
    /// The thread that tries again is there.
    running: bool,
    /// Somebody says that there may be space now.
    retry: bool,
    closed: bool,
    since: Option<Instant>,
    reason: String,
    /// How often something was kept since the export began.
    total: u64,
}

impl State {
    /// A change begins to wait.
    fn count(&mut self, change: &Change) {
        self.bytes += change.held_bytes();
        self.memory += change.held_bytes() + KEPT_BYTES_EACH;
        self.requests += change.requests();
        self.total += change.requests();
    }

    /// A change does not wait any more.
    fn forget(&mut self, change: &Change) {
        self.memory = self.memory.saturating_sub(change.held_bytes() + KEPT_BYTES_EACH);
        self.bytes = self.bytes.saturating_sub(change.held_bytes());
        self.requests = self.requests.saturating_sub(change.requests());
    }
}

/// The changes that wait.
#[derive(Default)]
pub struct Parking {
    state: Mutex<State>,
    changed: Condvar,
}

impl std::fmt::Debug for Parking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parking").field("info", &self.info()).finish()
    }
}

/// What is kept for want of space.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ParkedInfo {
    /// Requests that wait.
    pub requests: u64,
    /// Bytes that they hold.
    pub bytes: u64,
    /// For how long the oldest has been waiting.
    pub seconds: f64,
    /// What was said when it was kept.
    pub reason: String,
    /// Requests that had to wait since the export began.
    pub total: u64,
}

impl Parking {
    pub(crate) fn keep(
        export: &Arc<Export>,
        change: Change,
        at: u64,
        durable: bool,
        error: Error,
        claim: Arc<Claim>,
        done: Done,
    ) {
        let parking = &export.parking;
        let mut state = parking.state.lock();
        while state.memory >= KEPT_BYTES_MAX && !state.closed && !claim.withdrawn() {
            parking.changed.wait_for(&mut state, RETRY_AFTER);
        }
        if state.closed {
            drop(state);
            if claim.answer() {
                done(Err(error));
            }
            return;
        }
        if state.since.is_none() {
            state.since = Some(Instant::now());
            state.reason = error.to_string();
            tracing::warn!(
                export = export.name(),
                "out of space: writes wait until there is some ({error})"
            );
        }
        state.count(&change);
        state.queue.push_back(Parked { claim, change, at, durable, done });
        if !state.running {
            state.running = true;
            let lost = export.name().to_owned();
            let export = export.clone();
            let spawned = std::thread::Builder::new()
                .name("nospace".to_owned())
                .spawn(move || retry(&export));
            if spawned.is_err() {
                // No thread to try again: then the client has to know.
                state.running = false;
                let failed = std::mem::take(&mut state.queue);
                (state.bytes, state.memory, state.requests) = (0, 0, 0);
                state.since = None;
                drop(state);
                for parked in failed.into_iter().filter(|parked| parked.claim.answer()) {
                    (parked.done)(Err(Error::NoSpace {
                        file: lost.clone(),
                        what: "and no thread to wait for it".to_owned(),
                    }));
                }
            }
        }
    }

    /// Makes the next attempt begin now.
    pub(crate) fn retry_now(&self) {
        self.state.lock().retry = true;
        self.changed.notify_all();
    }

    pub(crate) fn info(&self) -> ParkedInfo {
        let state = self.state.lock();
        ParkedInfo {
            requests: state.requests,
            bytes: state.bytes,
            seconds: state.since.map_or(0.0, |since| since.elapsed().as_secs_f64()),
            reason: state.reason.clone(),
            total: state.total,
        }
    }

    /// Gives up on what waits.
    pub(crate) fn close(&self) {
        let failed = {
            let mut state = self.state.lock();
            state.closed = true;
            let failed = std::mem::take(&mut state.queue);
            failed.iter().for_each(|parked| state.forget(&parked.change));
            failed
        };
        self.changed.notify_all();
        for parked in failed.into_iter().filter(|parked| parked.claim.answer()) {
            (parked.done)(Err(Error::Interrupted));
        }
    }
}

/// Tries what waits until nothing does.
fn retry(export: &Export) {
    let parking = &export.parking;
    let mut wait = true;
    loop {
        let parked = {
            let mut state = parking.state.lock();
            if wait && !state.retry && !state.closed {
                parking.changed.wait_for(&mut state, RETRY_AFTER);
            }
            state.retry = false;
            let Some(parked) = state.queue.pop_front() else {
                state.running = false;
                state.reason.clear();
                if state.since.take().is_some() {
                    tracing::warn!(export = export.name(), "there is space again: writes go on");
                }
                return;
            };
            parked
        };
        let mut claim = parked.claim.0.lock();
        if *claim == ClaimState::Withdrawn {
            drop(claim);
            let mut state = parking.state.lock();
            state.forget(&parked.change);
            drop(state);
            parking.changed.notify_all();
            wait = false;
            continue;
        }
        match export.apply(&parked.change, parked.at, parked.durable) {
            Err(error) if export.keeps(&error) => {
                drop(claim);
                let mut state = parking.state.lock();
                if state.closed {
                    state.forget(&parked.change);
                    drop(state);
                    if parked.claim.answer() {
                        (parked.done)(Err(error));
                    }
                } else {
                    state.queue.push_front(parked);
                }
                wait = true;
            }
            done => {
                *claim = ClaimState::Answered;
                drop(claim);
                parking.state.lock().forget(&parked.change);
                parking.changed.notify_all();
                (parked.done)(done);
                wait = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parked_change_counts_as_the_memory_that_it_takes() {
        let mut state = State::default();
        let changes = [
            Change::Zero { len: 1 << 30, may_unmap: true },
            Change::Write(vec![7]),
            Change::Flush { requests: 3 },
        ];
        changes.iter().for_each(|change| state.count(change));
        // Two pointers to what is done, and what that owns at least: who is to be answered.
        let least = size_of::<Parked>() + size_of::<Claim>() + 64;
        assert!(state.memory >= 3 * least as u64, "{} of {least}", state.memory);
        assert!(state.bytes < state.memory, "what clients sent is told apart");
        changes.iter().for_each(|change| state.forget(change));
        assert_eq!((state.memory, state.bytes, state.requests), (0, 0, 0));
    }
}
