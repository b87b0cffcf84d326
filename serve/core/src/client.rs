//! Clients that send requests: an NBD connection, a vhost-user monitor, a mount.
//!
//! A client can leave while its request waits or runs. It then gets no answer, and repeats
//! unanswered requests after it reconnects. If a change of the old connection were applied later,
//! it would overwrite newer, flushed data. So each server gives its requests a [`Client`], and a
//! waiting request checks that the client is still connected right before it proceeds.

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

use crate::sync::{AtomicBool, Ordering};

/// Interval at which a waiting thread checks its client.
pub(crate) const ASK_EVERY: Duration = Duration::from_millis(200);

type Probe = Box<dyn Fn() -> bool + Send + Sync>;

/// A sender of requests that may leave before they are done. The default client never leaves by
/// itself.
#[derive(Default)]
pub struct Client {
    left: AtomicBool,
    probe: Option<Probe>,
}

/// The client for requests of this process.
pub(crate) static STAYS: LazyLock<Client> = LazyLock::new(Client::default);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Client {
    /// A client whose `has_left` reports, without waiting, whether it has left. It is called even
    /// while all threads of the client's server are busy and none receives.
    pub fn new(has_left: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { left: AtomicBool::new(false), probe: Some(Box::new(has_left)) }
    }

    /// Marks the client as left: its waiting requests are dropped.
    pub fn leave(&self) {
        self.left.store(true, Ordering::SeqCst);
    }

    /// Whether the client has left. Never returns to `false`.
    pub fn has_left(&self) -> bool {
        let left = self.is_noted_as_left() || self.probe.as_ref().is_some_and(|probe| probe());
        if left {
            self.leave();
        }
        left
    }

    /// As [`Client::has_left`], without probing.
    pub(crate) fn is_noted_as_left(&self) -> bool {
        self.left.load(Ordering::SeqCst)
    }
}
