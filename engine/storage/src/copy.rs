//! Sharing and copying blocks in the kernel.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use vdkit_block::{
    CopyMethod, CopyOp, IoAction, KernelCopy, Result, Storage, align_down, is_aligned,
};

use crate::file::FileStorage;
use crate::open::{FileKind, retry};
use crate::sys;

/// Bytes per copy_file_range, so that cancelling does not wait for gigabytes.
const COPY_STEP: u64 = 128 << 20;

/// Whether an errno means that this method does not work between these files, but another may.
fn not_here(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::XDEV
            | Errno::OPNOTSUPP
            | Errno::INVAL
            | Errno::NOTTY
            | Errno::NOSYS
            | Errno::TXTBSY
            | Errno::PERM
            | Errno::BADF
            | Errno::ISDIR
            | Errno::OVERFLOW
    )
}

impl KernelCopy for FileStorage {
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        let CopyOp { to, source, from, len, method } = *op;
        self.check_writable()?;
        let Some(source_fd) = source.as_fd() else { return Ok(0) };
        if len == 0 || self.kind() == FileKind::BlockDevice || source.caps().device {
            return Ok(0);
        }
        self.end_of(IoAction::Copy, to, len)?;
        if from.checked_add(len).is_none() {
            return Ok(0);
        }
        let _range = self.hold_range(to.0, len);
        let _length = self.hold_length();
        let (done, ended) = match method {
            CopyMethod::Reflink => self.reflink(to.0, source, source_fd, from.0, len),
            CopyMethod::CopyFileRange => self.copy_in_kernel(to.0, source_fd, from.0, len),
        };
        if let Err(errno) = ended
            && !not_here(errno)
        {
            return Err(self.error(IoAction::Copy, to.0, len, errno));
        }
        Ok(done)
    }
}

impl FileStorage {
    /// Shares whole blocks, and a partial block at the end of the source.
    fn reflink(
        &self,
        to: u64,
        source: &dyn Storage,
        source_fd: BorrowedFd<'_>,
        from: u64,
        len: u64,
    ) -> (u64, Result<(), Errno>) {
        use std::os::fd::AsFd;
        let block = u64::from(self.caps().block_bytes).max(u64::from(source.caps().block_bytes));
        if !is_aligned(from | to, block) {
            return (0, Ok(()));
        }
        let target = self.file().as_fd();
        let clone =
            |skip, len| retry(|| sys::clone_range(target, to + skip, source_fd, from + skip, len));
        let whole = align_down(len, block);
        if whole > 0
            && let Err(errno) = clone(0, whole)
        {
            return (0, Err(errno));
        }
        let tail = len - whole;
        if tail == 0 || source.len().ok() != Some(from + len) {
            return (whole, Ok(()));
        }
        match clone(whole, tail) {
            Ok(()) => (len, Ok(())),
            Err(errno) => (whole, Err(errno)),
        }
    }

    fn copy_in_kernel(
        &self,
        to: u64,
        source_fd: BorrowedFd<'_>,
        from: u64,
        len: u64,
    ) -> (u64, Result<(), Errno>) {
        let mut done = 0;
        while done < len {
            let step = (len - done).min(COPY_STEP) as usize;
            let (mut read_at, mut write_at) = (from + done, to + done);
            let copied = retry(|| {
                rustix::fs::copy_file_range(
                    source_fd,
                    Some(&mut read_at),
                    self.file(),
                    Some(&mut write_at),
                    step,
                )
            });
            match copied {
                // End of the source, or a file system without real support (procfs, old FUSE).
                Ok(0) => break,
                Ok(n) => done += n as u64,
                Err(errno) => return (done, Err(errno)),
            }
        }
        (done, Ok(()))
    }
}
