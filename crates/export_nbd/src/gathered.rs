//! Requests that are done and are answered after the next flush.
//!
//! The leader adds a request here when its write has returned. Before the leader waits for the
//! client, it takes all requests and commits them: one flush, then all replies. Meanwhile the next
//! leader gathers more. Up to `committers` threads commit side by side; one that has sent its
//! replies takes what was gathered since. So a few threads serve any number of requests. With all
//! of them busy the leader goes on adding, until the list is full: then it commits, too, so that
//! the list is bounded.
//!
//! A thread flushes after it has taken the list, so the flush covers each write in the list.
//!
//! `tests/model` runs this file in every order of its steps.

use crate::sync::Mutex;

/// The requests of one connection.
pub struct Gathered<R> {
    state: Mutex<State<R>>,
    full: usize,
    committers: usize,
}

struct State<R> {
    requests: Vec<R>,
    /// Threads between [`Gathered::begin`] and the [`Gathered::next`] that returned `false`.
    committing: usize,
}

impl<R> Gathered<R> {
    /// An empty list, which is full with `full` requests.
    pub fn new(full: usize, committers: usize) -> Self {
        let state = State { requests: Vec::new(), committing: 0 };
        Self { state: Mutex::new(state), full, committers }
    }

    /// Adds a request. Its write has returned.
    pub fn add(&self, request: R) {
        self.state.lock().requests.push(request);
    }

    /// How many requests there are.
    pub fn len(&self) -> usize {
        self.state.lock().requests.len()
    }

    /// Takes all requests into the empty `batch`, for a caller that commits them now. Returns
    /// `false` where there are none, or where a committing thread will take them.
    pub fn begin(&self, batch: &mut Vec<R>) -> bool {
        let mut state = self.state.lock();
        let takes = !state.requests.is_empty()
            && (state.committing < self.committers || state.requests.len() >= self.full);
        if takes {
            std::mem::swap(&mut state.requests, batch);
            state.committing += 1;
        }
        takes
    }

    /// Ends a commit. Takes what was added meanwhile into the empty `batch`, for the next commit of
    /// the same thread; returns `false` where there is nothing.
    pub fn next(&self, batch: &mut Vec<R>) -> bool {
        let mut state = self.state.lock();
        if state.requests.is_empty() {
            // Under the same lock: nobody counts on this thread for what is added from now on.
            state.committing -= 1;
            return false;
        }
        std::mem::swap(&mut state.requests, batch);
        true
    }
}
