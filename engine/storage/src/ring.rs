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
use vdkit_block::OwnerProcess;

/// Maximum reads in flight.
pub const DEPTH: usize = 64;

/// Maximum single read; longer reads gain nothing from batching.
pub const READ_BYTES_MAX: usize = 8 << 20;

/// io_uring is not available to this process.
static REFUSED: AtomicBool = AtomicBool::new(false);

/// A thread's ring. A child of `fork` shares its parent's: each would take the other's completions
/// for its own, and return buffers that nobody filled.
struct OwnRing {
    ring: IoUring,
    process: OwnerProcess,
}

thread_local! {
    static RING: RefCell<Option<OwnRing>> = const { RefCell::new(None) };
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
        drop(slot.take_if(|own| !own.process.is_current()));
        if slot.is_none() {
            match IoUring::new(DEPTH as u32) {
                Ok(ring) => *slot = Some(OwnRing { ring, process: OwnerProcess::current() }),
                Err(_) => {
                    REFUSED.store(true, Ordering::Relaxed);
                    return;
                }
            }
        }
        let Some(own) = slot.as_mut() else { return };
        for group in reads.chunks_mut(DEPTH) {
            if !read_group(&mut own.ring, file, group) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_a_ring_of_its_own() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), [7; 1024]).unwrap();
        let file = File::open(path.path()).unwrap();
        let reads_right = || {
            let mut bufs = [[0; 512]; 2];
            let [first, second] = &mut bufs;
            let mut reads = [(0, first), (512, second)].map(|(offset, buf)| Read {
                offset,
                buf: &mut buf[..],
                outcome: Ok(0),
            });
            read_all(&file, &mut reads);
            let own = |ring: &OwnRing| ring.process.is_current();
            let done = reads.iter().all(|read| read.outcome == Ok(512));
            done && bufs == [[7; 512]; 2] && RING.with_borrow(|ring| ring.as_ref().is_some_and(own))
        };
        if !reads_right() {
            return vdkit_testbase::impossible_here("there is no io_uring");
        }
        assert!(vdkit_testbase::in_child(|| (), reads_right), "the child took its parent's ring");
        assert!(reads_right());
    }
}
