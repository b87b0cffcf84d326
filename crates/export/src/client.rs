//! Those for whom requests are done: an NBD connection, a vhost-user monitor, a mount.
//!
//! A client can leave while a request of its own waits or runs. Nobody is answered then, and a
//! client that connects again sends again what it was not answered. A change of the former
//! connection that is made later would overwrite what was written and flushed since. So each server
//! gives its requests a [`Client`], and what waits asks whether that client is still there, right
//! before it goes on.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// So often does a thread that waits ask whether its client is still there.
pub(crate) const ASK_EVERY: Duration = Duration::from_millis(200);

type Probe = Box<dyn Fn() -> bool + Send + Sync>;

/// One that sends requests, and may leave before they are done. The default one never leaves by
/// itself.
#[derive(Default)]
pub struct Client {
    left: AtomicBool,
    probe: Option<Probe>,
}

/// A client for requests of this process.
pub(crate) static STAYS: Client = Client { left: AtomicBool::new(false), probe: None };

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of which `has_left` tells, without waiting, whether it has left. It is asked also
    /// while every thread of the client's server is busy and nobody receives.
    pub fn new(has_left: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { left: AtomicBool::new(false), probe: Some(Box::new(has_left)) }
    }

    /// The client has left: what waits for it is given up.
    pub fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
    }

    /// Whether the client has left. Once `true`, it stays so.
    pub fn has_left(&self) -> bool {
        let left = self.is_noted_as_left() || self.probe.as_ref().is_some_and(|probe| probe());
        if left {
            self.leave();
        }
        left
    }

    /// As [`Client::has_left`], as far as somebody has noticed it.
    pub(crate) fn is_noted_as_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }
}
