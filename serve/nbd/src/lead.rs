//! The lead of a connection: which of its threads receives requests.
//!
//! One thread at a time leads: it holds the lock around the receiving side. Before a leader blocks,
//! it calls [`Lead::pass`], which makes sure that another thread leads: one that waits for the
//! lead, or a new one. If the maximum number of threads is busy, no thread leads until one of them
//! returns.
//!
//! `tests/model` runs this file in every order of its steps.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};

/// The lead; `T` is the leader's own data.
pub struct Lead<T> {
    leader: Mutex<T>,
    /// Threads that wait for the lead.
    waiting: AtomicUsize,
    threads: AtomicUsize,
    threads_max: usize,
    closed: AtomicBool,
}

impl<T> Lead<T> {
    /// For a connection with one thread.
    pub fn new(leader: T, threads_max: usize) -> Self {
        Self {
            leader: Mutex::new(leader),
            waiting: AtomicUsize::new(0),
            threads: AtomicUsize::new(1),
            threads_max,
            closed: AtomicBool::new(false),
        }
    }

    /// Waits for the lead. `None` after [`Lead::close`]: the thread must end.
    pub fn take(&self) -> Option<MutexGuard<'_, T>> {
        // Before locking: a leader that passes the lead must see waiting threads.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let leader = self.leader.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) { None } else { Some(leader) }
    }

    /// Passes the lead before the calling thread blocks. `spawn` starts a thread that calls
    /// [`Lead::take`]; it returns `false` on failure. Returns whether another thread will lead;
    /// otherwise no thread leads until one returns.
    pub fn pass(&self, leader: MutexGuard<'_, T>, spawn: impl FnOnce() -> bool) -> bool {
        // While the lead is held, no waiting thread can take it, so the count is complete.
        let waits = self.waiting.load(Ordering::SeqCst) > 0;
        drop(leader);
        if waits {
            return true;
        }
        if self.threads.fetch_add(1, Ordering::SeqCst) < self.threads_max && spawn() {
            return true;
        }
        self.threads.fetch_sub(1, Ordering::SeqCst);
        false
    }

    /// Closes the connection: no thread leads from now on. Called by the leader; any other caller
    /// must make sure that the leader's receive ends.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}
