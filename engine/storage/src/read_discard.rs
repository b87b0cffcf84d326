//! Reads and discards bytes: splices the file's pages to `/dev/null` in the kernel.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use vdkit_block::{OwnerProcess, Result};

/// Below this a plain read costs less than two splices.
const SPLICE_BYTES_MIN: u64 = 128 << 10;
const PIPE_BYTES: usize = 1 << 20;

/// A thread's pipe to `/dev/null`.
struct Drain {
    read: OwnedFd,
    write: OwnedFd,
    null: File,
    /// A child of `fork` makes its own pipe: one of the two could wait for bytes that the other took.
    process: OwnerProcess,
}

impl Drain {
    fn new() -> Option<Self> {
        let null = File::options().write(true).open("/dev/null").ok()?;
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).ok()?;
        // A smaller pipe works too, in more steps.
        let _ = fcntl_setpipe_size(&write, PIPE_BYTES);
        Some(Self { read, write, null, process: OwnerProcess::current() })
    }
}

thread_local! {
    static DRAIN: RefCell<Option<Drain>> = const { RefCell::new(None) };
}

/// Splices file pages to `/dev/null`. Returns the bytes read: fewer than `len` if splice does not
/// work here.
pub fn read_discard(file: &File, offset: u64, len: u64) -> Result<u64, Errno> {
    if len < SPLICE_BYTES_MIN {
        return Ok(0);
    }
    DRAIN.with_borrow_mut(|slot| {
        drop(slot.take_if(|drain| !drain.process.is_current()));
        if slot.is_none() {
            *slot = Drain::new();
        }
        let Some(drain) = slot else { return Ok(0) };
        let mut at = offset;
        while at < offset + len {
            let want = (offset + len - at).min(PIPE_BYTES as u64) as usize;
            let flags = SpliceFlags::empty();
            let mut got = match splice(file, Some(&mut at), &drain.write, None, want, flags) {
                Ok(0) => break,
                Ok(got) => got,
                Err(Errno::INTR) => continue,
                Err(Errno::INVAL | Errno::NOSYS | Errno::PERM) => break,
                Err(errno) => return Err(errno),
            };
            while got > 0 {
                match splice(&drain.read, None, &drain.null, None, got, flags) {
                    Ok(out) if out > 0 => got -= out,
                    Err(Errno::INTR) => {}
                    // The pipe holds bytes that cannot be removed: make a new one next time.
                    _ => {
                        *slot = None;
                        return Ok(at - offset - got as u64);
                    }
                }
            }
        }
        Ok(at - offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarding_reads_to_the_end_and_reports_what_cannot_be_read() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(path.path(), vec![7; 3 << 20]).unwrap();
        let file = File::open(path.path()).unwrap();
        assert_eq!(read_discard(&file, 0, 3 << 20), Ok(3 << 20));
        // The file ends within the range.
        assert_eq!(read_discard(&file, 1 << 20, 5 << 20), Ok(2 << 20));
        // Too short for splice.
        assert_eq!(read_discard(&file, 0, 4096), Ok(0));
        let unreadable = File::options().write(true).open(path.path()).unwrap();
        assert!(read_discard(&unreadable, 0, 1 << 20).is_err());
        // A failure leaves nothing in the pipe for the next call.
        assert_eq!(read_discard(&file, 0, 1 << 20), Ok(1 << 20));
    }
}
