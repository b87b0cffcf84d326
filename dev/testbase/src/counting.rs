//! A storage that counts what is asked of it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use vdkit_block::{
    CopyMethod, HostOffset, InitialWrites, KernelCopy, ReadOp, ReadPaths, Result, SpaceMap,
    Storage, StorageExtent, ZeroMode,
};

/// How often what was asked; see [`CountingStorage::counts`].
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

/// One call, as it was asked.
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

#[derive(Debug, Default)]
struct Cells {
    reads: AtomicU64,
    bytes_read: AtomicU64,
    read_batches: AtomicU64,
    writes: AtomicU64,
    bytes_written: AtomicU64,
    zeroes: AtomicU64,
    bytes_zeroed: AtomicU64,
    discards: AtomicU64,
    allocates: AtomicU64,
    syncs: AtomicU64,
    set_lens: AtomicU64,
    lens: AtomicU64,
    extents: AtomicU64,
    bytes_copied: AtomicU64,
}

/// Passes everything on to another storage and counts it. Failed calls count too.
#[derive(Debug)]
pub struct CountingStorage {
    inner: Arc<dyn Storage>,
    cells: Cells,
    logging: AtomicBool,
    log: Mutex<Vec<LoggedOp>>,
}

fn add(cell: &AtomicU64, n: u64) {
    cell.fetch_add(n, Ordering::Relaxed);
}

impl CountingStorage {
    /// Counts what is asked of `inner`.
    pub fn new(inner: Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            cells: Cells::default(),
            logging: AtomicBool::new(false),
            log: Mutex::default(),
        })
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let get = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let c = &self.cells;
        Counts {
            reads: get(&c.reads),
            bytes_read: get(&c.bytes_read),
            read_batches: get(&c.read_batches),
            writes: get(&c.writes),
            bytes_written: get(&c.bytes_written),
            zeroes: get(&c.zeroes),
            bytes_zeroed: get(&c.bytes_zeroed),
            discards: get(&c.discards),
            allocates: get(&c.allocates),
            syncs: get(&c.syncs),
            set_lens: get(&c.set_lens),
            lens: get(&c.lens),
            extents: get(&c.extents),
            bytes_copied: get(&c.bytes_copied),
        }
    }

    /// Begins again at 0, and forgets the log.
    pub fn reset(&self) {
        let c = &self.cells;
        for cell in [
            &c.reads,
            &c.bytes_read,
            &c.read_batches,
            &c.writes,
            &c.bytes_written,
            &c.zeroes,
            &c.bytes_zeroed,
            &c.discards,
            &c.allocates,
            &c.syncs,
            &c.set_lens,
            &c.lens,
            &c.extents,
            &c.bytes_copied,
        ] {
            cell.store(0, Ordering::Relaxed);
        }
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

    /// What is counted.
    pub fn inner(&self) -> &Arc<dyn Storage> {
        &self.inner
    }

    fn note(&self, op: LoggedOp) {
        if self.logging.load(Ordering::Relaxed) {
            self.log.lock().push(op);
        }
    }

    fn note_read(&self, offset: HostOffset, len: usize) {
        add(&self.cells.reads, 1);
        add(&self.cells.bytes_read, len as u64);
        self.note(LoggedOp::Read(offset.0, len as u64));
    }

    fn note_write(&self, offset: HostOffset, len: usize) {
        add(&self.cells.writes, 1);
        add(&self.cells.bytes_written, len as u64);
        self.note(LoggedOp::Write(offset.0, len as u64));
    }
}

impl vdkit_block::StorageLayer for CountingStorage {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn len(&self) -> Result<u64> {
        add(&self.cells.lens, 1);
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
        add(&self.cells.zeroes, 1);
        add(&self.cells.bytes_zeroed, len);
        self.note(LoggedOp::Zero(offset.0, len));
        self.inner.write_zeroes(offset, len, mode)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        add(&self.cells.discards, 1);
        self.note(LoggedOp::Discard(offset.0, len));
        self.inner.discard(offset, len)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        add(&self.cells.allocates, 1);
        self.note(LoggedOp::Allocate(offset.0, len));
        self.inner.allocate(offset, len)
    }

    fn sync(&self) -> Result<()> {
        add(&self.cells.syncs, 1);
        self.note(LoggedOp::Sync);
        self.inner.sync()
    }

    fn set_len(&self, len: u64) -> Result<()> {
        add(&self.cells.set_lens, 1);
        self.note(LoggedOp::SetLen(len));
        self.inner.set_len(len)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.as_fd()
    }

    fn space_map(&self) -> Option<&dyn SpaceMap> {
        Some(self)
    }

    fn read_paths(&self) -> Option<&dyn ReadPaths> {
        Some(self)
    }

    fn initial_writes(&self) -> Option<&dyn InitialWrites> {
        Some(self)
    }

    fn kernel_copy(&self) -> Option<&dyn KernelCopy> {
        Some(self)
    }
}

impl SpaceMap for CountingStorage {
    fn may_have_holes(&self) -> Result<bool> {
        self.inner.may_have_holes()
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        add(&self.cells.extents, 1);
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
        add(&self.cells.read_batches, 1);
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
    fn copy_from(
        &self,
        to: HostOffset,
        source: &dyn Storage,
        from: HostOffset,
        len: u64,
        method: CopyMethod,
    ) -> Result<u64> {
        let copied = self.inner.copy_from(to, source, from, len, method)?;
        add(&self.cells.bytes_copied, copied);
        self.note(LoggedOp::Copy(to.0, copied));
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
