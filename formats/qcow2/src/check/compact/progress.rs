//! One progress bar over all steps, which never decreases.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{Monitor, Progress};

/// Progress of a whole compaction, in bytes of the original file.
pub(super) struct Bar<'a> {
    progress: &'a dyn Progress,
    total: u64,
    shown: AtomicU64,
}

impl<'a> Bar<'a> {
    /// A bar at 0 of `total` bytes.
    pub(super) fn new(monitor: &Monitor<'a>, total: u64) -> Self {
        Self { progress: monitor.progress, total: total.max(1), shown: AtomicU64::new(0) }
    }

    /// A step that covers this percentage range of the whole.
    pub(super) fn step(&'a self, percent: Range<u64>) -> Step<'a> {
        Step { bar: self, percent }
    }

    fn show(&self, at: u64) {
        let shown = self.shown.fetch_max(at, Ordering::Relaxed).max(at);
        self.progress.update(shown, self.total);
    }
}

/// One step, with its own units.
pub(super) struct Step<'a> {
    bar: &'a Bar<'a>,
    percent: Range<u64>,
}

impl Progress for Step<'_> {
    fn update(&self, done: u64, total: u64) {
        let Range { start, end } = self.percent;
        // In thousandths, to avoid overflow.
        let part =
            if total == 0 { 0 } else { u128::from(done.min(total)) * 1000 / u128::from(total) };
        let part = u128::from(start) * 1000 + u128::from(end - start) * part;
        self.bar.show((u128::from(self.bar.total) * part / 100_000) as u64);
    }

    fn message(&self, text: &str) {
        self.bar.progress.message(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::tests::support::Heard;

    #[test]
    fn steps_follow_one_another_and_never_go_back() {
        let heard = Heard::default();
        let monitor = Monitor::new(&heard);
        let bar = Bar::new(&monitor, 1000);
        let first = bar.step(0..10);
        // The total grows.
        for (done, total) in [(0, 0), (1, 1), (1, 2), (2, 2)] {
            first.update(done, total);
        }
        let second = bar.step(10..100);
        for done in [0, 1, 2] {
            second.update(done, 2);
        }
        let wanted = [0, 100, 100, 100, 100, 550, 1000].map(|done| (done, 1000));
        assert_eq!(*heard.0.lock(), wanted);
    }
}
