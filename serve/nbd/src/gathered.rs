//! Finished requests that are answered after the next flush.
//!
//! The leader adds a request when its write has returned. Before the leader waits for the client,
//! it takes all requests and commits them: one flush, then all replies. Meanwhile the next leader
//! adds more. Up to `committers` threads commit concurrently; a thread that has sent its replies
//! takes what was added since. So a few threads serve any number of requests. If all are busy, the
//! leader keeps adding until the list is full. Then it commits too, which bounds the list.
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
    /// An empty list with a capacity of `full` requests.
    pub fn new(full: usize, committers: usize) -> Self {
        let state = State { requests: Vec::new(), committing: 0 };
        Self { state: Mutex::new(state), full, committers }
    }

    /// Adds a request. Its write must have returned.
    pub fn add(&self, request: R) {
        self.state.lock().requests.push(request);
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.state.lock().requests.len()
    }

    /// Takes all requests into the empty `batch`; the caller must commit them now. Returns `false`
    /// if there are none, or a committing thread will take them.
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

    /// Ends a commit. Takes requests added meanwhile into the empty `batch`, for the same thread's
    /// next commit. Returns `false` if there are none.
    pub fn next(&self, batch: &mut Vec<R>) -> bool {
        let mut state = self.state.lock();
        if state.requests.is_empty() {
            // Under the same lock: later requests do not rely on this thread.
            state.committing -= 1;
            return false;
        }
        std::mem::swap(&mut state.requests, batch);
        true
    }
}
