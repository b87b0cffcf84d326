//! Cancellable reads from standard input or another pipe.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vdkit_block::{CancelToken, Error};

/// Interval between checks of the cancel token.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// A pipe to read.
#[derive(Debug)]
pub struct Stdin {
    file: File,
    cancel: CancelToken,
}

/// Whether an error says that the cancel token was seen.
pub(crate) fn is_interruption(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    matches!(inner, Some(Error::Interrupted))
}

/// Waits until a file can be read or written.
///
/// # Errors
/// Of poll(2); at a cancellation one that [`is_interruption`] knows.
pub(crate) fn wait_for(file: &File, what: PollFlags, cancel: &CancelToken) -> io::Result<()> {
    loop {
        if cancel.is_cancelled() {
            return Err(io::Error::other(Error::Interrupted));
        }
        match poll(&mut [PollFd::new(file, what)], Some(&TICK)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

impl Stdin {
    /// Reads this process's standard input.
    ///
    /// # Errors
    /// If it is closed.
    pub fn open(cancel: CancelToken) -> io::Result<Self> {
        Ok(Self { file: File::from(io::stdin().as_fd().try_clone_to_owned()?), cancel })
    }

    /// Reads from this file, which may be a pipe.
    pub fn from_file(file: File, cancel: CancelToken) -> Self {
        Self { file, cancel }
    }
}

impl Read for Stdin {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            wait_for(&self.file, PollFlags::IN, &self.cancel)?;
            match self.file.read(buf) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}
