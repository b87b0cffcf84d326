//! Progress and cancellation of long jobs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Cancels a job. Clones share one flag.
#[derive(Clone, Debug, Default)]
pub struct CancelToken {
    flag: Arc<AtomicBool>,
    /// Cancelling the parent cancels this token too.
    above: Option<Arc<CancelToken>>,
}

impl CancelToken {
    /// A token over an external flag, such as one set by a signal handler.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self { flag, above: None }
    }

    /// A child token: cancelling `self` cancels it too; it can also be cancelled alone.
    pub fn part(&self) -> Self {
        Self { flag: Arc::default(), above: Some(Arc::new(self.clone())) }
    }

    /// Requests cancellation; may be called from a signal handler's thread.
    pub fn cancel(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }

    /// Whether cancellation was requested.
    pub fn is_cancelled(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
            || self.above.as_ref().is_some_and(|above| above.is_cancelled())
    }

    /// [`Error::Interrupted`] if cancellation was requested.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Interrupted) } else { Ok(()) }
    }
}

/// Receives a job's progress. Called from worker threads; must be quick.
pub trait Progress: Sync {
    /// `done` of `total` units of work (mostly bytes) are finished. `total` may grow.
    fn update(&self, done: u64, total: u64);
    /// A note for the user, such as a warning.
    fn message(&self, text: &str);
    /// A sector of a source, at `offset` of its disk, could not be read; the target has zeroes
    /// there.
    fn unreadable(&self, offset: u64, error: &Error) {
        self.message(&format!(
            "cannot read the sector at {offset}, zeroes take its place: {error}"
        ));
    }
}

/// Ignores progress.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn update(&self, _done: u64, _total: u64) {}
    fn message(&self, _text: &str) {}
}

/// Cancellation and progress of a job.
#[derive(Clone)]
#[non_exhaustive]
pub struct Monitor<'a> {
    /// Cancellation.
    pub cancel: CancelToken,
    /// Progress.
    pub progress: &'a dyn Progress,
}

impl Default for Monitor<'_> {
    fn default() -> Self {
        Self::new(&NoProgress)
    }
}

impl<'a> Monitor<'a> {
    /// A monitor that reports to `progress`, with a cancel token of its own.
    pub fn new(progress: &'a dyn Progress) -> Self {
        Self { cancel: CancelToken::default(), progress }
    }

    /// Sets the token that cancels the job.
    #[must_use]
    pub fn cancelled_by(self, cancel: CancelToken) -> Self {
        Self { cancel, ..self }
    }

    /// For a part of the job whose progress is not shown: cancelled with the job.
    #[must_use]
    pub fn quiet(&self) -> Monitor<'static> {
        Monitor::default().cancelled_by(self.cancel.clone())
    }
}

impl std::fmt::Debug for Monitor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_stops_with_the_whole_and_not_the_other_way() {
        let whole = CancelToken::default();
        let (one, other) = (whole.part(), whole.part().part());
        one.cancel();
        assert!(one.is_cancelled() && !whole.is_cancelled() && !other.is_cancelled());
        whole.clone().cancel();
        assert!(other.check().is_err());
    }
}
