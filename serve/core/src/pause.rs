//! The pause of an export: while it is on, no request begins.
//!
//! `tests/model` runs this file in every order of its steps.

use crate::client::ASK_EVERY;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering};

/// Whether requests wait.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    /// Changed with the lock held, so that no thread waits for an end that was already.
    on: AtomicBool,
    /// No pause begins any more.
    ended: Mutex<bool>,
    changed: Condvar,
}

impl Pause {
    /// Whether requests wait.
    pub(crate) fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Begins a pause. The caller then waits for the threads that have locked the disk. Returns `false` after
    /// [`Pause::end_for_good`]: there is no pause, since nobody would end it.
    pub(crate) fn begin(&self) -> bool {
        let ended = self.ended.lock();
        if !*ended {
            self.on.store(true, Ordering::Release);
        }
        !*ended
    }

    /// Ends the pause.
    pub(crate) fn end(&self) {
        let _ended = self.ended.lock();
        self.on.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Ends the pause; later ones do not begin.
    pub(crate) fn end_for_good(&self) {
        *self.ended.lock() = true;
        self.end();
    }

    /// Locks the disk by `lock` while there is no pause. Waits for the end of a pause, but not for
    /// longer than until `gone` returns true: `None` then.
    pub(crate) fn lock_outside<G>(
        &self,
        gone: impl Fn() -> bool,
        lock: impl Fn() -> G,
    ) -> Option<G> {
        loop {
            if self.is_on() {
                let mut ended = self.ended.lock();
                while self.is_on() && !gone() {
                    self.changed.wait_for(&mut ended, ASK_EVERY);
                }
            }
            if gone() {
                return None;
            }
            let held = lock();
            // Again: a thread that begins a pause waits only for those that had locked the disk before.
            if !self.is_on() {
                return Some(held);
            }
        }
    }
}
