//! A process that does not outlive the test which started it.

use std::ops::{Deref, DerefMut};
use std::process::Child;

/// Killed when it is dropped, also by a panic: a process left behind would keep the test's output
/// open, and the reader of that output waiting.
#[derive(Debug)]
pub struct Killed(pub Child);

impl Deref for Killed {
    type Target = Child;
    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Killed {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
