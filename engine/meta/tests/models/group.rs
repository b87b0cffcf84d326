//! Group commit, and the syncs of a file.

use crate::commit::Commit;
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, check, thread};
use crate::syncs::{SyncError, Syncs};

/// A memory and a disk with one bit per writer.
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
    /// As with a dirty flag that a commit clears when it begins: while the commit still runs,
    /// earlier changes count as durable.
    ABooleanForDurable,
}

impl Model {
    fn commit(&self, number: u64) {
        let committed = self.commit.durable_up_to(number, |_| {
            let copy = *self.memory.lock();
            // Others may change the memory during the sync.
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
                    // A writer that sees the flag clear assumes durability.
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

/// Callers that wait for a failing commit then commit themselves: none returns success for
/// another's failed commit.
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

/// A file in the kernel: the number of lost pages, and the number that was reported to each open
/// description.
#[derive(Default)]
struct Kernel {
    lost: AtomicU64,
    told: [AtomicU64; 2],
}

impl Kernel {
    fn fdatasync(&self, description: usize) -> Result<(), i32> {
        let lost = self.lost.load(Ordering::SeqCst);
        let told = self.told[description].swap(lost, Ordering::SeqCst);
        if told == lost { Ok(()) } else { Err(5) }
    }

    /// Opens the second description. What was reported before is old to it.
    fn open(&self) -> usize {
        self.told[1].store(self.told[0].load(Ordering::SeqCst), Ordering::SeqCst);
        2
    }
}

/// Three clients whose pages are lost sync at the same time; `opened`: with all lanes open.
fn file_syncs(
    opened: bool,
    sync: impl Fn(&Syncs<i32>, &Kernel) -> bool + Send + Sync + Copy + 'static,
) {
    check(2, move || {
        let syncs = Arc::new(if opened { Syncs::with_lanes(2) } else { Syncs::default() });
        let kernel = Arc::new(Kernel::default());
        let write = || {
            let (syncs, kernel) = (syncs.clone(), kernel.clone());
            move || {
                kernel.lost.fetch_add(1, Ordering::SeqCst);
                sync(&syncs, &kernel)
            }
        };
        let threads = [thread::spawn(write()), thread::spawn(write())];
        assert!(!write()(), "a write that is lost was acknowledged");
        for thread in threads {
            assert!(!thread.join().unwrap(), "a write that is lost was acknowledged");
        }
        assert!(!sync(&syncs, &kernel), "a failed sync does not stay failed");
    });
}

#[test]
fn the_error_of_a_sync_reaches_all_who_wait() {
    file_syncs(true, |syncs, kernel| syncs.sync(|| 2, |lane| kernel.fdatasync(lane)).is_ok());
    file_syncs(false, |syncs, kernel| {
        syncs.sync(|| kernel.open(), |lane| kernel.fdatasync(lane)).is_ok()
    });
}

#[test]
#[should_panic(expected = "a write that is lost was acknowledged")]
fn lanes_that_share_a_description_are_found() {
    file_syncs(true, |syncs, kernel| syncs.sync(|| 2, |_| kernel.fdatasync(0)).is_ok());
}

#[test]
#[should_panic(expected = "a write that is lost was acknowledged")]
fn an_error_given_to_one_of_two_is_found() {
    file_syncs(false, |syncs, kernel| {
        // Checks for an earlier error before the sync but not after it, with concurrent syncs.
        let failed = syncs.sync(|| 1, |_| Ok(())).is_err();
        let done = kernel.fdatasync(0);
        let told = syncs.sync(|| 1, |_| done).is_ok();
        !failed && told
    });
}

/// A page that one sync loses may belong to a caller whose own concurrent sync succeeds: that
/// caller must get the error too.
#[test]
fn a_sync_that_ends_well_beside_a_failed_one_reports_it() {
    check(2, || {
        let syncs = Syncs::with_lanes(2);
        let beside = |_| {
            let failed = syncs.sync(|| 2, |_| Err(5));
            assert_eq!(failed, Err(SyncError::Now(5)));
            Ok(())
        };
        assert_eq!(syncs.sync(|| 2, beside), Err(SyncError::Earlier(5)));
    });
}

/// Three clients write a bit each and sync, over `lanes` lanes.
#[test]
fn a_sync_that_serves_many_began_after_all_of_them_had_asked() {
    for lanes in [1, 2] {
        check(2, move || {
            let syncs = Arc::new(Syncs::<()>::default());
            let (memory, disk) = (Arc::new(Mutex::new(0_u64)), Arc::new(Mutex::new(0_u64)));
            let write = |bit: u64| {
                let (syncs, memory, disk) = (syncs.clone(), memory.clone(), disk.clone());
                move || {
                    *memory.lock() |= bit;
                    let sync = |_| {
                        let copy = *memory.lock();
                        // Others may write during the sync.
                        *disk.lock() |= copy;
                        Ok(())
                    };
                    syncs.sync(|| lanes, sync).unwrap();
                    assert!(*disk.lock() & bit != 0, "an acknowledged write is not on disk");
                }
            };
            let threads = [thread::spawn(write(1)), thread::spawn(write(2))];
            write(4)();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
