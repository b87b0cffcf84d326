//! A storage that counts its writes, and fails when the job is cancelled.
//!
//! Creating a preallocated image is one call of its format and may take minutes. The format cannot
//! be cancelled itself; its storage can.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{
    CancelToken, CopyMethod, HostOffset, ReadOp, Result, Storage, StorageCaps, StorageExtent,
    ZeroMode,
};

/// Wraps a storage and checks the cancel token before each change.
#[derive(Debug)]
pub(crate) struct CancellableStorage {
    inner: Arc<dyn Storage>,
    cancel: CancelToken,
    written: Arc<AtomicU64>,
}

impl CancellableStorage {
    /// Wraps a storage; written bytes are added to `written`.
    pub(crate) fn new(
        inner: Arc<dyn Storage>,
        cancel: CancelToken,
        written: Arc<AtomicU64>,
    ) -> Self {
        Self { inner, cancel, written }
    }
}

impl Storage for CancellableStorage {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn caps(&self) -> StorageCaps {
        self.inner.caps()
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.inner.read_up_to(buf, offset)
    }

    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        self.inner.read_batch(ops)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.cancel.check()?;
        self.inner.write_at(buf, offset)?;
        self.written.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.cancel.check()?;
        self.inner.write_zeroes(offset, len, mode)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.cancel.check()?;
        self.inner.discard(offset, len)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.cancel.check()?;
        self.inner.allocate(offset, len)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.cancel.check()?;
        self.inner.set_len(len)
    }

    fn may_have_holes(&self) -> Result<bool> {
        self.inner.may_have_holes()
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        self.inner.extent_at(offset, len)
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }

    fn copy_from(
        &self,
        to: HostOffset,
        source: &dyn Storage,
        from: HostOffset,
        len: u64,
        method: CopyMethod,
    ) -> Result<u64> {
        self.cancel.check()?;
        self.inner.copy_from(to, source, from, len, method)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }
}
