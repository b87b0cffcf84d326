//! Several reads of one file.
//!
//! Reads from a disk go through io_uring. Reads of cached pages are faster as plain copies
//! (RWF_NOWAIT shows which are). tmpfs does not support RWF_NOWAIT, so io_uring would hand each read to
//! a kernel thread: its reads are done one by one.

use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use vdkit_block::{HostOffset, IoAction, ReadOp, Result, StorageExt};

use crate::file::{FileStorage, within_offsets};
use crate::ring::{self, Read};

impl FileStorage {
    pub(crate) fn read_many(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        if ops.len() < 2 || self.in_memory {
            return ops.iter_mut().try_for_each(|op| self.read_padded(op.buf, op.offset));
        }
        let mut reads = Vec::new();
        for op in ops {
            if !self.fits_ring(op) {
                // Needs a bounce buffer, or too long to gain from batching.
                self.read_padded(op.buf, op.offset)?;
                continue;
            }
            let cached = if self.direct.is_some() { 0 } else { self.read_cached(op)? };
            if cached < op.buf.len() {
                let offset = op.offset.0 + cached as u64;
                reads.push(Read { offset, buf: &mut op.buf[cached..], outcome: Ok(0) });
            }
        }
        if reads.len() > 1 {
            ring::read_all(self.file(), &mut reads);
        }
        reads.into_iter().try_for_each(|read| self.finish(read))
    }

    /// Copies cached bytes from the front and returns their number.
    fn read_cached(&self, op: &mut ReadOp<'_>) -> Result<usize> {
        let len = op.buf.len() as u64;
        let mut parts = [std::io::IoSliceMut::new(op.buf)];
        let flags = ReadWriteFlags::NOWAIT;
        match retry_on_intr(|| rustix::io::preadv2(self.file(), &mut parts, op.offset.0, flags)) {
            Ok(n) => Ok(n),
            // Not cached, or unknown to the file system.
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(0),
            Err(errno) => Err(self.error(IoAction::Read, op.offset.0, len, errno)),
        }
    }

    /// Reads the rest: after a short read, at the end of the file, or if io_uring did not serve it.
    /// A refused read is repeated as a plain read, which returns the real error.
    fn finish(&self, read: Read<'_>) -> Result<()> {
        let done = read.outcome.unwrap_or(0);
        if done >= read.buf.len() {
            return Ok(());
        }
        self.read_padded(&mut read.buf[done..], HostOffset(read.offset + done as u64))
    }

    fn fits_ring(&self, op: &mut ReadOp<'_>) -> bool {
        let len = op.buf.len();
        len <= ring::READ_BYTES_MAX
            && within_offsets(op.buf, op.offset.0).len() == len
            && self.fits_device(op.buf.as_ptr(), op.offset.0, len)
    }
}
