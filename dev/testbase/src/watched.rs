//! Waiting for what other threads do.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Waits until `holds` returns true; panics with `what` if that takes minutes.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(120), "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A thread of this process. Another one can wait until it sleeps, so that a test need not guess how long
/// it takes to reach a lock.
#[derive(Debug, Default)]
pub struct Watched(AtomicI32);

impl Watched {
    /// Called by the thread that is watched, before what it may have to wait for.
    pub fn is_me(&self) {
        self.0.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
    }

    /// Returns once that thread sleeps, for a lock, a condition or input, or has ended. Source: proc(5),
    /// field 3 of `stat`.
    pub fn until_it_waits(&self) {
        // A thread that meets another at a lock sleeps for a moment.
        let mut looks_in_a_row = 0;
        eventually("the thread waits", || {
            let thread = self.0.load(Ordering::SeqCst);
            if thread == 0 {
                return false;
            }
            let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
            let Ok(text) = text else { return true };
            // The name, field 2, may hold anything.
            let sleeps = text.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" S"));
            looks_in_a_row = if sleeps { looks_in_a_row + 1 } else { 0 };
            looks_in_a_row == 3
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_thread_that_waits_is_seen_and_one_that_has_ended() {
        let watched = Watched::default();
        let (send, receive) = channel();
        std::thread::scope(|scope| {
            let watched = &watched;
            let thread = scope.spawn(move || {
                watched.is_me();
                receive.recv()
            });
            watched.until_it_waits();
            assert!(!thread.is_finished());
            send.send(()).unwrap();
            thread.join().unwrap().unwrap();
        });
        watched.until_it_waits();
    }
}
