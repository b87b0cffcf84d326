//! The lead of a connection: which of its threads takes requests.
//!
//! One thread at a time leads: it holds the lock around the receiving side. A leader that is about
//! to block gives the lead away with [`Lead::pass`], which makes sure that another thread leads: one
//! that waits for the lead, or a new one. With the maximum of threads busy nobody leads until one of
//! them comes back.
//!
//! `tests/model` runs this file in every order of its steps.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering};

/// The lead; `T` is what the leader alone uses.
pub struct Lead<T> {
    leader: Mutex<T>,
    /// Threads that want the lead and do not have it.
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

    /// Waits for the lead. Nothing after [`Lead::close`]: the thread ends.
    pub fn take(&self) -> Option<MutexGuard<'_, T>> {
        // Before the lock: a leader that passes the lead must see who waits for it.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let leader = self.leader.lock();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) { None } else { Some(leader) }
    }

    /// Gives the lead away before the calling thread blocks. `spawn` starts a thread that calls
    /// [`Lead::take`], or returns `false` where it cannot. Returns whether another thread leads
    /// from now on; otherwise nobody does until a thread comes back.
    pub fn pass(&self, leader: MutexGuard<'_, T>, spawn: impl FnOnce() -> bool) -> bool {
        // While the lead is held nobody who waits can get it, so this counts all of them.
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

    /// Ends the connection: no thread leads from now on. The leader calls it while it leads.
    /// Another thread that calls it makes sure that the leader's receiving ends.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }
}
