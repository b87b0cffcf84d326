//! The lead: while a thread blocks, another one receives requests, and all threads end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Plain;

use vdkit_testkit::loom_sync::thread::{self, JoinHandle};
use vdkit_testkit::loom_sync::{AtomicUsize, Condvar, Mutex, Ordering, check};

use crate::lead::Lead;

#[derive(Clone, Copy)]
enum Request {
    /// Run by the leader.
    Quick,
    /// Blocks until this many requests were taken, including this one.
    Slow(usize),
    /// The client is gone when it is answered.
    Fails,
    End,
}
use Request::{End, Fails, Quick, Slow};

#[derive(Default)]
struct Wire {
    requests: VecDeque<Request>,
    taken: usize,
    shut: bool,
}

/// Data of the leader alone.
#[derive(Default)]
struct Leader {
    ended: bool,
}

struct Connection {
    lead: Lead<Leader>,
    wire: Mutex<Wire>,
    changed: Condvar,
    leaders: AtomicUsize,
    spawned: AtomicUsize,
    handles: Mutex<Vec<JoinHandle<()>>>,
    /// A faulty server passes the lead without waking a thread.
    passes: bool,
    /// Number of thread starts that fail.
    failures: Mutex<usize>,
}

impl Connection {
    fn new(threads_max: usize, requests: &[Request]) -> Self {
        Self {
            lead: Lead::new(Leader::default(), threads_max),
            wire: Mutex::new(Wire {
                requests: requests.iter().copied().collect(),
                ..Wire::default()
            }),
            changed: Condvar::new(),
            leaders: AtomicUsize::new(0),
            spawned: AtomicUsize::new(0),
            handles: Mutex::default(),
            passes: true,
            failures: Mutex::new(0),
        }
    }

    /// Waits for the next request, as a leader does.
    fn receive(&self) -> Request {
        let mut wire = self.wire.lock();
        self.changed.wait_while(&mut wire, |wire| wire.requests.is_empty() && !wire.shut);
        wire.taken += 1;
        self.changed.notify_all();
        wire.requests.pop_front().unwrap_or(End)
    }

    fn spawn(self: &Arc<Self>) -> bool {
        let mut failures = self.failures.lock();
        if *failures > 0 {
            *failures -= 1;
            return false;
        }
        drop(failures);
        self.spawned.fetch_add(1, Ordering::SeqCst);
        let connection = self.clone();
        self.handles.lock().push(thread::spawn(move || connection.work()));
        true
    }

    /// The loop of `Session::work`.
    fn work(self: &Arc<Self>) {
        while let Some(mut leader) = self.lead.take() {
            assert_eq!(self.leaders.fetch_add(1, Ordering::SeqCst), 0, "two lead");
            assert!(!leader.ended, "a thread leads after the end");
            let request = loop {
                match self.receive() {
                    Quick => {}
                    request => break request,
                }
            };
            self.leaders.fetch_sub(1, Ordering::SeqCst);
            if matches!(request, End) {
                leader.ended = true;
                self.lead.close();
                continue;
            }
            if self.passes {
                self.lead.pass(leader, || self.spawn());
            } else {
                drop(leader);
            }
            if let Slow(until) = request {
                let mut wire = self.wire.lock();
                self.changed.wait_while(&mut wire, |wire| wire.taken < until);
            } else {
                self.lead.close();
                self.wire.lock().shut = true;
                self.changed.notify_all();
                assert!(self.lead.take().is_none(), "a thread leads after it closed");
                return;
            }
        }
    }

    /// Serves to the end, and returns the number of threads used.
    fn run(self) -> usize {
        let connection = Arc::new(self);
        connection.work();
        loop {
            let Some(handle) = connection.handles.lock().pop() else { break };
            handle.join().unwrap();
        }
        1 + connection.spawned.load(Ordering::SeqCst)
    }
}

const PREEMPTIONS: usize = 2;

#[test]
fn while_some_block_another_thread_leads() {
    check(PREEMPTIONS, || {
        // Two block until the third request is taken, which needs the third thread.
        let requests = [Slow(2), Slow(3), Slow(0), Quick, End];
        assert!(Connection::new(3, &requests).run() <= 3);
    });
}

#[test]
fn with_all_threads_blocked_the_first_that_comes_back_leads() {
    check(PREEMPTIONS, || {
        let requests = [Slow(2), Slow(0), Slow(4), Slow(0), End];
        assert!(Connection::new(2, &requests).run() <= 2);
    });
}

#[test]
fn without_another_thread_the_only_one_does_everything() {
    check(PREEMPTIONS, || {
        let mut connection = Connection::new(3, &[Slow(0), Quick, Slow(0), End]);
        connection.failures = Mutex::new(2);
        assert_eq!(connection.run(), 1);
    });
    check(PREEMPTIONS, || {
        // The thread that failed to start does not count.
        let mut connection = Connection::new(2, &[Slow(0), Slow(3), Quick, End]);
        connection.failures = Mutex::new(1);
        assert_eq!(connection.run(), 2);
    });
}

#[test]
fn a_client_that_is_gone_ends_every_thread() {
    check(PREEMPTIONS, || {
        assert!(Connection::new(3, &[Slow(2), Fails]).run() <= 3);
    });
    check(PREEMPTIONS, || {
        // The leader waits for a client that sends nothing more.
        assert!(Connection::new(2, &[Fails]).run() <= 2);
    });
}

/// A waiting thread gets the lead, and no further thread is started.
#[test]
fn a_thread_that_waits_is_seen() {
    static FEWEST: Plain = Plain::new(usize::MAX);
    check(PREEMPTIONS, || {
        let threads = Connection::new(3, &[Slow(2), Slow(0), Slow(0), End]).run();
        FEWEST.fetch_min(threads, Ordering::SeqCst);
    });
    assert_eq!(FEWEST.load(Ordering::SeqCst), 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_lead_that_is_not_passed_is_lost() {
    check(PREEMPTIONS, || {
        let mut connection = Connection::new(3, &[Slow(2), End]);
        connection.passes = false;
        connection.run();
    });
}
