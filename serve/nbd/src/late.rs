//! Replies to requests that waited for space.
//!
//! The thread that retries changes serves all clients, and so does the one that ends the service:
//! neither may wait for a client that does not read. So they add replies here, and a separate
//! thread sends them. That thread exists only while there are replies.
//!
//! `tests/model` runs this file in every order of its steps.

use crate::sync::{Condvar, Mutex};

/// Replies of one connection.
pub struct Late<R> {
    state: Mutex<State<R>>,
    ended: Condvar,
}

struct State<R> {
    replies: Vec<R>,
    /// A thread is between the [`Late::add`] that returned `true` and the [`Late::take`] that
    /// returned `false`.
    sending: bool,
}

impl<R> Late<R> {
    /// An empty list.
    pub fn new() -> Self {
        let state = State { replies: Vec::new(), sending: false };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }

    /// Adds replies. If it returns `true`, the caller must start the sending thread.
    pub fn add(&self, replies: impl IntoIterator<Item = R>) -> bool {
        let mut state = self.state.lock();
        state.replies.extend(replies);
        !std::mem::replace(&mut state.sending, true)
    }

    /// Takes all replies into the empty `batch`, for the sending thread. If it returns `false`,
    /// there are none and the thread ends.
    pub fn take(&self, batch: &mut Vec<R>) -> bool {
        let mut state = self.state.lock();
        if state.replies.is_empty() {
            // Under the same lock: the next thread to add a reply starts a sending thread.
            state.sending = false;
            self.ended.notify_all();
            return false;
        }
        std::mem::swap(&mut state.replies, batch);
        true
    }

    /// Waits until all replies have been sent.
    pub fn wait(&self) {
        let mut state = self.state.lock();
        while state.sending {
            self.ended.wait(&mut state);
        }
    }
}
