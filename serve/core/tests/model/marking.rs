//! Marks of changes: a job that copies beside writers has all changes once it has taken the last marks
//! while nobody writes.

use std::sync::Arc;

use crate::changes::{ChangeMap, REGION_BYTES_MIN};
use crate::sync::{AtomicUsize, Ordering, RwLock, check, thread};

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// A writer marks a change before it makes it.
    MarksFirst,
    /// The job reads before it clears the mark.
    ReadsFirst,
}

/// A disk of one region.
struct Disk {
    /// Each write locks it for reading, and the job's last step for writing.
    requests: RwLock<()>,
    data: AtomicUsize,
    changes: ChangeMap,
    fault: Fault,
}

impl Disk {
    fn write(&self, data: usize) {
        let held = self.requests.read();
        if self.fault == Fault::MarksFirst {
            self.changes.mark(0, 1);
        }
        self.data.store(data, Ordering::Relaxed);
        if self.fault != Fault::MarksFirst {
            self.changes.mark(0, 1);
        }
        drop(held);
    }

    /// Copies what is marked.
    fn copy(&self, copy: &mut usize) {
        let read = || self.data.load(Ordering::Relaxed);
        let early = (self.fault == Fault::ReadsFirst).then(read);
        if self.changes.take(0, 1).is_some() {
            *copy = early.unwrap_or_else(read);
        }
    }
}

fn a_copy_beside_writes(fault: Fault) {
    check(3, move || {
        let changes = ChangeMap::new(REGION_BYTES_MIN);
        let (requests, data) = (RwLock::new(()), AtomicUsize::new(0));
        let disk = Arc::new(Disk { requests, data, changes, fault });
        let other = disk.clone();
        let writer = thread::spawn(move || {
            other.write(1);
            other.write(2);
        });
        let mut copy = 0;
        disk.copy(&mut copy);
        let alone = disk.requests.write();
        disk.copy(&mut copy);
        assert_eq!(copy, disk.data.load(Ordering::Relaxed), "the copy lacks a change");
        assert_eq!(disk.changes.marked_bytes(), 0);
        drop(alone);
        writer.join().unwrap();
    });
}

#[test]
fn a_copy_has_all_changes_in_the_end() {
    a_copy_beside_writes(Fault::None);
}

#[test]
#[should_panic(expected = "the copy lacks a change")]
fn a_change_must_not_be_marked_before_it_is_made() {
    a_copy_beside_writes(Fault::MarksFirst);
}

#[test]
#[should_panic(expected = "the copy lacks a change")]
fn a_mark_must_be_cleared_before_the_read() {
    a_copy_beside_writes(Fault::ReadsFirst);
}
