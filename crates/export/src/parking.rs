//! Changes that found no space, and wait for some.
//!
//! A change that is kept holds its bytes and no thread, so that reads and writes elsewhere go on
//! however many wait. One thread, which lives while something is kept, tries the oldest again
//! every second, and all others once one came through. `vdkit ctl SOCKET resume` makes it try at
//! once.
//!
//! That thread serves all clients, so it waits for none of them: it hands an answer over ([`Done`])
//! and goes on. Before each attempt it asks whether the client is still there.
//!
//! What was kept is written in any order relative to later requests: a client that has not been
//! answered has no claim to an order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde::Serialize;
use vdkit_block::{Error, Result};

use crate::client::{ASK_EVERY, Client};
use crate::export::{Change, Done, Export};

/// How long between two attempts.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// At most so many bytes are kept, of all clients together; who comes then waits on its thread.
const KEPT_BYTES_MAX: u64 = 256 << 20;

/// What a change takes besides its bytes: its place here, its claim, and what is to be done when it is
/// done. Zeroes have no bytes, and a client may send millions of them.
const KEPT_BYTES_EACH: u64 = 256;

/// A client's wish that a change be made. Whoever will not be answered any more must withdraw what
/// it asked for, or leave: the change would be made later, over what others have written since.
#[derive(Debug, Default)]
pub struct Claim {
    /// Held while the change is tried.
    state: Mutex<ClaimState>,
    client: Arc<Client>,
}

#[derive(Debug, Default, PartialEq)]
enum ClaimState {
    #[default]
    Waits,
    Answered,
    Withdrawn,
}

impl Claim {
    /// A wish of this client.
    pub fn of(client: &Arc<Client>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), client: client.clone() })
    }

    /// Gives the change up, after an attempt that is under way. `false`: it has been done, or has
    /// failed, and was answered or is about to be. `true`: it will never be.
    pub fn withdraw(&self) -> bool {
        let mut state = self.state.lock();
        if *state == ClaimState::Waits {
            *state = ClaimState::Withdrawn;
        }
        *state == ClaimState::Withdrawn
    }

    /// Whether nobody waits any more. A client that has left has withdrawn all it asked for.
    fn is_given_up(&self) -> bool {
        let mut state = self.state.lock();
        if *state == ClaimState::Waits && self.client.has_left() {
            *state = ClaimState::Withdrawn;
        }
        *state == ClaimState::Withdrawn
    }

    /// As [`Claim::is_given_up`], as far as somebody has noticed it.
    fn is_noted_as_given_up(&self) -> bool {
        self.client.is_noted_as_left() || *self.state.lock() == ClaimState::Withdrawn
    }

    /// Whether there is still somebody to answer, which happens now.
    fn answer(&self) -> bool {
        let mut state = self.state.lock();
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

impl Parked {
    /// Answers, unless nobody waits any more.
    fn answer(self, done: Result<()>) {
        if self.claim.answer() {
            (self.done)(done);
        }
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Parked>,
    bytes: u64,
    /// Memory that all of it takes, `bytes` among it.
    memory: u64,
    /// Requests that wait for what is in the queue or is tried now.
    requests: u64,
    /// Whose change is tried or answered now.
    tried: Option<Arc<Client>>,
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

    /// Takes out of the queue what `chosen` says, for the caller to drop without the lock.
    fn take(&mut self, chosen: impl Fn(&Parked) -> bool) -> Vec<Parked> {
        let (taken, rest) =
            std::mem::take(&mut self.queue).into_iter().partition::<VecDeque<_>, _>(chosen);
        self.queue = rest;
        taken.iter().for_each(|parked| self.forget(&parked.change));
        taken.into()
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
        while state.memory >= KEPT_BYTES_MAX && !state.closed && !claim.is_given_up() {
            parking.changed.wait_for(&mut state, ASK_EVERY);
        }
        let parked = Parked { claim, change, at, durable, done };
        if state.closed {
            drop(state);
            return parked.answer(Err(error));
        }
        if parked.claim.is_given_up() {
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
        state.count(&parked.change);
        state.queue.push_back(parked);
        if !state.running {
            state.running = parking.start(export);
            if !state.running {
                // No thread to try again: then the client has to know.
                let failed = state.take(|_| true);
                state.since = None;
                drop(state);
                for parked in failed {
                    let what = "and no thread to wait for it".to_owned();
                    let file = export.name().to_owned();
                    parked.answer(Err(Error::NoSpace { file, what }));
                }
            }
        }
    }

    /// Starts the thread that tries again; says whether there is one.
    fn start(&self, export: &Arc<Export>) -> bool {
        let export = export.clone();
        let builder = std::thread::Builder::new().name("nospace".to_owned());
        builder.spawn(move || retry(&export)).is_ok()
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

    /// See [`Export::forget`].
    pub(crate) fn forget(&self, client: &Client) {
        client.leave();
        let is_own = |other: &Arc<Client>| std::ptr::eq(&**other, client);
        let mut state = self.state.lock();
        let gone = state.take(|parked| is_own(&parked.claim.client));
        self.changed.notify_all();
        while state.tried.as_ref().is_some_and(is_own) {
            self.changed.wait(&mut state);
        }
        drop(state);
        drop(gone);
    }

    /// Gives up on what waits.
    pub(crate) fn close(&self) {
        let failed = {
            let mut state = self.state.lock();
            state.closed = true;
            state.take(|_| true)
        };
        self.changed.notify_all();
        failed.into_iter().for_each(|parked| parked.answer(Err(Error::Interrupted)));
    }

    /// The change that is tried next, after a pause where the last one found no space. Nothing
    /// where none is left, and then the thread must end.
    fn next(&self, export: &Export, pause: bool) -> Option<Parked> {
        let mut state = self.state.lock();
        if pause && !state.retry && !state.closed {
            self.changed.wait_for(&mut state, RETRY_AFTER);
        }
        state.retry = false;
        let gone = if pause && state.queue.iter().any(|parked| parked.claim.is_noted_as_given_up())
        {
            state.take(|parked| parked.claim.is_noted_as_given_up())
        } else {
            Vec::new()
        };
        let next = state.queue.pop_front();
        if let Some(parked) = &next {
            state.tried = Some(parked.claim.client.clone());
        } else {
            state.running = false;
            state.reason.clear();
            if state.since.take().is_some() {
                tracing::warn!(export = export.name(), "there is space again: writes go on");
            }
        }
        drop(state);
        // What is kept may do something when it is dropped.
        drop(gone);
        next
    }

    /// Tries a change. Says whether it found no space, and is kept again.
    fn attempt(&self, export: &Export, parked: Parked) -> bool {
        let client = &parked.claim.client;
        let mut claim = parked.claim.state.lock();
        let mut done = Err(Error::Interrupted);
        if *claim == ClaimState::Waits {
            done = export.apply(client, &parked.change, parked.at, parked.durable);
            if done.is_err() && client.is_noted_as_left() {
                *claim = ClaimState::Withdrawn;
            }
        }
        let waits = |error| export.keeps(error) || Export::is_for_a_moment(&parked.change, error);
        let again = matches!(&done, Err(error) if waits(error));
        // Before the claim is given back: what was done cannot be withdrawn any more.
        let answers = *claim == ClaimState::Waits && !again;
        if answers {
            *claim = ClaimState::Answered;
        }
        drop(claim);
        let mut state = self.state.lock();
        if again && !state.closed && !parked.claim.is_noted_as_given_up() {
            state.queue.push_front(parked);
        } else {
            state.forget(&parked.change);
            drop(state);
            if answers {
                (parked.done)(done);
            } else if again {
                parked.answer(done);
            }
            state = self.state.lock();
        }
        state.tried = None;
        drop(state);
        self.changed.notify_all();
        again
    }
}

/// Tries what waits until nothing does.
fn retry(export: &Export) {
    let mut pause = true;
    while let Some(parked) = export.parking.next(export, pause) {
        pause = export.parking.attempt(export, parked);
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
