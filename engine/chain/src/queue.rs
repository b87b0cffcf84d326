//! Requests of a disk in the background.
//!
//! ```text
//!   submit ─► waiting ─► a thread: read_at, write_at, … ─► done ─► reap
//!                                                            └─ descriptor: readable while not empty
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::DerefMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use vdkit_block::{Error, GuestOffset, IoAction, OwnerProcess, Result};

use crate::disk::Disk;

/// A request of a [`Queue`]. Its buffer comes back with its [`Completion`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request<B = Vec<u8>> {
    /// [`Disk::read_at`].
    Read {
        /// Offset of the first byte.
        at: GuestOffset,
        /// Filled as far as it is long.
        buffer: B,
    },
    /// [`Disk::write_at`].
    Write {
        /// Offset of the first byte.
        at: GuestOffset,
        /// The bytes.
        buffer: B,
    },
    /// [`Disk::write_zeroes`].
    WriteZeroes {
        /// Offset of the first byte.
        at: GuestOffset,
        /// Bytes.
        len: u64,
        /// Space may be freed.
        may_unmap: bool,
    },
    /// [`Disk::discard`].
    Discard {
        /// Offset of the first byte.
        at: GuestOffset,
        /// Bytes.
        len: u64,
    },
    /// [`Disk::flush`]: makes durable what was completed before it was submitted.
    Flush,
}

impl<B: DerefMut<Target = [u8]>> Request<B> {
    fn run(&mut self, disk: &Disk) -> Result<()> {
        match self {
            Self::Read { at, buffer } => disk.read_at(buffer, *at),
            Self::Write { at, buffer } => disk.write_at(buffer, *at),
            Self::WriteZeroes { at, len, may_unmap } => disk.write_zeroes(*at, *len, *may_unmap),
            Self::Discard { at, len } => disk.discard(*at, *len),
            Self::Flush => disk.flush(),
        }
    }

    fn into_buffer(self) -> Option<B> {
        match self {
            Self::Read { buffer, .. } | Self::Write { buffer, .. } => Some(buffer),
            Self::WriteZeroes { .. } | Self::Discard { .. } | Self::Flush => None,
        }
    }
}

/// A finished request.
#[derive(Debug)]
#[must_use = "it may hold an error"]
pub struct Completion<B = Vec<u8>> {
    /// The number that was submitted with it.
    pub cookie: u64,
    /// The buffer of a read or a write. After a failed read its content is undefined.
    pub buffer: Option<B>,
    outcome: std::thread::Result<Result<()>>,
}

impl<B> Completion<B> {
    /// How the request ended.
    ///
    /// # Errors
    /// Those of the request.
    ///
    /// # Panics
    /// If the request did.
    pub fn result(self) -> Result<()> {
        self.outcome.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Requests of one disk in the background: many are submitted, and reaped when they are done. May be
/// used by many threads at once.
///
/// Requests are done in any order, and several at the same time: one that needs another's effect is
/// submitted when that one was reaped.
///
/// Its descriptor ([`AsFd`]) is readable while completions wait to be reaped, for an event loop of any
/// kind. Do not read from it.
///
/// Dropping it waits until all submitted requests are done. (In a child of `fork`, which has none of its
/// threads, it only frees memory.)
pub struct Queue<B = Vec<u8>> {
    shared: Arc<Shared<B>>,
    workers: Vec<JoinHandle<()>>,
    /// The process that has the threads.
    owner: OwnerProcess,
}

struct Shared<B> {
    disk: Arc<Disk>,
    state: Mutex<State<B>>,
    /// A request was submitted, or the queue ends.
    submitted: Condvar,
    /// A request was completed.
    completed: Condvar,
    /// Readable while there are completions.
    event: OwnedFd,
}

struct State<B> {
    waiting: VecDeque<(u64, Request<B>)>,
    done: VecDeque<Completion<B>>,
    /// Submitted and not reaped.
    outstanding: usize,
    ended: bool,
}

impl<B: DerefMut<Target = [u8]> + Send + 'static> Queue<B> {
    /// A queue with so many threads, at least one: as many requests run at the same time.
    ///
    /// # Errors
    /// [`Error::File`] if no thread or no descriptor can be had.
    pub fn new(disk: Arc<Disk>, threads: usize) -> Result<Self> {
        let file = disk.name().to_owned();
        let failed =
            |source: io::Error| Error::File { file: file.clone(), action: IoAction::Start, source };
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let state =
            State { waiting: VecDeque::new(), done: VecDeque::new(), outstanding: 0, ended: false };
        let shared = Arc::new(Shared {
            disk,
            state: Mutex::new(state),
            submitted: Condvar::new(),
            completed: Condvar::new(),
            event,
        });
        // Dropped, and so ended, if a thread cannot be started.
        let mut queue = Self { shared, workers: Vec::new(), owner: OwnerProcess::current() };
        for _ in 0..threads.max(1) {
            let shared = Arc::clone(&queue.shared);
            let worker = std::thread::Builder::new()
                .name("vdkit-queue".to_owned())
                .spawn(move || shared.work())
                .map_err(failed)?;
            queue.workers.push(worker);
        }
        Ok(queue)
    }
}

impl<B> Queue<B> {
    /// Submits a request. `cookie` comes back with its completion.
    pub fn submit(&self, cookie: u64, request: Request<B>) {
        let mut state = self.shared.state.lock();
        state.waiting.push_back((cookie, request));
        state.outstanding += 1;
        drop(state);
        self.shared.submitted.notify_one();
    }

    /// Reaps up to `max` completions. Waits until there is one, at most for `timeout`; `None` waits for
    /// any time. Returns at once if no request is outstanding.
    pub fn reap(&self, max: usize, timeout: Option<Duration>) -> Vec<Completion<B>> {
        let shared = &*self.shared;
        let mut state = shared.state.lock();
        let nothing = |state: &mut State<B>| state.done.is_empty() && state.outstanding > 0;
        match timeout {
            Some(limit) if limit.is_zero() => {}
            Some(limit) => {
                shared.completed.wait_while_for(&mut state, nothing, limit);
            }
            None => shared.completed.wait_while(&mut state, nothing),
        }
        let count = state.done.len().min(max);
        let reaped: Vec<_> = state.done.drain(..count).collect();
        state.outstanding -= count;
        if count > 0 && state.done.is_empty() {
            let _ = rustix::io::read(&shared.event, &mut [0; 8]);
        }
        reaped
    }

    /// Number of requests that are submitted and not reaped.
    pub fn outstanding(&self) -> usize {
        self.shared.state.lock().outstanding
    }
}

impl<B: DerefMut<Target = [u8]>> Shared<B> {
    fn work(&self) {
        while let Some((cookie, mut request)) = self.take() {
            let outcome = catch_unwind(AssertUnwindSafe(|| request.run(&self.disk)));
            let done = Completion { cookie, buffer: request.into_buffer(), outcome };
            let mut state = self.state.lock();
            state.done.push_back(done);
            if state.done.len() == 1 {
                // Written under the lock, so that it is readable exactly while something is done.
                let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
            drop(state);
            self.completed.notify_all();
        }
    }

    /// The next request. `None` if the queue has ended, and all that was submitted is taken.
    fn take(&self) -> Option<(u64, Request<B>)> {
        let mut state = self.state.lock();
        self.submitted.wait_while(&mut state, |state| state.waiting.is_empty() && !state.ended);
        state.waiting.pop_front()
    }
}

impl<B> Drop for Queue<B> {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            // A thread of the parent cannot be joined here.
            return self.workers.drain(..).for_each(std::mem::forget);
        }
        self.shared.state.lock().ended = true;
        self.shared.submitted.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl<B> AsFd for Queue<B> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }
}

impl<B> AsRawFd for Queue<B> {
    fn as_raw_fd(&self) -> RawFd {
        self.shared.event.as_raw_fd()
    }
}

impl<B> fmt::Debug for Queue<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("disk", &self.shared.disk.name()).finish_non_exhaustive()
    }
}
