//! Group commit, and the syncs of a file.

use crate::commit::Commit;
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, check, thread};
use crate::syncs::Syncs;

/// A memory and a disk of one bit for each writer.
#[derive(Default)]
struct Model {
    memory: Mutex<u64>,
    disk: Mutex<u64>,
    commit: Commit<()>,
}

#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    /// The number is drawn before the change is made.
    DrawnTooEarly,
    /// As with a boolean that a commit clears when it begins: a change made before it is taken for
    /// durable while the commit still runs.
    ABooleanForDurable,
}

impl Model {
    fn commit(&self, number: u64) {
        let committed = self.commit.durable_up_to(number, |_| {
            let copy = *self.memory.lock();
            // The sync takes its time: others change the memory meanwhile.
            *self.disk.lock() |= copy;
            Ok::<(), ()>(())
        });
        committed.unwrap();
    }
}

fn writers(mistake: Mistake) {
    check(2, move || {
        let model = Arc::new(Model::default());
        let dirty = Arc::new(AtomicBool::new(false));
        let write = |bit: u64| {
            let (model, dirty) = (model.clone(), dirty.clone());
            move || {
                let early = (mistake == Mistake::DrawnTooEarly).then(|| model.commit.draw());
                *model.memory.lock() |= bit;
                if mistake == Mistake::ABooleanForDurable {
                    // The first one to see it clean believes that it is.
                    dirty.store(true, Ordering::SeqCst);
                    thread::yield_now();
                    if dirty.swap(false, Ordering::SeqCst) {
                        model.commit(model.commit.draw());
                    }
                } else {
                    model.commit(early.unwrap_or_else(|| model.commit.draw()));
                }
                assert!(*model.disk.lock() & bit != 0, "an acknowledged change is lost");
            }
        };
        let threads = [1, 2].map(|bit| thread::spawn(write(bit)));
        write(4)();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn what_was_acknowledged_is_on_disk() {
    writers(Mistake::None);
}

#[test]
#[should_panic(expected = "an acknowledged change is lost")]
fn a_number_drawn_before_its_change_is_found() {
    writers(Mistake::DrawnTooEarly);
}

#[test]
#[should_panic(expected = "an acknowledged change is lost")]
fn a_boolean_that_stands_for_durable_is_found() {
    writers(Mistake::ABooleanForDurable);
}

/// Those who wait for a commit that fails commit again themselves: none takes another's failure for
/// its own success.
#[test]
fn a_failed_commit_covers_nobody() {
    check(2, || {
        let model = Arc::new(Model::default());
        let fails = Arc::new(AtomicBool::new(true));
        let write = |bit: u64| {
            let (model, fails) = (model.clone(), fails.clone());
            move || {
                *model.memory.lock() |= bit;
                let done = model.commit.durable_up_to(model.commit.draw(), |_| {
                    let copy = *model.memory.lock();
                    if fails.swap(false, Ordering::SeqCst) {
                        return Err(());
                    }
                    *model.disk.lock() |= copy;
                    Ok(())
                });
                assert!(done.is_err() || *model.disk.lock() & bit != 0, "lost");
                done.is_err()
            }
        };
        let threads = [1, 2].map(|bit| thread::spawn(write(bit)));
        let failed = threads.into_iter().map(|thread| thread.join().unwrap()).filter(|f| *f);
        assert_eq!(failed.count(), 1);
    });
}

/// A file of which the kernel tells one sync that a page was lost.
fn file_syncs(sync: impl Fn(&Syncs<i32>, &AtomicBool) -> bool + Send + Sync + Copy + 'static) {
    check(3, move || {
        let syncs = Arc::new(Syncs::default());
        let lost = Arc::new(AtomicBool::new(false));
        let write = |page_is_lost: bool| {
            let (syncs, lost) = (syncs.clone(), lost.clone());
            move || {
                if page_is_lost {
                    lost.store(true, Ordering::SeqCst);
                }
                sync(&syncs, &lost)
            }
        };
        let threads = [thread::spawn(write(true)), thread::spawn(write(true))];
        for thread in threads {
            assert!(!thread.join().unwrap(), "a write that is lost was acknowledged");
        }
        assert!(!sync(&syncs, &lost), "a failed sync does not stay failed");
    });
}

/// The kernel's fdatasync.
fn fdatasync(lost: &AtomicBool) -> Result<(), i32> {
    // It tells once.
    if lost.swap(false, Ordering::SeqCst) { Err(5) } else { Ok(()) }
}

#[test]
fn the_error_of_a_sync_reaches_all_who_wait() {
    file_syncs(|syncs, lost| syncs.sync(|| fdatasync(lost)).is_ok());
}

#[test]
#[should_panic(expected = "a write that is lost was acknowledged")]
fn an_error_given_to_one_of_two_is_found() {
    file_syncs(|syncs, lost| {
        // Asks for an earlier error before the call and not after it, and syncs beside others.
        let failed = syncs.sync(|| Ok(())).is_err();
        let done = fdatasync(lost);
        !failed && syncs.sync(|| done).is_ok() && done.is_ok()
    });
}
