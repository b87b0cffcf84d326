//! Requests in the background: submit many, reap what is done by polling or by an event descriptor.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::slice;
use std::time::Duration;

use vdkit::{GuestOffset, Queue, Request};

use crate::border::{self, Result, call, given, misuse};
use crate::disk::{VDKIT_MAY_UNMAP, vdkit_disk};
use crate::error;

/// Requests of one disk in the background. May be used from many threads at once.
pub struct vdkit_queue(Queue<Memory>);

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

/// Memory of the program, which is the queue's until the completion is reaped.
struct Memory {
    at: *mut u8,
    len: usize,
}

// SAFETY: it is the queue's, whichever of its threads uses it.
unsafe impl Send for Memory {}

impl Memory {
    /// # Safety
    /// Until the request's completion is reaped, `len` bytes at `at` are readable and not changed; for a
    /// read they are writable, and nobody else uses them.
    unsafe fn new(at: *const c_void, len: usize) -> Result<Self> {
        Ok(Self { at: border::checked(at, len)?, len })
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the promise made to `new`.
        unsafe { slice::from_raw_parts(self.at, self.len) }
    }
}

/// Used for reads only.
impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the promise made to `new`.
        unsafe { slice::from_raw_parts_mut(self.at, self.len) }
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
        let threads = match threads {
            1..=1024 => threads as usize,
            0 => vdkit::jobs::default_threads(),
            _ => return Err(misuse(format!("{threads} threads: at most 1024"))),
        };
        place.write(Box::into_raw(Box::new(vdkit_queue(Queue::new(disk, threads)?))));
        Ok(())
    })
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
    queue.map_or(-1, |queue| queue.0.as_raw_fd())
}

fn submit(queue: Option<&vdkit_queue>, cookie: u64, request: Result<Request<Memory>>) -> c_int {
    call(|| {
        given(queue, "queue")?.0.submit(cookie, request?);
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
    // SAFETY: the header's promise.
    let buffer = unsafe { Memory::new(buf, len) };
    submit(queue, cookie, buffer.map(|buffer| Request::Read { at: GuestOffset(offset), buffer }))
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
    // SAFETY: the header's promise.
    let buffer = unsafe { Memory::new(buf, len) };
    submit(queue, cookie, buffer.map(|buffer| Request::Write { at: GuestOffset(offset), buffer }))
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
    let may_unmap = flags & VDKIT_MAY_UNMAP != 0;
    let request = Request::WriteZeroes { at: GuestOffset(offset), len, may_unmap };
    submit(queue, cookie, border::known(flags, VDKIT_MAY_UNMAP).map(|()| request))
}

/// Submits vdkit_discard().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_discard(
    queue: Option<&vdkit_queue>,
    len: u64,
    offset: u64,
    cookie: u64,
) -> c_int {
    submit(queue, cookie, Ok(Request::Discard { at: GuestOffset(offset), len }))
}

/// Submits vdkit_flush(): makes durable what was completed before this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_flush(queue: Option<&vdkit_queue>, cookie: u64) -> c_int {
    submit(queue, cookie, Ok(Request::Flush))
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
        let queue = &given(queue, "queue")?.0;
        let max = usize::try_from(max).map_err(|_| misuse("max is negative"))?;
        if completions.is_null() && max > 0 {
            return Err(misuse("completions is NULL"));
        }
        // A negative number waits for any time.
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        for done in queue.reap(max, timeout) {
            let (cookie, result) = (done.cookie, call(|| done.result()));
            let completion = vdkit_completion { cookie, result, reserved: 0 };
            // SAFETY: `max` places are there, says the header.
            unsafe { completions.add(count).write(completion) };
            count += 1;
        }
        Ok(())
    });
    if result == 0 { c_int::try_from(count).unwrap_or(c_int::MAX) } else { result }
}

/// The number of requests that are submitted and not reaped; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_queue_open(queue: Option<&vdkit_queue>) -> usize {
    queue.map_or(0, |queue| queue.0.outstanding())
}

const _: () = assert!(error::VDKIT_E_FAILED < 0, "a count and a code can be told apart");
