//! Memory storage that counts requests and injects failures.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use vdkit_block::{
    Error, HostOffset, IoAction, ReadOp, ReadPaths, Result, SpaceMap, Storage, StorageCaps,
    StorageExt, StorageExtent, ZeroMode,
};

/// Slow requests take up to three of these.
pub const STEP: Duration = Duration::from_micros(20);

#[derive(Debug, Default)]
pub struct Memory {
    name: String,
    bytes: Mutex<Vec<u8>>,
    pub reads: AtomicUsize,
    pub batches: AtomicUsize,
    pub writes: AtomicUsize,
    pub syncs: AtomicUsize,
    pub maps: AtomicUsize,
    /// Number of writes that succeed before one fails; negative: none fails.
    fail_in: AtomicI64,
    sparse: bool,
    slow: bool,
}

impl Memory {
    pub fn new(name: &str, bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_owned(),
            bytes: Mutex::new(bytes),
            fail_in: AtomicI64::new(-1),
            ..Self::default()
        }
    }

    /// Pages of zeroes count as holes.
    pub fn sparse(self) -> Self {
        Self { sparse: true, ..self }
    }

    /// Requests sleep before they access the bytes, so that those of several threads overlap. They
    /// do not yield: yielding could cost a whole time slice each time.
    pub fn slow(self) -> Self {
        Self { slow: true, ..self }
    }

    fn take_a_while(&self) {
        let steps = self.reads.load(Ordering::Relaxed) as u32 % 4;
        if self.slow && steps > 0 {
            std::thread::sleep(steps * STEP);
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    pub fn fail_in(&self, writes: i64) {
        self.fail_in.store(writes, Ordering::SeqCst);
    }

    pub fn reset_counts(&self) {
        for counter in [&self.reads, &self.batches, &self.writes, &self.syncs, &self.maps] {
            counter.store(0, Ordering::SeqCst);
        }
    }

    fn change(&self, offset: u64, len: u64, change: impl FnOnce(&mut [u8])) -> Result<()> {
        self.writes.fetch_add(1, Ordering::SeqCst);
        if self.fail_in.fetch_sub(1, Ordering::SeqCst) == 0 {
            let source = std::io::ErrorKind::StorageFull.into();
            return Err(Error::io(&self.name, IoAction::Write, offset, len, source));
        }
        self.take_a_while();
        let mut bytes = self.bytes.lock().unwrap();
        let end = (offset + len) as usize;
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        change(&mut bytes[offset as usize..end]);
        Ok(())
    }
}

impl Storage for Memory {
    fn name(&self) -> &str {
        &self.name
    }
    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: true, growable: true, ..StorageCaps::default() }
    }
    fn len(&self) -> Result<u64> {
        Ok(self.bytes.lock().unwrap().len() as u64)
    }
    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.take_a_while();
        let bytes = self.bytes.lock().unwrap();
        let from = (offset.0 as usize).min(bytes.len());
        let got = buf.len().min(bytes.len() - from);
        buf[..got].copy_from_slice(&bytes[from..from + got]);
        Ok(got)
    }
    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.change(offset.0, buf.len() as u64, |bytes| bytes.copy_from_slice(buf))
    }
    fn write_zeroes(&self, offset: HostOffset, len: u64, _mode: ZeroMode) -> Result<()> {
        self.change(offset.0, len, |bytes| bytes.fill(0))
    }
    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let end = (offset.0 + len).min(self.len()?);
        self.change(offset.0, end.saturating_sub(offset.0), |bytes| bytes.fill(0))
    }
    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.change(offset.0, len, |_| ())
    }
    fn sync(&self) -> Result<()> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
    fn set_len(&self, len: u64) -> Result<()> {
        self.bytes.lock().unwrap().resize(len as usize, 0);
        Ok(())
    }

    vdkit_block::capabilities!(space_map: SpaceMap, read_paths: ReadPaths);
}

impl SpaceMap for Memory {
    fn may_have_holes(&self) -> Result<bool> {
        Ok(self.sparse)
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        self.maps.fetch_add(1, Ordering::SeqCst);
        let bytes = self.bytes.lock().unwrap();
        let is_data = |at: u64| {
            let page = (at / 4096 * 4096) as usize;
            let end = (page + 4096).min(bytes.len());
            page < end && bytes[page..end].iter().any(|byte| *byte != 0)
        };
        let data = is_data(offset.0);
        let mut end = offset.0;
        while end < offset.0 + len && is_data(end) == data {
            end = (end / 4096 + 1) * 4096;
        }
        Ok(StorageExtent { data, len: end.min(offset.0 + len) - offset.0 })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }
}

impl ReadPaths for Memory {
    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        self.batches.fetch_add(1, Ordering::SeqCst);
        ops.iter_mut().try_for_each(|op| self.read_padded(op.buf, op.offset))
    }
}
