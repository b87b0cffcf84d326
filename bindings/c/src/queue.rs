//! Requests in the background: submit many, reap what is done by polling or by an event descriptor.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use vdkit::{Disk, Error, GuestOffset, IoAction};

use crate::border::{self, Result, User, call, given, misuse};
use crate::disk::{VDKIT_MAY_UNMAP, vdkit_disk};
use crate::error;

/// Requests of one disk in the background. May be used from many threads at once.
pub struct vdkit_queue {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    disk: Arc<Disk>,
    state: Mutex<State>,
    /// A request was submitted, or the queue ends.
    submitted: Condvar,
    /// A request was completed.
    completed: Condvar,
    /// Readable while there are completions.
    event: OwnedFd,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Request>,
    done: VecDeque<vdkit_completion>,
    /// Submitted and not reaped.
    open: usize,
    ended: bool,
}

/// A finished request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_completion {
    /// The number that was submitted with it.
    pub cookie: u64,
    /// 0, or a VDKIT_E_ code.
    pub result: c_int,
    /// 0; for later versions.
    pub reserved: c_int,
}

struct Request {
    cookie: u64,
    what: What,
    offset: u64,
}

enum What {
    Read(User, usize),
    Write(User, usize),
    Zero { len: u64, may_unmap: bool },
    Discard { len: u64 },
    Flush,
}

impl Request {
    fn run(&self, disk: &Disk) -> Result<()> {
        let at = GuestOffset(self.offset);
        match &self.what {
            // SAFETY: the buffer is the queue's until the completion is reaped, says the header.
            What::Read(buf, len) => disk.read_at(unsafe { border::bytes_mut(buf.0, *len) }?, at),
            // SAFETY: as above.
            What::Write(buf, len) => disk.write_at(unsafe { border::bytes(buf.0, *len) }?, at),
            What::Zero { len, may_unmap } => disk.write_zeroes(at, *len, *may_unmap),
            What::Discard { len } => disk.discard(at, *len),
            What::Flush => disk.flush(),
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let request = {
                let mut state = self.state.lock();
                self.submitted
                    .wait_while(&mut state, |state| state.waiting.is_empty() && !state.ended);
                // Submitted requests are done also if the queue ends.
                let Some(request) = state.waiting.pop_front() else { return };
                request
            };
            let result = call(|| request.run(&self.disk));
            let mut state = self.state.lock();
            state.done.push_back(vdkit_completion { cookie: request.cookie, result, reserved: 0 });
            if state.done.len() == 1 {
                // Written under the lock, so that it is readable exactly while something is done.
                let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
            drop(state);
            self.completed.notify_all();
        }
    }

    fn reap(&self, state: &mut State, place: &mut [MaybeUninit<vdkit_completion>]) -> usize {
        let count = state.done.len().min(place.len());
        for (place, completion) in place.iter_mut().zip(state.done.drain(..count)) {
            place.write(completion);
        }
        state.open -= count;
        if count > 0 && state.done.is_empty() {
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
        count
    }
}

/// Makes a queue for a disk, with so many threads; 0 takes one per processor. Freed by
/// vdkit_queue_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_new(
    disk: Option<&vdkit_disk>,
    threads: c_int,
    queue: Option<&mut MaybeUninit<*mut vdkit_queue>>,
) -> c_int {
    call(|| {
        let place = border::place_of(queue)?;
        let disk = given(disk, "disk")?.0.clone();
        let failed =
            |source| Error::File { file: disk.name().to_owned(), action: IoAction::Start, source };
        let threads = match threads {
            1..=1024 => threads as usize,
            0 => vdkit::jobs::default_threads(),
            _ => return Err(misuse(format!("{threads} threads: at most 1024"))),
        };
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| failed(errno.into()))?;
        let shared = Arc::new(Shared {
            disk: disk.clone(),
            state: Mutex::default(),
            submitted: Condvar::new(),
            completed: Condvar::new(),
            event,
        });
        // Dropped, and so ended, if a thread cannot be started.
        let mut new = Box::new(vdkit_queue { shared: shared.clone(), workers: Vec::new() });
        for _ in 0..threads {
            let shared = shared.clone();
            let worker = std::thread::Builder::new()
                .name("vdkit-queue".to_owned())
                .spawn(move || shared.work())
                .map_err(failed)?;
            new.workers.push(worker);
        }
        place.write(Box::into_raw(new));
        Ok(())
    })
}

impl Drop for vdkit_queue {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.submitted.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Waits until all submitted requests are done, and frees a queue with its descriptor and the completions
/// that were not reaped. No other call may use it any more. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_free(queue: *mut vdkit_queue) {
    // SAFETY: the header's promise.
    drop(unsafe { border::take(queue) });
}

/// A descriptor that is readable while completions wait to be reaped, for poll() and its kin. It
/// belongs to the queue: neither read nor close it. -1 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_fd(queue: Option<&vdkit_queue>) -> c_int {
    queue.map_or(-1, |queue| queue.shared.event.as_fd().as_raw_fd())
}

fn submit(queue: Option<&vdkit_queue>, cookie: u64, offset: u64, what: What) -> c_int {
    call(|| {
        let shared = &given(queue, "queue")?.shared;
        let mut state = shared.state.lock();
        state.waiting.push_back(Request { cookie, what, offset });
        state.open += 1;
        drop(state);
        shared.submitted.notify_one();
        Ok(())
    })
}

/// Submits a read. The buffer is the queue's until the completion with this cookie is reaped.
/// Requests are done in any order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_pread(
    queue: Option<&vdkit_queue>,
    buf: *mut c_void,
    len: usize,
    offset: u64,
    cookie: u64,
) -> c_int {
    submit(queue, cookie, offset, What::Read(User(buf), len))
}

/// Submits a write; see vdkit_queue_pread(). The buffer must not be changed meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_pwrite(
    queue: Option<&vdkit_queue>,
    buf: *const c_void,
    len: usize,
    offset: u64,
    cookie: u64,
) -> c_int {
    submit(queue, cookie, offset, What::Write(User(buf.cast_mut()), len))
}

/// Submits vdkit_write_zeroes().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_write_zeroes(
    queue: Option<&vdkit_queue>,
    len: u64,
    offset: u64,
    flags: u32,
    cookie: u64,
) -> c_int {
    let known = call(|| border::known(flags, VDKIT_MAY_UNMAP));
    if known != 0 {
        return known;
    }
    submit(queue, cookie, offset, What::Zero { len, may_unmap: flags & VDKIT_MAY_UNMAP != 0 })
}

/// Submits vdkit_discard().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_discard(
    queue: Option<&vdkit_queue>,
    len: u64,
    offset: u64,
    cookie: u64,
) -> c_int {
    submit(queue, cookie, offset, What::Discard { len })
}

/// Submits vdkit_flush(): makes durable what was completed before this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_flush(queue: Option<&vdkit_queue>, cookie: u64) -> c_int {
    submit(queue, cookie, 0, What::Flush)
}

/// Reaps up to `max` completions into `completions` and returns how many: waits until there is one, at
/// most `timeout_ms` milliseconds (0: does not wait; negative: for any time). Returns 0 at once if no
/// request is open. A completion has only the code of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_reap(
    queue: Option<&vdkit_queue>,
    completions: *mut vdkit_completion,
    max: c_int,
    timeout_ms: c_int,
) -> c_int {
    let mut count = 0;
    let result = call(|| {
        let shared = &given(queue, "queue")?.shared;
        let max = usize::try_from(max).map_err(|_| misuse("max is negative"))?;
        if completions.is_null() && max > 0 {
            return Err(misuse("completions is NULL"));
        }
        let place: &mut [MaybeUninit<vdkit_completion>] = match max {
            0 => &mut [],
            // SAFETY: `max` places are there, says the header, and they need no values.
            max => unsafe { std::slice::from_raw_parts_mut(completions.cast(), max) },
        };
        let mut state = shared.state.lock();
        let nothing = |state: &mut State| state.done.is_empty() && state.open > 0;
        match u64::try_from(timeout_ms) {
            Ok(0) => {}
            Ok(limit) => {
                let limit = Duration::from_millis(limit);
                shared.completed.wait_while_for(&mut state, nothing, limit);
            }
            Err(_) => shared.completed.wait_while(&mut state, nothing),
        }
        count = shared.reap(&mut state, place);
        Ok(())
    });
    if result == 0 { c_int::try_from(count).unwrap_or(c_int::MAX) } else { result }
}

/// The number of requests that are submitted and not reaped; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_open(queue: Option<&vdkit_queue>) -> usize {
    queue.map_or(0, |queue| queue.shared.state.lock().open)
}

const _: () = assert!(error::VDKIT_E_FAILED < 0, "a count and a code can be told apart");
