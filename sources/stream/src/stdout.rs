//! Cancellable writes to standard output, which may be a pipe that nobody reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use rustix::event::PollFlags;
use rustix::fs::FileType;
use vdkit_block::CancelToken;

use crate::stdin::wait_for;

/// A pipe that can be written takes a page at once.
const PAGE_BYTES: usize = 4096;

/// Standard output.
#[derive(Debug)]
pub struct Stdout {
    file: File,
    cancel: CancelToken,
    /// Bytes that it takes at once when it is empty, if it is a pipe.
    pipe: Option<usize>,
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
        let pipe = (kind == Ok(FileType::Fifo))
            .then(|| rustix::pipe::fcntl_getpipe_size(&file).unwrap_or(PAGE_BYTES));
        Self { file, cancel, pipe }
    }
}

impl Write for Stdout {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let Some(whole) = self.pipe else { return self.file.write(buf) };
        loop {
            wait_for(&self.file, PollFlags::OUT, &self.cancel)?;
            // A larger write would wait in the kernel, where no cancellation is seen.
            let empty = rustix::io::ioctl_fionread(&self.file) == Ok(0);
            let room = if empty { whole } else { PAGE_BYTES };
            match self.file.write(&buf[..buf.len().min(room)]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
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
        let (mut from, to) = io::pipe().unwrap();
        let cancel = CancelToken::default();
        let mut out = Stdout::from_file(File::from(std::os::fd::OwnedFd::from(to)), cancel.clone());
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
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
