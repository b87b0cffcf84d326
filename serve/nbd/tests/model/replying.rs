//! Late replies: each is sent once, and closing the connection waits for all of them.

use std::sync::Arc;

use vdkit_testkit::loom_sync::{Mutex, check, thread};

use crate::late::Late;

struct Client {
    late: Late<usize>,
    received: Mutex<Vec<usize>>,
    /// A faulty thread sends what it finds and does not check again.
    looks_again: bool,
}

impl Client {
    /// The sending thread.
    fn send(&self) {
        let mut batch = Vec::new();
        while self.late.take(&mut batch) {
            self.received.lock().append(&mut batch);
            if !self.looks_again {
                return;
            }
        }
    }

    /// Adds replies, as the retry thread does.
    fn answer(self: &Arc<Self>, replies: [usize; 2]) {
        if self.late.add(replies) {
            let client = self.clone();
            thread::spawn(move || client.send());
        }
    }
}

fn replies_are_sent(looks_again: bool) {
    check(3, move || {
        let received = Mutex::default();
        let client = Arc::new(Client { late: Late::new(), received, looks_again });
        let other = client.clone();
        let answering = thread::spawn(move || {
            other.answer([1, 2]);
            other.answer([3, 4]);
        });
        client.answer([5, 6]);
        answering.join().unwrap();
        client.late.wait();
        let mut received = std::mem::take(&mut *client.received.lock());
        received.sort_unstable();
        assert_eq!(received, [1, 2, 3, 4, 5, 6]);
    });
}

#[test]
fn each_late_reply_is_sent_once_before_the_end() {
    replies_are_sent(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn the_thread_that_sends_must_look_again() {
    replies_are_sent(false);
}
