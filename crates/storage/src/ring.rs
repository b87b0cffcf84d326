//! Several reads in flight at once, through io_uring.
//!
//! Each thread keeps a ring of its own, so that no lock is held while it waits. Where io_uring is
//! not permitted (containers often forbid it) or not there, this is found out once.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

/// Reads in flight at once.
pub const DEPTH: usize = 64;

/// The longest single read; anything longer gains nothing from company.
pub const READ_BYTES_MAX: usize = 8 << 20;

/// io_uring was refused to this process.
static REFUSED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RING: RefCell<Option<IoUring>> = const { RefCell::new(None) };
}

/// A read, and what came of it.
pub struct Read<'a> {
    pub offset: u64,
    pub buf: &'a mut [u8],
    /// Bytes that were read from the front, or why not; `Ok(0)` before. Short reads happen, and
    /// so do refusals of requests that a plain read serves: the caller goes on from here.
    pub outcome: Result<usize, Errno>,
}

/// Issues all reads, and waits for all. Where io_uring is not to be had, the outcomes stay as
/// they are.
pub fn read_all(file: &File, reads: &mut [Read<'_>]) {
    if REFUSED.load(Ordering::Relaxed) {
        return;
    }
    RING.with(|cell| {
        // Nothing below calls back into this function, but a busy ring is no reason to fail.
        let Ok(mut slot) = cell.try_borrow_mut() else { return };
        if slot.is_none() {
            match IoUring::new(DEPTH as u32) {
                Ok(ring) => *slot = Some(ring),
                Err(_) => {
                    REFUSED.store(true, Ordering::Relaxed);
                    return;
                }
            }
        }
        let Some(ring) = slot.as_mut() else { return };
        for group in reads.chunks_mut(DEPTH) {
            if !read_group(ring, file, group) {
                // The ring is in a state that we do not know. What it did not serve keeps its
                // outcome.
                *slot = None;
                REFUSED.store(true, Ordering::Relaxed);
                break;
            }
        }
    });
}

/// Serves up to [`DEPTH`] reads. When this returns, the kernel has let go of all buffers.
fn read_group(ring: &mut IoUring, file: &File, reads: &mut [Read<'_>]) -> bool {
    let fd = types::Fd(file.as_raw_fd());
    let mut queued = 0;
    for (index, read) in reads.iter_mut().enumerate() {
        let len = read.buf.len().min(READ_BYTES_MAX) as u32;
        let entry = opcode::Read::new(fd, read.buf.as_mut_ptr(), len)
            .offset(read.offset)
            .build()
            .user_data(index as u64);
        // SAFETY: the buffer is borrowed by `reads` until this function returns, and it returns
        // only when every queued read has completed or was never handed to the kernel. The file
        // is borrowed for as long.
        if unsafe { ring.submission().push(&entry) }.is_err() {
            break;
        }
        queued += 1;
    }
    let mut completed = 0;
    while completed < queued {
        if let Err(error) = ring.submit_and_wait(queued - completed) {
            let passing = [Errno::INTR, Errno::AGAIN, Errno::BUSY];
            if !passing.iter().any(|e| error.raw_os_error() == Some(e.raw_os_error())) {
                drain(ring, reads, queued - completed);
                return false;
            }
        }
        completed += reap(ring, reads);
    }
    true
}

/// Takes the completions that are there.
fn reap(ring: &mut IoUring, reads: &mut [Read<'_>]) -> usize {
    let mut count = 0;
    for entry in ring.completion() {
        count += 1;
        if let Some(read) = reads.get_mut(entry.user_data() as usize) {
            read.outcome = match entry.result() {
                n if n >= 0 => Ok(n as usize),
                errno => Err(Errno::from_raw_os_error(-errno)),
            };
        }
    }
    count
}

/// After a refusal of the kernel to take or wait: waits for what it took already.
fn drain(ring: &mut IoUring, reads: &mut [Read<'_>], outstanding: usize) {
    let never_taken = ring.submission().len();
    let mut taken = outstanding.saturating_sub(never_taken);
    while taken > 0 {
        taken = taken.saturating_sub(reap(ring, reads));
        // Entering the kernel lets it post completions.
        std::thread::yield_now();
    }
}
