//! Keeps changes that found no space, and retries them.
//!
//! A kept change holds its bytes but no thread, so other requests continue however many changes
//! wait. While changes are kept, one thread retries some of them every second, and goes on while
//! they succeed. One that has failed goes behind the others: it may need more space than they do.
//! `vdkit ctl SOCKET resume` retries at once.
//!
//! The thread serves all clients, so it never waits for a client: it passes on the result
//! ([`Done`]) and continues. Before each attempt it checks that the client is still connected.
//!
//! Kept changes may be reordered with later requests: unanswered requests have no guaranteed order.
//!
//! `tests/model` runs this file in every order of its steps.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use vdkit_block::{Error, IoAction, Result};

use crate::change::{Change, Done};
use crate::client::{ASK_EVERY, Client};
use crate::export::Export;
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Interval between attempts.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Attempts in a row that may find no space before the thread pauses.
const TRIES: usize = 16;

/// Maximum bytes kept for all clients together; further requests block on their threads.
pub(crate) const KEPT_BYTES_MAX: u64 = 256 << 20;

/// Memory of a change besides its data: queue entry, claim and callback. Zeroes carry no data, and
/// a client may send millions of them.
const KEPT_BYTES_EACH: u64 = 256;

/// A client's request for a change. A client that will not be answered must withdraw it or leave:
/// the change would be made later, over newer data.
#[derive(Debug, Default)]
pub struct Claim {
    /// Locked while the change is tried.
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
    /// A claim of this client.
    pub fn of(client: &Arc<Client>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), client: client.clone() })
    }

    /// Withdraws the change, waiting for a running attempt. `false`: it has succeeded or failed,
    /// and is answered. `true`: it will never run.
    pub fn withdraw(&self) -> bool {
        let mut state = self.state.lock();
        if *state == ClaimState::Waits {
            *state = ClaimState::Withdrawn;
        }
        *state == ClaimState::Withdrawn
    }

    /// Whether the change was withdrawn or the client has left.
    fn is_given_up(&self) -> bool {
        let mut state = self.state.lock();
        if *state == ClaimState::Waits && self.client.has_left() {
            *state = ClaimState::Withdrawn;
        }
        *state == ClaimState::Withdrawn
    }

    /// As [`Claim::is_given_up`], without probing the client.
    fn is_noted_as_given_up(&self) -> bool {
        self.client.is_noted_as_left() || *self.state.lock() == ClaimState::Withdrawn
    }

    /// Marks the claim as answered; returns whether the client still waits.
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
    /// Answers if the client still waits.
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
    /// Total memory, including `bytes`.
    memory: u64,
    /// Requests that wait for queued changes or the current attempt.
    requests: u64,
    /// Client of the current attempt or answer.
    tried: Option<Arc<Client>>,
    /// The last retry thread.
    thread: Option<JoinHandle<()>>,
    /// It retries.
    running: bool,
    /// Retry now: space may be available.
    retry: bool,
    closed: bool,
    since: Option<Instant>,
    reason: String,
    /// Changes kept since the export started.
    total: u64,
}

impl State {
    /// Whether the calling thread is the one that retries.
    fn is_retried_here(&self) -> bool {
        self.thread.as_ref().is_some_and(is_current)
    }

    /// Counts a waiting change.
    fn count(&mut self, change: &Change) {
        self.bytes += change.held_bytes();
        self.memory += change.held_bytes() + KEPT_BYTES_EACH;
        self.requests += change.requests();
        self.total += change.requests();
    }

    /// Uncounts a change.
    fn forget(&mut self, change: &Change) {
        self.memory = self.memory.saturating_sub(change.held_bytes() + KEPT_BYTES_EACH);
        self.bytes = self.bytes.saturating_sub(change.held_bytes());
        self.requests = self.requests.saturating_sub(change.requests());
    }

    /// Removes the `chosen` changes from the queue, for the caller to drop after unlocking.
    fn take(&mut self, chosen: impl Fn(&Parked) -> bool) -> Vec<Parked> {
        let (taken, rest) =
            std::mem::take(&mut self.queue).into_iter().partition::<VecDeque<_>, _>(chosen);
        self.queue = rest;
        taken.iter().for_each(|parked| self.forget(&parked.change));
        taken.into()
    }
}

/// The waiting changes.
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

/// Summary of changes kept for lack of space.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ParkedInfo {
    /// Waiting requests.
    pub requests: u64,
    /// Bytes that they hold.
    pub bytes: u64,
    /// How long the oldest has waited.
    pub seconds: f64,
    /// The error when it was kept.
    pub reason: String,
    /// Requests that had to wait since the export started.
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
        // The retry thread, which makes room, does not wait for it.
        while state.memory >= KEPT_BYTES_MAX
            && !state.closed
            && !state.is_retried_here()
            && !claim.is_given_up()
        {
            parking.changed.wait_for(&mut state, ASK_EVERY);
        }
        let parked = Parked { claim, change, at, durable, done };
        if state.closed {
            drop(state);
            return parked.answer(Err(error));
        }
        if parked.claim.is_given_up() {
            // After unlocking: dropping the change may have side effects.
            drop(state);
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
            let ended = state.thread.take();
            state.thread = parking.start(export, ended);
            state.running = state.thread.is_some();
            if !state.running {
                // There is no thread to retry: report the error to the client.
                let failed = state.take(|_| true);
                state.since = None;
                drop(state);
                for parked in failed {
                    let what =
                        "the change cannot be retried, since no thread could be started for that"
                            .to_owned();
                    let file = export.name().to_owned();
                    parked.answer(Err(Error::NoSpace { file, what }));
                }
            }
        }
    }

    /// Starts the retry thread, if that is possible. It first waits for the former one, which may
    /// still hold the export for a moment.
    fn start(&self, export: &Arc<Export>, ended: Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        let export = export.clone();
        let builder = thread::Builder::new().name("nospace".to_owned());
        let retry = move || {
            // A panic of it was reported.
            let _ = ended.map(JoinHandle::join);
            retry(&export);
        };
        builder.spawn(retry).ok()
    }

    /// Starts the next attempt now.
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
        self.wait_for_attempt(&mut state, is_own);
        drop(state);
        drop(gone);
    }

    /// Waits while a change of a `chosen` client is tried or answered. The retry thread itself,
    /// which calls [`Done`], does not wait.
    fn wait_for_attempt(
        &self,
        state: &mut MutexGuard<'_, State>,
        chosen: impl Fn(&Arc<Client>) -> bool,
    ) {
        if state.is_retried_here() {
            return;
        }
        while state.tried.as_ref().is_some_and(&chosen) {
            self.changed.wait(state);
        }
    }

    /// Fails all waiting changes. On return none is being tried, and the retry thread does not hold
    /// the export any more, unless it is the one that calls.
    pub(crate) fn close(&self) {
        let failed = {
            let mut state = self.state.lock();
            state.closed = true;
            state.take(|_| true)
        };
        self.changed.notify_all();
        failed.into_iter().for_each(|parked| parked.answer(Err(Error::Interrupted)));
        let mut state = self.state.lock();
        self.wait_for_attempt(&mut state, |_| true);
        let other = state.thread.take_if(|thread| !is_current(thread));
        drop(state);
        // A panic of it was reported.
        let _ = other.map(JoinHandle::join);
    }

    /// The next change to try, after a pause if the last `failed` attempts found no space for any.
    /// `None` if the queue is empty; the thread must then end.
    fn next(&self, export: &Export, failed: &mut usize) -> Option<Parked> {
        let mut state = self.state.lock();
        let pause = *failed >= TRIES.min(state.queue.len().max(1));
        if pause {
            *failed = 0;
            if !state.retry && !state.closed {
                self.changed.wait_for(&mut state, RETRY_AFTER);
            }
            state.retry = false;
        }
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
        // Dropping kept changes may have side effects.
        drop(gone);
        next
    }

    /// Tries a change. Returns whether it found no space and is kept again. A panic of a storage or
    /// of [`Done`] must not end the thread: the other changes would wait for ever.
    fn attempt(&self, export: &Export, parked: Parked) -> bool {
        let client = &parked.claim.client;
        let mut claim = parked.claim.state.lock();
        let mut done = Err(Error::Interrupted);
        if *claim == ClaimState::Waits {
            let apply = || export.apply(client, &parked.change, parked.at, parked.durable);
            done = catch_unwind(AssertUnwindSafe(apply)).unwrap_or_else(|_| {
                let source = io::Error::other("the thread has panicked");
                let (at, len) = (parked.at, parked.change.held_bytes());
                Err(Error::io(&export.filename(), IoAction::Write, at, len, source))
            });
            if done.is_err() && client.is_noted_as_left() {
                *claim = ClaimState::Withdrawn;
            }
        }
        let again = matches!(
            &done,
            Err(error) if Export::is_for_a_moment(&parked.change, error) || export.keeps(error)
        );
        // Before the claim is unlocked: a change that was made cannot be withdrawn any more.
        let answers = *claim == ClaimState::Waits && !again;
        if answers {
            *claim = ClaimState::Answered;
        }
        drop(claim);
        let mut state = self.state.lock();
        if again && !state.closed && !parked.claim.is_noted_as_given_up() {
            state.queue.push_back(parked);
        } else {
            state.forget(&parked.change);
            drop(state);
            let answer = || {
                if answers {
                    (parked.done)(done);
                } else if again {
                    parked.answer(done);
                }
            };
            // The panic hook has reported a panic.
            let _ = catch_unwind(AssertUnwindSafe(answer));
            state = self.state.lock();
        }
        state.tried = None;
        drop(state);
        self.changed.notify_all();
        again
    }
}

fn is_current(thread: &JoinHandle<()>) -> bool {
    thread.thread().id() == thread::current().id()
}

/// Retries until no change waits.
fn retry(export: &Export) {
    let mut failed = TRIES;
    while let Some(parked) = export.parking.next(export, &mut failed) {
        failed = if export.parking.attempt(export, parked) { failed + 1 } else { 0 };
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
        // The callback's two pointers, and at least what it owns: the recipient.
        let least = size_of::<Parked>() + size_of::<Claim>() + 64;
        assert!(state.memory >= 3 * least as u64, "{} of {least}", state.memory);
        assert!(state.bytes < state.memory, "what clients sent is told apart");
        changes.iter().for_each(|change| state.forget(change));
        assert_eq!((state.memory, state.bytes, state.requests), (0, 0, 0));
    }
}
