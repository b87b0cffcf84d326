//! A storage that counts its writes, and fails when the job is cancelled.
//!
//! Creating a preallocated image is one call of its format and may take minutes. The format cannot
//! be cancelled itself; its storage can.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{
    CancelToken, CopyOp, HostOffset, InitialWrites, KernelCopy, ReadPaths, Result, Storage,
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

impl vdkit_block::StorageLayer for CancellableStorage {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
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

    fn set_len(&self, len: u64) -> Result<()> {
        self.cancel.check()?;
        self.inner.set_len(len)
    }

    // Neither a descriptor nor reads change the storage.
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }

    fn read_paths(&self) -> Option<&dyn ReadPaths> {
        self.inner.read_paths()
    }

    vdkit_block::capabilities!(initial_writes: InitialWrites, kernel_copy: KernelCopy);
}

impl InitialWrites for CancellableStorage {
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.cancel.check()?;
        self.inner.write_new(buf, offset)?;
        self.written.fetch_add(buf.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl KernelCopy for CancellableStorage {
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        self.cancel.check()?;
        self.inner.copy_from(op)
    }
}

#[cfg(test)]
mod tests {
    use vdkit_block::{CopyMethod, Error};
    use vdkit_storage::MemoryStorage;

    use super::*;

    #[test]
    fn nothing_changes_after_a_cancel_by_whatever_method() {
        let bytes: Vec<u8> = (0..=255).collect();
        let memory = Arc::new(MemoryStorage::from_bytes("m", &bytes));
        let (cancel, written) = (CancelToken::default(), Arc::new(AtomicU64::new(0)));
        let storage: Arc<dyn Storage> =
            Arc::new(CancellableStorage::new(memory.clone(), cancel.clone(), written.clone()));
        storage.write_at(&[0, 1], HostOffset(0)).unwrap();
        storage.write_new(&[2], HostOffset(2)).unwrap();
        assert_eq!(written.load(Ordering::Relaxed), 3);
        cancel.cancel();
        let at = HostOffset(0);
        let source = &MemoryStorage::from_bytes("s", &[9; 256]);
        let copy = CopyOp { to: at, source, from: at, len: 9, method: CopyMethod::Reflink };
        for (what, result) in [
            ("write_at", storage.write_at(&[9], at)),
            ("write_new", storage.write_new(&[9], at)),
            ("write_zeroes", storage.write_zeroes(at, 9, ZeroMode::MayUnmap)),
            ("discard", storage.discard(at, 9)),
            ("forget", storage.forget(at, 9)),
            ("allocate", storage.allocate(at, 999)),
            ("set_len", storage.set_len(9)),
            ("copy_from", storage.copy_from(&copy).map(drop)),
        ] {
            assert!(matches!(result, Err(Error::Interrupted)), "{what}: {result:?}");
        }
        let mut found = vec![0; 256];
        storage.read_at(&mut found, at).unwrap();
        assert!(found == bytes && storage.len().unwrap() == 256);
        assert_eq!(written.load(Ordering::Relaxed), 3);
    }
}
