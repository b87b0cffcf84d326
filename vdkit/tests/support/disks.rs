//! Simulated disks: they count, fail on demand, delay, and record changes for power cuts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vdkit_block::{HostOffset, ReadOp, ReadPaths, Result, Storage, StorageCaps, ZeroMode};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CountingStorage, CrashImage, CrashStorage, FaultyStorage, Rng};

/// The order of changes over several recording disks, as disk numbers.
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Mutex<Vec<usize>>>);

impl Timeline {
    /// Number of changes and syncs on all disks.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }
}

/// What holds the bytes.
#[derive(Clone, Debug)]
enum Bytes {
    Memory(Arc<MemoryStorage>),
    Recording { crash: Arc<CrashStorage>, number: usize, timeline: Timeline },
}

/// Passes requests on with random short delays, so that threads interleave in unusual orders.
/// Blocks changes of one thread on request, and records changes in the timeline.
#[derive(Debug)]
struct Bottom {
    bytes: Bytes,
    stumbles: AtomicBool,
    dice: AtomicU64,
    gate: Mutex<Gate>,
    opened: Condvar,
}

/// The thread whose changes are blocked, and whether it is waiting.
#[derive(Debug, Default)]
struct Gate {
    closed_to: Option<ThreadId>,
    waiting: bool,
}

impl Bottom {
    fn beneath(&self) -> &dyn Storage {
        match &self.bytes {
            Bytes::Memory(memory) => &**memory,
            Bytes::Recording { crash, .. } => &**crash,
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

    fn pass_gate(&self) {
        let mut gate = self.gate.lock();
        while gate.closed_to == Some(std::thread::current().id()) {
            gate.waiting = true;
            self.opened.wait(&mut gate);
        }
    }

    fn change(&self, change: impl FnOnce(&dyn Storage) -> Result<()>) -> Result<()> {
        self.stumble();
        self.pass_gate();
        let Bytes::Recording { crash, number, timeline } = &self.bytes else {
            return change(self.beneath());
        };
        // Changes of a recording disk are serialised to record their order.
        let mut order = timeline.0.lock();
        let before = crash.ops();
        let result = change(&**crash);
        order.extend((before..crash.ops()).map(|_| number));
        result
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
    faulty: Arc<FaultyStorage>,
    counting: Arc<CountingStorage>,
}

impl SimDisk {
    /// An in-memory disk with this content.
    pub fn new(content: MemoryStorage) -> Self {
        Self::over(Bytes::Memory(Arc::new(content)))
    }

    /// A disk with this durable content that records its changes as disk `number`.
    pub fn recording(content: &MemoryStorage, number: usize, timeline: &Timeline) -> Self {
        let crash = CrashStorage::holding(content);
        Self::over(Bytes::Recording { crash, number, timeline: timeline.clone() })
    }

    fn over(bytes: Bytes) -> Self {
        let (stumbles, dice) = (AtomicBool::new(false), AtomicU64::new(0));
        let (gate, opened) = (Mutex::default(), Condvar::new());
        let bottom = Arc::new(Bottom { bytes, stumbles, dice, gate, opened });
        let faulty = FaultyStorage::new(bottom.clone());
        let counting = CountingStorage::new(faulty.clone());
        Self { bottom, faulty, counting }
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

    /// Blocks further changes of this thread.
    pub fn close_gate_to_me(&self) {
        let closed_to = Some(std::thread::current().id());
        *self.bottom.gate.lock() = Gate { closed_to, waiting: false };
    }

    /// Whether a thread is blocked.
    pub fn held_up(&self) -> bool {
        self.bottom.gate.lock().waiting
    }

    /// Unblocks the thread.
    pub fn open_gate(&self) {
        *self.bottom.gate.lock() = Gate::default();
        self.bottom.opened.notify_all();
    }

    /// The current content.
    pub fn content(&self) -> MemoryStorage {
        match &self.bottom.bytes {
            Bytes::Memory(memory) => MemoryStorage::clone(memory),
            Bytes::Recording { crash, .. } => crash.crash_now().everything(),
        }
    }

    /// The disk after its first `ops` changes.
    fn crash_at(&self, ops: usize) -> CrashImage {
        match &self.bottom.bytes {
            Bytes::Recording { crash, .. } => crash.crash_at(ops),
            Bytes::Memory(_) => panic!("only a recording disk has a past"),
        }
    }
}

/// The power fails on all disks after the first `moment` changes of the timeline.
pub fn power_cut(disks: &[SimDisk], timeline: &Timeline, moment: usize) -> Vec<CrashImage> {
    let order = timeline.0.lock();
    let ops = |number| order[..moment].iter().filter(|n| **n == number).count();
    disks.iter().enumerate().map(|(number, disk)| disk.crash_at(ops(number))).collect()
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
        Survival::Extreme => {
            let n = rng.below(2 + 2 * cut.unsynced() as u64) as usize;
            cut.extremes().nth(n).expect("two of each change and two more").1
        }
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
