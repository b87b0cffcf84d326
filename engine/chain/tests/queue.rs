//! Requests in the background.

mod support;

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::raw_disk;
use vdkit_block::{ErrorKind, GuestOffset, Storage};
use vdkit_chain::{Disk, Queue, Request};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{FaultKind, GatedStorage, in_child};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 256;

fn memory() -> Arc<MemoryStorage> {
    Arc::new(MemoryStorage::with_len("disk", BLOCKS * BLOCK))
}

fn disk(storage: Arc<dyn Storage>) -> Arc<Disk> {
    Arc::new(raw_disk(storage, true))
}

fn read(block: u64) -> Request {
    Request::Read { at: GuestOffset(block * BLOCK), buffer: vec![0xEE; BLOCK as usize] }
}

fn write(block: u64) -> Request {
    Request::Write { at: GuestOffset(block * BLOCK), buffer: block_of(block) }
}

fn block_of(block: u64) -> Vec<u8> {
    vec![block as u8; BLOCK as usize]
}

fn readable(queue: &Queue) -> bool {
    let mut fds = [PollFd::new(queue, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// The numbers of the completions that are there, at most `max`.
fn reap_now(queue: &Queue, max: usize) -> Vec<u64> {
    let done = queue.reap(max, Some(Duration::ZERO));
    done.into_iter().map(|done| done.cookie).collect()
}

#[test]
fn each_of_many_requests_is_done_and_answered_once() {
    let queue = Queue::new(disk(memory()), 4).unwrap();
    for requests in [write as fn(u64) -> Request, read] {
        (0..BLOCKS).for_each(|block| queue.submit(block, requests(block)));
        let mut seen = BTreeSet::new();
        while queue.outstanding() > 0 {
            for mut done in queue.reap(10, None) {
                assert!(seen.insert(done.cookie), "{} twice", done.cookie);
                assert_eq!(done.buffer.take(), Some(block_of(done.cookie)));
                done.result().unwrap();
            }
        }
        assert_eq!(seen.len() as u64, BLOCKS);
    }
}

#[test]
fn a_slow_request_holds_up_no_other() {
    let gated = GatedStorage::new(memory());
    let queue = Queue::new(disk(gated.clone()), 2).unwrap();
    gated.hold(|call| call.kind == FaultKind::Read && call.offset == 0 && !call.done);
    queue.submit(0, read(0));
    gated.reached();
    queue.submit(1, read(1));
    let first = queue.reap(2, None);
    assert_eq!(first.iter().map(|done| done.cookie).collect::<Vec<_>>(), [1]);
    assert_eq!(queue.outstanding(), 1);
    gated.release();
    assert_eq!(queue.reap(2, None)[0].cookie, 0);
}

#[test]
fn the_descriptor_is_readable_exactly_while_something_is_done() {
    let gated = GatedStorage::new(memory());
    let queue = Queue::new(disk(gated.clone()), 1).unwrap();
    assert!(!readable(&queue));
    assert!(queue.reap(1, None).is_empty(), "nothing is submitted, so nothing is waited for");
    gated.hold(|call| call.kind == FaultKind::Read && call.offset == 2 * BLOCK && !call.done);
    (0..3).for_each(|block| queue.submit(block, read(block)));
    // The one thread takes the third request when it has done the others.
    gated.reached();
    assert!(readable(&queue));
    assert_eq!(reap_now(&queue, 1).len(), 1);
    assert!(readable(&queue));
    assert_eq!(reap_now(&queue, 9).len(), 1);
    assert!(!readable(&queue));
    assert!(queue.reap(9, Some(Duration::from_millis(1))).is_empty());
    gated.release();
    let mut fds = [PollFd::new(&queue, PollFlags::IN)];
    assert_eq!(poll(&mut fds, None).unwrap(), 1);
    assert_eq!(reap_now(&queue, 9), [2]);
    assert!(!readable(&queue));
}

#[test]
fn an_error_is_one_requests_own() {
    let queue = Queue::new(disk(memory()), 4).unwrap();
    for i in 0..100 {
        queue.submit(i, if i % 2 == 0 { write(i) } else { read(BLOCKS + i) });
    }
    let mut left = 100;
    while left > 0 {
        for mut done in queue.reap(100, None) {
            left -= 1;
            assert!(done.buffer.take().is_some(), "the buffer comes back also after an error");
            let (cookie, result) = (done.cookie, done.result());
            assert_eq!(
                result.err().map(|e| e.kind()),
                (cookie % 2 == 1).then_some(ErrorKind::Usage)
            );
        }
    }
}

#[test]
fn a_dropped_queue_has_done_all_that_was_submitted() {
    let memory = memory();
    let gated = GatedStorage::new(memory.clone());
    let disk = disk(gated.clone());
    let queue = Queue::new(disk.clone(), 1).unwrap();
    gated.hold(|call| call.kind == FaultKind::Write && !call.done);
    (1..9).for_each(|block| queue.submit(block, write(block)));
    queue.submit(9, Request::WriteZeroes { at: GuestOffset(0), len: BLOCK, may_unmap: true });
    queue.submit(10, Request::Discard { at: GuestOffset(0), len: BLOCK });
    queue.submit(11, Request::Flush);
    gated.reached();
    let dropping = std::thread::spawn(move || drop(queue));
    gated.release();
    dropping.join().unwrap();
    let bytes = memory.to_vec();
    for block in 0..9 {
        let at = (block * BLOCK) as usize;
        assert!(bytes[at..at + BLOCK as usize] == block_of(block), "{block}");
    }
    assert_eq!(Arc::strong_count(&disk), 1);
}

#[test]
fn a_child_of_fork_that_drops_a_queue_waits_for_no_thread_of_its_parent() {
    let queue: Queue = Queue::new(disk(memory()), 2).unwrap();
    assert!(in_child(
        || (),
        move || {
            drop(queue);
            true
        }
    ));
}

/// Memory that cannot be used.
struct Trap;

impl Deref for Trap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        panic!("a trap")
    }
}

impl DerefMut for Trap {
    fn deref_mut(&mut self) -> &mut [u8] {
        panic!("a trap")
    }
}

#[test]
fn a_panic_ends_its_own_request_and_no_thread() {
    let queue = Queue::new(disk(memory()), 1).unwrap();
    queue.submit(0, Request::Read { at: GuestOffset(0), buffer: Trap });
    queue.submit(1, Request::Flush);
    let mut left = BTreeSet::from([0, 1]);
    while !left.is_empty() {
        for done in queue.reap(2, None) {
            let cookie = done.cookie;
            assert!(left.remove(&cookie));
            let result = catch_unwind(AssertUnwindSafe(|| done.result()));
            assert_eq!(matches!(result, Ok(Ok(()))), cookie == 1);
        }
    }
}
