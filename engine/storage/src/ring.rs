//! Several reads in flight at once, through io_uring.
//!
//! Each thread has its own ring, so that no lock is held while it waits. If io_uring is unavailable
//! or not permitted (as in many containers), the first attempt detects it for the whole process.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;

/// Maximum reads in flight.
pub const DEPTH: usize = 64;

/// Maximum single read; longer reads gain nothing from batching.
pub const READ_BYTES_MAX: usize = 8 << 20;

/// io_uring is not available to this process.
static REFUSED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RING: RefCell<Option<IoUring>> = const { RefCell::new(None) };
}

/// A read and its outcome.
pub struct Read<'a> {
    pub offset: u64,
    pub buf: &'a mut [u8],
    /// Bytes read from the front, or an error; `Ok(0)` before. Reads may be short or refused
    /// although a plain read works: the caller reads the rest.
    pub outcome: Result<usize, Errno>,
}

/// Submits all reads and waits for all. If io_uring is unavailable, the outcomes stay unchanged.
pub fn read_all(file: &File, reads: &mut [Read<'_>]) {
    if REFUSED.load(Ordering::Relaxed) {
        return;
    }
    RING.with(|cell| {
        // Nothing below calls back into this function, but a busy ring must not cause an error.
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
                // The ring's state is unknown. Unserved reads keep their outcome.
                *slot = None;
                REFUSED.store(true, Ordering::Relaxed);
                break;
            }
        }
    });
}

/// Serves up to [`DEPTH`] reads. On return, the kernel uses no buffer any more.
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

/// Takes the available completions.
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

/// After a failed submission or wait: waits for the reads that the kernel already took.
fn drain(ring: &mut IoUring, reads: &mut [Read<'_>], outstanding: usize) {
    let never_taken = ring.submission().len();
    let mut taken = outstanding.saturating_sub(never_taken);
    while taken > 0 {
        taken = taken.saturating_sub(reap(ring, reads));
        // Entering the kernel lets it post completions.
        std::thread::yield_now();
    }
}
