//! What a connection may still change after its client has left.
//!
//! A client whose connection was lost connects again and repeats its unanswered requests. The server
//! may still have the old ones: in a thread, or unread in the socket. Such a write, if it were made
//! after the repeated one was answered, would overwrite what the client has written since. So a new
//! connection reaches its export only when older ones whose client has left change nothing any more.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Counts what may change the disk for one connection: its leader, and changes that other threads
/// run.
#[derive(Debug, Default)]
pub struct Changing {
    count: Mutex<usize>,
    none: Condvar,
}

impl Changing {
    /// Counts a leader or a change, until the result is dropped.
    pub fn begin(self: &Arc<Self>) -> MayChange {
        *self.count.lock() += 1;
        MayChange(self.clone())
    }

    /// Waits until there is none, at most until a deadline; whether there is none.
    pub fn ends_by(&self, until: Instant) -> bool {
        let mut count = self.count.lock();
        self.none.wait_while_until(&mut count, |count| *count > 0, until);
        *count == 0
    }
}

/// A leader or a change that is counted; see [`Changing`].
#[derive(Debug)]
pub struct MayChange(Arc<Changing>);

impl Drop for MayChange {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.none.notify_all();
    }
}
