//! Sharing and copying blocks in the kernel.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{
    CopyMethod, CopyOp, IoAction, KernelCopy, Result, Storage, align_down, is_aligned,
};

use crate::file::FileStorage;
use crate::open::FileKind;
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
        // Before the locks: the source may be this file, or another thread may copy the other way,
        // and a file locks its length to report it.
        let to_end = method == CopyMethod::Reflink && source.len().ok() == Some(from.0 + len);
        let _range = self.hold_range(to.0, len);
        let _length = self.hold_length();
        let (done, ended) = match method {
            CopyMethod::Reflink => {
                let block = self.caps().block_bytes.max(source.caps().block_bytes);
                self.reflink(to.0, source_fd, from.0, len, block.into(), to_end)
            }
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
    /// Shares whole blocks, and a partial block if the range goes `to_end` of the source.
    fn reflink(
        &self,
        to: u64,
        source_fd: BorrowedFd<'_>,
        from: u64,
        len: u64,
        block: u64,
        to_end: bool,
    ) -> (u64, Result<(), Errno>) {
        if !is_aligned(from | to, block) {
            return (0, Ok(()));
        }
        let target = self.file().as_fd();
        let clone = |skip, len| {
            retry_on_intr(|| sys::clone_range(target, to + skip, source_fd, from + skip, len))
        };
        let whole = align_down(len, block);
        if whole > 0
            && let Err(errno) = clone(0, whole)
        {
            return (0, Err(errno));
        }
        let tail = len - whole;
        if tail == 0 || !to_end {
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
            let copied = retry_on_intr(|| {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use vdkit_block::{CacheMode, HostOffset, StorageLayer};

    use super::*;
    use crate::open::FileOptions;

    /// Notes whether a file's length is locked while it is asked for.
    #[derive(Debug)]
    struct Asked {
        file: Arc<FileStorage>,
        locked: AtomicBool,
    }

    impl StorageLayer for Asked {
        const INTERCEPTS: bool = false;

        fn inner(&self) -> &dyn Storage {
            &*self.file
        }

        fn len(&self) -> Result<u64> {
            self.locked.fetch_or(self.file.growth.try_write().is_none(), Ordering::SeqCst);
            self.file.len()
        }
    }

    /// A read lock within a read lock would wait for a thread that waits to resize the file.
    #[test]
    fn sharing_within_a_file_does_not_lock_its_length_twice() {
        let dir = tempfile::tempdir().unwrap();
        let options = FileOptions::read_write().cache(CacheMode::None);
        let file = Arc::new(FileStorage::create(dir.path().join("f"), &options).unwrap());
        file.write_at(&[1; 100], HostOffset(0)).unwrap();
        let asked = Asked { file: file.clone(), locked: AtomicBool::new(false) };
        let (to, from, method) = (HostOffset(1 << 20), HostOffset(0), CopyMethod::Reflink);
        file.copy_from(&CopyOp { to, source: &asked, from, len: 100, method }).unwrap();
        assert!(!asked.locked.into_inner());
    }
}
