//! Replies to requests that waited for space.
//!
//! The thread that makes such a change serves all clients, and so does the one that ends the
//! service: neither may wait for a client that does not read. So they add the reply here, and a
//! thread of its own sends what is here; it is there only while there are some.
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
    /// No replies.
    pub fn new() -> Self {
        let state = State { replies: Vec::new(), sending: false };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }

    /// Adds replies. Where it returns `true`, the caller starts the thread that sends them.
    pub fn add(&self, replies: impl IntoIterator<Item = R>) -> bool {
        let mut state = self.state.lock();
        state.replies.extend(replies);
        !std::mem::replace(&mut state.sending, true)
    }

    /// Takes all replies into the empty `batch`, for the thread that sends them. Where it returns
    /// `false`, there are none, and the thread ends.
    pub fn take(&self, batch: &mut Vec<R>) -> bool {
        let mut state = self.state.lock();
        if state.replies.is_empty() {
            // Under the same lock: whoever adds one from now on starts a thread.
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
