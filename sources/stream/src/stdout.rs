//! Cancellable writes to standard output, which may be a pipe that nobody reads.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::event::PollFlags;
use rustix::fs::{FileType, OFlags};
use vdkit_block::CancelToken;

use crate::stdin::wait_for;

/// A pipe that can be written takes a page at once.
const PAGE_BYTES: usize = 4096;

/// Bytes that a pipe is asked to hold, the most that any user may ask for by default: its ends wait for
/// each other less often. Source: pipe(7), "/proc/sys/fs/pipe-max-size".
const PIPE_BYTES: usize = 1 << 20;

/// Standard output.
#[derive(Debug)]
pub struct Stdout {
    file: File,
    cancel: CancelToken,
    /// Of a pipe that waits in the kernel when it is full: the bytes that it takes at once when it is
    /// empty.
    waits: Option<usize>,
}

impl Stdout {
    /// Writes to this process's standard output.
    ///
    /// # Errors
    /// If it is closed.
    pub fn open(cancel: CancelToken) -> io::Result<Self> {
        Ok(Self::from_file(File::from(io::stdout().as_fd().try_clone_to_owned()?), cancel))
    }

    /// Writes to this file, which may be a pipe.
    pub fn from_file(file: File, cancel: CancelToken) -> Self {
        let kind = rustix::fs::fstat(&file).map(|found| FileType::from_raw_mode(found.st_mode));
        if kind != Ok(FileType::Fifo) {
            return Self { file, cancel, waits: None };
        }
        if rustix::pipe::fcntl_getpipe_size(&file).is_ok_and(|bytes| bytes < PIPE_BYTES) {
            // A pipe that does not get larger works too.
            let _ = rustix::pipe::fcntl_setpipe_size(&file, PIPE_BYTES);
        }
        match not_waiting(&file) {
            Ok(file) => Self { file, cancel, waits: None },
            Err(_) => Self::that_waits(file, cancel),
        }
    }

    fn that_waits(file: File, cancel: CancelToken) -> Self {
        let waits = Some(rustix::pipe::fcntl_getpipe_size(&file).unwrap_or(PAGE_BYTES));
        Self { file, cancel, waits }
    }
}

/// The same pipe, opened anew so that its writes do not wait. The flag is not set in the file that was
/// given, which other processes share.
fn not_waiting(file: &File) -> io::Result<File> {
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::NONBLOCK.bits() as i32;
    OpenOptions::new().write(true).custom_flags(flags).open(name)
}

impl Write for Stdout {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            let mut most = buf.len();
            if let Some(whole) = self.waits {
                wait_for(&self.file, PollFlags::OUT, &self.cancel)?;
                // A larger write would wait in the kernel, where no cancellation is seen.
                let empty = rustix::io::ioctl_fionread(&self.file) == Ok(0);
                most = most.min(if empty { whole } else { PAGE_BYTES });
            }
            match self.file.write(&buf[..most]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    wait_for(&self.file, PollFlags::OUT, &self.cancel)?;
                }
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_waits_for_a_cancellation_alone() {
        for make in [Stdout::from_file, Stdout::that_waits] {
            let (mut from, to) = io::pipe().unwrap();
            let cancel = CancelToken::default();
            let mut out = make(File::from(std::os::fd::OwnedFd::from(to)), cancel.clone());
            let bytes: Vec<u8> = (0..4_000_000_u32).map(|i| (i % 251) as u8).collect();
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    out.write_all(&bytes)?;
                    out.write_all(&bytes)
                });
                let mut read = vec![0; bytes.len()];
                from.read_exact(&mut read).unwrap();
                assert!(read == bytes);
                cancel.cancel();
                assert!(writer.join().unwrap().is_err());
            });
        }
    }

    /// Other processes have the same open file, such as the next command of a shell.
    #[test]
    fn the_pipe_that_was_given_still_waits() {
        let (_from, to) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(to));
        let out = Stdout::from_file(file.try_clone().unwrap(), CancelToken::default());
        assert!(out.waits.is_none());
        assert_eq!(rustix::pipe::fcntl_getpipe_size(&file), Ok(PIPE_BYTES));
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        assert!(rustix::fs::fcntl_getfl(&out.file).unwrap().contains(OFlags::NONBLOCK));
    }
}
