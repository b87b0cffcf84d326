//! Kept changes: each is answered once, or never made once it was given up. loom has no time: nothing
//! is tried before somebody asks for it, so each wake-up counts.

use std::sync::Arc;

use vdkit_block::Result;

use crate::change::Change;
use crate::client::Client;
use crate::export::{Export, no_space};
use crate::parking::{Claim, KEPT_BYTES_MAX, Parking};
use crate::sync::{Condvar, Mutex, Ordering, check, thread};

/// The answers to one change: whether it was made.
#[derive(Default)]
struct Answers {
    all: Mutex<Vec<bool>>,
    came: Condvar,
}

impl Answers {
    fn all(&self) -> Vec<bool> {
        self.all.lock().clone()
    }

    fn wait(&self) {
        let mut all = self.all.lock();
        self.came.wait_while(&mut all, |all| all.is_empty());
    }
}

/// Keeps a change that found no space.
fn keep(export: &Arc<Export>, client: &Arc<Client>, change: Change) -> (Arc<Claim>, Arc<Answers>) {
    let (claim, answers) = (Claim::of(client), Arc::new(Answers::default()));
    let own = answers.clone();
    let done = Box::new(move |done: Result<()>| {
        own.all.lock().push(done.is_ok());
        own.came.notify_all();
    });
    Parking::keep(export, change, 0, false, no_space(), claim.clone(), done);
    (claim, answers)
}

const PREEMPTIONS: usize = 2;

/// A change is kept while somebody makes space and resumes, in this order or the other one.
fn a_resume_reaches_a_change(space_first: bool) {
    check(PREEMPTIONS, move || {
        let export = Export::new(true);
        let other = export.clone();
        let admin = thread::spawn(move || {
            let make_space = || other.full.store(false, Ordering::Relaxed);
            if space_first {
                make_space();
            }
            other.parking.retry_now();
            if !space_first {
                make_space();
            }
        });
        let (_, answers) = keep(&export, &Arc::default(), Change::Grow);
        answers.wait();
        admin.join().unwrap();
        assert_eq!(answers.all(), [true]);
    });
}

#[test]
fn a_resume_that_comes_after_the_space_is_not_lost() {
    a_resume_reaches_a_change(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_resume_before_there_is_space_is_no_help() {
    a_resume_reaches_a_change(false);
}

/// A change was kept before a close, and another one is kept beside it.
fn a_close_ends_all(full: bool) {
    check(PREEMPTIONS, move || {
        let export = Export::new(full);
        let client = Arc::default();
        let (_, first) = keep(&export, &client, Change::Grow);
        let (closed, answers) = (export.clone(), first.clone());
        let closing = thread::spawn(move || {
            closed.parking.close();
            assert_eq!(closed.running(), 0, "a change is tried after the close");
            assert_eq!(answers.all().len(), 1, "a kept change is not answered");
            closed.made()
        });
        export.parking.retry_now();
        let (_, second) = keep(&export, &client, Change::Grow);
        let made = closing.join().unwrap();
        assert_eq!(export.made(), made, "a change was made after the close");
        let answers = [first.all(), second.all()].concat();
        assert_eq!(answers.len(), 2, "an answer is missing, or there is one too many");
        assert_eq!(answers.iter().filter(|made| **made).count(), made);
        let (_, third) = keep(&export, &client, Change::Grow);
        assert_eq!(third.all(), [false], "kept after the close");
    });
}

#[test]
fn on_return_of_a_close_nothing_is_kept_or_tried() {
    a_close_ends_all(true);
    a_close_ends_all(false);
}

#[derive(Clone, Copy)]
enum GivenUp {
    Withdrawn,
    Forgotten,
    /// By a faulty server, which does not wait for the attempt.
    Left,
}

fn what_is_given_up(how: GivenUp) {
    check(PREEMPTIONS, move || {
        let export = Export::new(false);
        let client = Arc::new(Client::default());
        let (claim, answers) = keep(&export, &client, Change::Grow);
        let other = export.clone();
        let admin = thread::spawn(move || other.parking.retry_now());
        match how {
            GivenUp::Withdrawn => {
                let withdrawn = claim.withdraw();
                assert_eq!(withdrawn, export.made() == 0, "withdrawn and made, or neither");
            }
            GivenUp::Forgotten => {
                export.parking.forget(&client);
                assert_eq!(answers.all().len(), export.made(), "answered after it was forgotten");
            }
            GivenUp::Left => client.leave(),
        }
        let made = export.made();
        admin.join().unwrap();
        export.parking.close();
        assert_eq!(export.made(), made, "made after it was given up");
        assert_eq!(answers.all(), vec![true; made], "given up, and answered otherwise");
    });
}

#[test]
fn what_is_given_up_is_not_made_later() {
    what_is_given_up(GivenUp::Withdrawn);
    what_is_given_up(GivenUp::Forgotten);
}

#[test]
#[should_panic(expected = "given up")]
fn who_leaves_must_wait_for_the_attempt() {
    what_is_given_up(GivenUp::Left);
}

/// A large change is kept. Another one waits for room, until that is made or the export closed.
fn who_waits_for_room(closes: bool) {
    check(PREEMPTIONS, move || {
        let export = Export::new(closes);
        let large = Change::Flush { requests: KEPT_BYTES_MAX };
        let (_, first) = keep(&export, &Arc::default(), large);
        let other = export.clone();
        let waiting = thread::spawn(move || keep(&other, &Arc::default(), Change::Grow).1);
        if closes {
            export.parking.close();
        } else {
            export.parking.retry_now();
        }
        let second = waiting.join().unwrap();
        export.parking.close();
        assert_eq!(first.all(), [!closes]);
        assert_eq!(second.all().len(), 1);
    });
}

#[test]
fn who_waits_for_room_goes_on() {
    who_waits_for_room(false);
    who_waits_for_room(true);
}
