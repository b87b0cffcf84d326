//! Simulated disks: they count, fail on demand, delay, and record changes for power cuts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vdkit_block::{
    CacheMode, HostOffset, ReadOp, ReadPaths, Result, Storage, StorageCaps, ZeroMode,
};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{
    CountingStorage, CrashClock, CrashImage, CrashStorage, FaultyStorage, GatedStorage, Rng,
};

/// What holds the bytes.
#[derive(Clone, Debug)]
enum Bytes {
    Memory(Arc<MemoryStorage>),
    Recording(Arc<CrashStorage>),
}

/// Passes requests on with random short delays, so that threads interleave in unusual orders.
#[derive(Debug)]
struct Bottom {
    bytes: Bytes,
    stumbles: AtomicBool,
    dice: AtomicU64,
}

impl Bottom {
    fn beneath(&self) -> &dyn Storage {
        match &self.bytes {
            Bytes::Memory(memory) => &**memory,
            Bytes::Recording(crash) => &**crash,
        }
    }

    fn stumble(&self) {
        if !self.stumbles.load(Ordering::Relaxed) {
            return;
        }
        let roll = Rng::new(self.dice.fetch_add(1, Ordering::Relaxed)).next_u64();
        match roll % 16 {
            0..=7 => {}
            8..=13 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(roll >> 8 & 127)),
        }
    }

    fn change(&self, change: impl FnOnce(&dyn Storage) -> Result<()>) -> Result<()> {
        self.stumble();
        change(self.beneath())
    }
}

impl vdkit_block::StorageLayer for Bottom {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        self.beneath()
    }

    /// Changes may be delayed.
    fn caps(&self) -> StorageCaps {
        StorageCaps { prompt_writes: false, ..self.beneath().caps() }
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        self.stumble();
        self.beneath().read_up_to(buf, offset)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.change(|inner| inner.write_at(buf, offset))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.change(|inner| inner.write_zeroes(offset, len, mode))
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.change(|inner| inner.discard(offset, len))
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.change(|inner| inner.allocate(offset, len))
    }

    fn sync(&self) -> Result<()> {
        self.change(|inner| inner.sync())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.change(|inner| inner.set_len(len))
    }

    vdkit_block::capabilities!(read_paths: ReadPaths);
}

impl ReadPaths for Bottom {
    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        self.stumble();
        self.beneath().read_batch(ops)
    }
}

/// One disk with all its wrappers.
#[derive(Clone, Debug)]
pub struct SimDisk {
    bottom: Arc<Bottom>,
    gated: Arc<GatedStorage>,
    faulty: Arc<FaultyStorage>,
    counting: Arc<CountingStorage>,
}

impl SimDisk {
    /// An in-memory disk with this content.
    pub fn new(content: MemoryStorage) -> Self {
        Self::over(Bytes::Memory(Arc::new(content)))
    }

    /// A disk with this durable content that records its changes, in one order with those of other disks
    /// on the clock.
    pub fn recording(content: &MemoryStorage, clock: &CrashClock) -> Self {
        let crash = CrashStorage::holding_in(content, CacheMode::Writeback, clock);
        Self::over(Bytes::Recording(crash))
    }

    fn over(bytes: Bytes) -> Self {
        let (stumbles, dice) = (AtomicBool::new(false), AtomicU64::new(0));
        let bottom = Arc::new(Bottom { bytes, stumbles, dice });
        let gated = GatedStorage::new(bottom.clone());
        let faulty = FaultyStorage::new(gated.clone());
        let counting = CountingStorage::new(faulty.clone());
        Self { bottom, gated, faulty, counting }
    }

    /// The disk's storage.
    pub fn storage(&self) -> Arc<dyn Storage> {
        self.counting.clone()
    }

    /// The fault injector.
    pub fn faulty(&self) -> &FaultyStorage {
        &self.faulty
    }

    /// The counters.
    pub fn counting(&self) -> &CountingStorage {
        &self.counting
    }

    /// Enables random delays.
    pub fn stumble(&self, on: bool) {
        self.bottom.stumbles.store(on, Ordering::Relaxed);
    }

    /// Holds calls of chosen threads and kinds.
    pub fn gated(&self) -> &GatedStorage {
        &self.gated
    }

    /// The current content.
    pub fn content(&self) -> MemoryStorage {
        match &self.bottom.bytes {
            Bytes::Memory(memory) => MemoryStorage::clone(memory),
            Bytes::Recording(crash) => crash.crash_now().everything(),
        }
    }
}

/// The power fails on all disks after the first `moment` changes on their clock.
pub fn power_cut(disks: &[SimDisk], moment: usize) -> Vec<CrashImage> {
    let cut = |disk: &SimDisk| match &disk.bottom.bytes {
        Bytes::Recording(crash) => crash.crash_at_tick(moment),
        Bytes::Memory(_) => panic!("only a recording disk has a past"),
    };
    disks.iter().map(cut).collect()
}

/// Which unsynced changes survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    Nothing,
    Everything,
    /// One change alone, or all but one.
    Extreme,
    /// Each sector at random.
    Lot,
}

impl Survival {
    /// Each, those with chance twice.
    pub const SOME: [Self; 6] =
        [Self::Nothing, Self::Everything, Self::Extreme, Self::Extreme, Self::Lot, Self::Lot];
}

/// One possible survivor of each disk.
pub fn survivors(cuts: &[CrashImage], survival: Survival, rng: &mut Rng) -> Vec<MemoryStorage> {
    let one = |cut: &CrashImage, rng: &mut Rng| match survival {
        Survival::Nothing => cut.only_durable(),
        Survival::Everything => cut.everything(),
        Survival::Lot => cut.survivor(rng),
        Survival::Extreme => cut.extreme(rng.below(cut.extremes_count() as u64) as usize).1,
    };
    cuts.iter().map(|cut| one(cut, rng)).collect()
}

/// Loads a file as a disk's content.
pub fn load(path: &std::path::Path) -> MemoryStorage {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let bytes = std::fs::read(path).expect("a file that was made");
    let memory = MemoryStorage::with_len(name, bytes.len() as u64);
    for (i, chunk) in bytes.chunks(4096).enumerate() {
        if chunk.iter().any(|b| *b != 0) {
            memory.write_at(chunk, HostOffset(i as u64 * 4096)).expect("memory");
        }
    }
    memory
}
