//! Several reads of one file.
//!
//! Measured with 64 reads a batch at random offsets of a 1 GiB file on a virtio disk (ext4, Linux
//! 6.18, 2 cores), one by one against io_uring:
//!
//! | reads of | page cache, cold | O_DIRECT | page cache, hot | tmpfs |
//! |---|---|---|---|---|
//! | 4 KiB | 14k/s, 45k/s | 13k/s, 54k/s | 905k/s, 848k/s | 920k/s, 319k/s |
//! | 64 KiB | 5k/s, 13k/s | 7.5k/s, 16k/s | 105k/s, 102k/s | 108k/s, 80k/s |
//!
//! So what has to come from the disk goes through io_uring, and what the page cache has is copied
//! at once (RWF_NOWAIT says which). tmpfs cannot answer without waiting, so io_uring would hand
//! each read to a kernel thread: it is read one by one.

use rustix::io::{Errno, ReadWriteFlags};
use vdkit_block::{HostOffset, IoAction, ReadOp, Result, Storage};

use crate::file::{FileStorage, within_offsets};
use crate::open::retry;
use crate::ring::{self, Read};

impl FileStorage {
    pub(crate) fn read_many(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        if ops.len() < 2 || self.reads_never_wait() {
            return ops.iter_mut().try_for_each(|op| self.read_padded(op.buf, op.offset));
        }
        let mut reads = Vec::new();
        for op in ops {
            if !self.fits_ring(op) {
                // Through a bounce buffer, or too long to gain from company.
                self.read_padded(op.buf, op.offset)?;
                continue;
            }
            let cached = if self.is_direct() { 0 } else { self.read_cached(op)? };
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

    /// Copies what the page cache has, from the front; gives how many bytes.
    fn read_cached(&self, op: &mut ReadOp<'_>) -> Result<usize> {
        let len = op.buf.len() as u64;
        let mut parts = [std::io::IoSliceMut::new(op.buf)];
        let flags = ReadWriteFlags::NOWAIT;
        match retry(|| rustix::io::preadv2(self.file(), &mut parts, op.offset.0, flags)) {
            Ok(n) => Ok(n),
            // Not there, or the file system cannot tell.
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(0),
            Err(errno) => Err(self.error(IoAction::Read, op.offset.0, len, errno)),
        }
    }

    /// Reads what is left: after a short read, at the end of the file, or where io_uring did not
    /// serve it. A refusal is repeated by a plain read, which says whether it is meant.
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
