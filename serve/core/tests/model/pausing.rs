//! The pause: on its return no request runs, and none begins before its end.

use std::sync::Arc;

use crate::pause::Pause;
use crate::sync::{AtomicBool, AtomicUsize, Ordering, RwLock, check, thread};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// A pause does not wait for those that have locked the disk.
    NoWait,
    /// A request does not ask again once it has locked the disk.
    AsksBefore,
    /// The end of the service is only the end of the pause.
    EndsOnce,
}

struct Served {
    pause: Pause,
    disk: RwLock<()>,
    running: AtomicUsize,
    /// A pause has returned and was not ended.
    quiet: AtomicBool,
    fault: Fault,
}

impl Served {
    fn new(fault: Fault) -> Arc<Self> {
        Arc::new(Self {
            pause: Pause::default(),
            disk: RwLock::new(()),
            running: AtomicUsize::new(0),
            quiet: AtomicBool::new(false),
            fault,
        })
    }

    /// As any request of an export.
    fn request(&self) {
        let held = if self.fault == Fault::AsksBefore {
            self.pause.lock_outside(|| false, || ());
            self.disk.read()
        } else {
            self.pause.lock_outside(|| false, || self.disk.read()).unwrap()
        };
        self.running.fetch_add(1, Ordering::Relaxed);
        assert!(!self.quiet.load(Ordering::Relaxed), "a request runs during the pause");
        self.running.fetch_sub(1, Ordering::Relaxed);
        drop(held);
    }

    /// As `Export::pause`.
    fn pause(&self) {
        if self.pause.begin() && self.fault != Fault::NoWait {
            drop(self.disk.write());
        }
    }
}

const PREEMPTIONS: usize = 3;

fn a_request_beside_a_pause(fault: Fault) {
    check(PREEMPTIONS, move || {
        let served = Served::new(fault);
        let other = served.clone();
        let client = thread::spawn(move || other.request());
        served.pause();
        assert_eq!(served.running.load(Ordering::Relaxed), 0, "a request runs during the pause");
        served.quiet.store(true, Ordering::Relaxed);
        served.quiet.store(false, Ordering::Relaxed);
        served.pause.end();
        client.join().unwrap();
    });
}

#[test]
fn no_request_runs_during_a_pause_and_all_go_on_after_it() {
    a_request_beside_a_pause(Fault::None);
}

#[test]
#[should_panic(expected = "a request runs during the pause")]
fn a_pause_must_wait_for_the_disk() {
    a_request_beside_a_pause(Fault::NoWait);
}

#[test]
#[should_panic(expected = "a request runs during the pause")]
fn a_request_must_ask_again_with_the_disk_locked() {
    a_request_beside_a_pause(Fault::AsksBefore);
}

/// A pause that nobody ends, beside the end of the service.
fn a_pause_beside_the_end(fault: Fault) {
    check(PREEMPTIONS, move || {
        let served = Served::new(fault);
        let (other, ended) = (served.clone(), served.clone());
        let client = thread::spawn(move || other.request());
        let ending = thread::spawn(move || match ended.fault {
            Fault::EndsOnce => ended.pause.end(),
            _ => ended.pause.end_for_good(),
        });
        served.pause();
        ending.join().unwrap();
        client.join().unwrap();
        assert!(fault == Fault::EndsOnce || !served.pause.is_on());
    });
}

#[test]
fn a_pause_after_the_end_keeps_nobody() {
    a_pause_beside_the_end(Fault::None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_pause_after_its_end_would_keep_all() {
    a_pause_beside_the_end(Fault::EndsOnce);
}
