//! A storage that counts calls and bytes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vdkit_block::{
    CopyOp, HostOffset, InitialWrites, KernelCopy, ReadOp, ReadPaths, Result, SpaceMap, Storage,
    StorageExtent, ZeroMode,
};

/// Numbers of calls and bytes; see [`CountingStorage::counts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads, each of a batch counted.
    pub reads: u64,
    /// Bytes asked for by reads.
    pub bytes_read: u64,
    /// Calls of `read_batch`.
    pub read_batches: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Calls of `write_zeroes`.
    pub zeroes: u64,
    /// Bytes made zero.
    pub bytes_zeroed: u64,
    /// Calls of `discard`.
    pub discards: u64,
    /// Calls of `allocate`.
    pub allocates: u64,
    /// Calls of `sync`.
    pub syncs: u64,
    /// Calls of `set_len`.
    pub set_lens: u64,
    /// Calls of `len`.
    pub lens: u64,
    /// Calls of `extent_at`.
    pub extents: u64,
    /// Bytes that `copy_from` moved into this storage.
    pub bytes_copied: u64,
}

/// One call and its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedOp {
    /// A read: offset and bytes.
    Read(u64, u64),
    /// A write: offset and bytes.
    Write(u64, u64),
    /// Zeroes: offset and bytes.
    Zero(u64, u64),
    /// Space given back: offset and bytes.
    Discard(u64, u64),
    /// Space allocated: offset and bytes.
    Allocate(u64, u64),
    /// A sync.
    Sync,
    /// A new length in bytes.
    SetLen(u64),
    /// Bytes copied in the kernel: offset here and bytes moved.
    Copy(u64, u64),
}

/// Passes all calls on to another storage and counts them. Failed calls count too.
#[derive(Debug)]
pub struct CountingStorage {
    inner: Arc<dyn Storage>,
    counts: Mutex<Counts>,
    logging: AtomicBool,
    log: Mutex<Vec<LoggedOp>>,
}

impl CountingStorage {
    /// Counts the calls of `inner`.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            counts: Mutex::default(),
            logging: AtomicBool::new(false),
            log: Mutex::default(),
        })
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    /// Begins again at 0, and forgets the log.
    pub fn reset(&self) {
        *self.counts.lock() = Counts::default();
        self.log.lock().clear();
    }

    /// Switches the log of calls on or off.
    pub fn log_calls(&self, on: bool) {
        self.logging.store(on, Ordering::Relaxed);
    }

    /// Takes the log of calls since it was switched on or last taken, in the order of their
    /// beginnings.
    pub fn take_log(&self) -> Vec<LoggedOp> {
        std::mem::take(&mut self.log.lock())
    }

    /// The storage beneath.
    pub fn inner(&self) -> &Arc<dyn Storage> {
        &self.inner
    }

    fn count(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut self.counts.lock());
    }

    fn note(&self, op: LoggedOp) {
        if self.logging.load(Ordering::Relaxed) {
            self.log.lock().push(op);
        }
    }

    fn note_read(&self, offset: HostOffset, len: usize) {
        self.count(|counts| {
            counts.reads += 1;
            counts.bytes_read += len as u64;
        });
        self.note(LoggedOp::Read(offset.0, len as u64));
    }

    fn note_write(&self, offset: HostOffset, len: usize) {
        self.count(|counts| {
            counts.writes += 1;
            counts.bytes_written += len as u64;
        });
        self.note(LoggedOp::Write(offset.0, len as u64));
    }
}

impl vdkit_block::StorageLayer for CountingStorage {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn len(&self) -> Result<u64> {
        self.count(|counts| counts.lens += 1);
        self.inner.len()
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.note_read(offset, buf.len());
        self.inner.read_up_to(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.note_write(offset, buf.len());
        self.inner.write_at(buf, offset)
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.count(|counts| {
            counts.zeroes += 1;
            counts.bytes_zeroed += len;
        });
        self.note(LoggedOp::Zero(offset.0, len));
        self.inner.write_zeroes(offset, len, mode)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.count(|counts| counts.discards += 1);
        self.note(LoggedOp::Discard(offset.0, len));
        self.inner.discard(offset, len)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.count(|counts| counts.allocates += 1);
        self.note(LoggedOp::Allocate(offset.0, len));
        self.inner.allocate(offset, len)
    }

    fn sync(&self) -> Result<()> {
        self.count(|counts| counts.syncs += 1);
        self.note(LoggedOp::Sync);
        self.inner.sync()
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.count(|counts| counts.set_lens += 1);
        self.note(LoggedOp::SetLen(len));
        self.inner.set_len(len)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }

    vdkit_block::capabilities! {
        space_map: SpaceMap, read_paths: ReadPaths, initial_writes: InitialWrites,
        kernel_copy: KernelCopy
    }
}

impl SpaceMap for CountingStorage {
    fn may_have_holes(&self) -> Result<bool> {
        self.inner.may_have_holes()
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        self.count(|counts| counts.extents += 1);
        self.inner.extent_at(offset, len)
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }
}

impl ReadPaths for CountingStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        let ready = self.inner.read_ready(buf, offset)?;
        if ready {
            self.note_read(offset, buf.len());
        }
        Ok(ready)
    }

    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        self.count(|counts| counts.read_batches += 1);
        for op in ops.iter() {
            self.note_read(op.offset, op.buf.len());
        }
        self.inner.read_batch(ops)
    }

    fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.note_read(offset, len as usize);
        self.inner.read_discard(offset, len)
    }
}

impl InitialWrites for CountingStorage {
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.note_write(offset, buf.len());
        self.inner.write_new(buf, offset)
    }
}

impl KernelCopy for CountingStorage {
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        let copied = self.inner.copy_from(op)?;
        self.count(|counts| counts.bytes_copied += copied);
        self.note(LoggedOp::Copy(op.to.0, copied));
        Ok(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_storage::MemoryStorage;

    #[test]
    fn each_call_counts_and_is_logged_on_request() {
        let storage = CountingStorage::new(Arc::new(MemoryStorage::new("m")));
        storage.write_at(&[1; 10], HostOffset(0)).unwrap();
        storage.log_calls(true);
        storage.write_at(&[1; 20], HostOffset(5)).unwrap();
        storage.write_zeroes(HostOffset(1), 2, ZeroMode::MayUnmap).unwrap();
        storage.sync().unwrap();
        let (mut a, mut b) = ([0; 3], [0; 4]);
        storage
            .read_batch(&mut [
                ReadOp { offset: HostOffset(0), buf: &mut a },
                ReadOp { offset: HostOffset(3), buf: &mut b },
            ])
            .unwrap();
        assert_eq!(a, [1, 0, 0]);
        storage.set_len(0).unwrap();
        let counts = storage.counts();
        assert_eq!((counts.writes, counts.bytes_written), (2, 30));
        assert_eq!((counts.reads, counts.bytes_read, counts.read_batches), (2, 7, 1));
        assert_eq!((counts.zeroes, counts.bytes_zeroed), (1, 2));
        assert_eq!((counts.syncs, counts.set_lens), (1, 1));
        assert_eq!(
            storage.take_log(),
            [
                LoggedOp::Write(5, 20),
                LoggedOp::Zero(1, 2),
                LoggedOp::Sync,
                LoggedOp::Read(0, 3),
                LoggedOp::Read(3, 4),
                LoggedOp::SetLen(0),
            ]
        );
        storage.reset();
        assert_eq!(storage.counts(), Counts::default());
    }
}
