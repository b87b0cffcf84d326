//! One flush for many replies: every request is answered once, after a flush that covers it.

use std::sync::Arc;

use vdkit_testkit::loom_sync::{AtomicUsize, Mutex, Ordering, check, thread};

use crate::gathered::Gathered;

/// Injected server faults.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Flushes before taking the requests that it answers.
    FlushesTooEarly,
    /// Ignores requests gathered during its flush.
    NeverLooksAgain,
}

struct Server {
    gathered: Gathered<usize>,
    full: usize,
    /// Number of returned writes.
    written: AtomicUsize,
    answered: Mutex<Vec<usize>>,
    fault: Fault,
}

impl Server {
    fn new(full: usize, committers: usize, fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            gathered: Gathered::new(full, committers),
            full,
            written: AtomicUsize::new(0),
            answered: Mutex::default(),
            fault,
        })
    }

    /// Returns how many writes are durable from now on.
    fn flush(&self) -> usize {
        self.written.load(Ordering::SeqCst)
    }

    fn answer(&self, batch: &mut Vec<usize>, durable: usize) {
        for request in batch.drain(..) {
            assert!(request < durable, "an answer before the write is durable");
            self.answered.lock().push(request);
        }
    }

    /// The loop of `Session::commit_all`.
    fn commit_all(&self, mut batch: Vec<usize>) {
        let mut durable = self.flush();
        loop {
            self.answer(&mut batch, durable);
            let early = self.flush();
            if self.fault == Fault::NeverLooksAgain || !self.gathered.next(&mut batch) {
                return;
            }
            durable = if self.fault == Fault::FlushesTooEarly { early } else { self.flush() };
        }
    }

    /// The leader writes, and commits after each group.
    fn lead(self: &Arc<Self>, groups: &[usize]) {
        let mut committing = Vec::new();
        for group in groups {
            for _ in 0..*group {
                let request = self.written.fetch_add(1, Ordering::SeqCst);
                self.gathered.add(request);
            }
            let mut batch = Vec::new();
            if self.gathered.begin(&mut batch) {
                let server = self.clone();
                committing.push(thread::spawn(move || server.commit_all(batch)));
            }
            assert!(self.gathered.len() < self.full, "the list is bounded");
        }
        for thread in committing {
            thread.join().unwrap();
        }
        let mut answered = std::mem::take(&mut *self.answered.lock());
        answered.sort_unstable();
        let all: Vec<usize> = (0..groups.iter().sum()).collect();
        assert_eq!(answered, all, "every request is answered once");
        assert_eq!(self.gathered.len(), 0);
    }
}

const PREEMPTIONS: usize = 3;

#[test]
fn every_request_is_answered_once_and_after_its_flush() {
    check(PREEMPTIONS, || Server::new(100, 1, Fault::None).lead(&[2, 1, 1]));
}

#[test]
fn commits_run_side_by_side() {
    check(PREEMPTIONS, || Server::new(100, 2, Fault::None).lead(&[1, 1, 1]));
}

#[test]
fn a_full_list_is_committed_beside_another_commit() {
    check(PREEMPTIONS, || Server::new(2, 1, Fault::None).lead(&[1, 2, 1]));
}

#[test]
#[should_panic(expected = "an answer before the write is durable")]
fn a_flush_before_the_list_is_taken_is_too_early() {
    check(PREEMPTIONS, || Server::new(100, 1, Fault::FlushesTooEarly).lead(&[1, 1]));
}

#[test]
#[should_panic(expected = "every request is answered once")]
fn what_is_gathered_during_a_commit_must_be_looked_for() {
    check(PREEMPTIONS, || Server::new(100, 1, Fault::NeverLooksAgain).lead(&[1, 1]));
}
