//! Tests that every writable format must pass: random operations against a model, power cuts, failing
//! storages, threads. A format's own tests choose the images, and test what is special about the
//! format.
//!
//! All functions panic if a guarantee is broken, and print the seed.

mod beside;
mod faults;
mod oracle;
mod promised;
mod resizes;
mod threads;

pub use faults::FaultScript;
pub use oracle::Oracle;
pub use promised::{Promised, cut_in_each_step};
pub use resizes::{Cut, Resizes};
pub use threads::OwnUnits;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use vdkit_block::{
    CheckReport, CompactOptions, CompactReport, CreateRequest, FormatDriver, GuestOffset,
    HostOffset, ImageInfo, Limits, OfflineImage, OpenRequest, Options, Repair, Result, Secret,
    SpaceMap, Storage, StorageExt, StorageExtent, ZeroMode,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;

use crate::{
    CountingStorage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng, first_difference,
    processor_time, read_all,
};

const SECTOR: u64 = 512;

/// Small, so that pieces of the map are dropped and read again.
fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.cache_bytes = 64 << 10;
    limits
}

/// That of images that are encrypted.
fn key() -> Secret {
    Secret::new(b"trial".to_vec())
}

/// Images of one kind.
#[derive(Clone, Copy, Debug)]
pub struct Trial {
    /// The format.
    pub driver: &'static dyn FormatDriver,
    /// Its options, as for `-o`. Where they ask for encryption, there is a key.
    pub options: &'static str,
    /// Bytes of the guest disk when it is made.
    pub guest_bytes: u64,
    /// Bytes of the largest write.
    pub write_bytes_max: u64,
    /// It can be resized.
    pub resizes: bool,
}

/// One change.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64, u64),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Flush,
    Reopen,
    Resize(u64),
}

/// Bytes that tell the operation and the place; never zero.
pub(crate) fn pattern(op: u64, at: u64, len: u64) -> Vec<u8> {
    (at..at + len)
        .map(|n| ((n / SECTOR).wrapping_mul(31) ^ n ^ op.wrapping_mul(97)) as u8 | 1)
        .collect()
}

impl Trial {
    /// Images that can be resized, with writes of at most 1 MiB.
    pub const fn new(
        driver: &'static dyn FormatDriver,
        options: &'static str,
        guest_bytes: u64,
    ) -> Self {
        Self { driver, options, guest_bytes, write_bytes_max: 1 << 20, resizes: true }
    }

    fn options(&self) -> Options {
        let specs = self.driver.options();
        let options = Options::parse(self.driver.name(), specs, [self.options]);
        let mut options = options.expect("good options");
        if self.driver.encrypts(&options) {
            options.set_key(Some(key()));
        }
        options
    }

    /// Makes an image.
    pub fn create(&self, storage: &Arc<dyn Storage>) {
        let request = CreateRequest::new(storage.clone(), self.guest_bytes, self.options());
        self.driver.create(&request).expect("creating");
    }

    /// A new image in memory.
    pub fn image(&self) -> MemoryStorage {
        let memory = Arc::new(MemoryStorage::new("image"));
        self.create(&(memory.clone() as Arc<dyn Storage>));
        MemoryStorage::clone(&memory)
    }

    /// Opens an image alone.
    ///
    /// # Errors
    /// What the driver returns.
    pub fn open(&self, storage: &Arc<dyn Storage>, writable: bool) -> Result<Disk> {
        let request =
            OpenRequest { storage: storage.clone(), files: Vec::new(), writable, limits: limits() };
        let format = self.driver.open_with_keys(request, &[key()])?;
        let info = ImageInfo::new(self.driver.name(), format.guest_bytes());
        let options = OpenOptions::default().writable(writable);
        Ok(Disk::from_format(format, info, &options))
    }

    /// What the check says.
    pub fn check(&self, storage: &Arc<dyn Storage>, repair: Repair) -> CheckReport {
        let image = OfflineImage { limits: limits(), ..OfflineImage::new(storage) };
        self.driver.check(&image, repair).expect("checking a readable image")
    }

    /// Damage and leaks that a check finds.
    pub fn found(&self, storage: &Arc<dyn Storage>, repair: Repair) -> (u64, u64) {
        let report = self.check(storage, repair);
        (report.corruptions, report.leaks)
    }

    /// The guest content of an image.
    pub fn content(&self, storage: &Arc<dyn Storage>) -> Vec<u8> {
        read_all(&self.open(storage, false).expect("opening"))
    }

    /// A new image with data in its blocks 5, 1, 6 and 2, of so many bytes, written in this order.
    pub fn written(&self, block_bytes: u64) -> Arc<dyn Storage> {
        let storage: Arc<dyn Storage> = Arc::new(self.image());
        let disk = self.open(&storage, true).expect("opening");
        for block in [5, 1, 6, 2] {
            let bytes = vec![block as u8 + 1; 700_000];
            disk.write_at(&bytes, GuestOffset(block * block_bytes + 1000)).expect("writing");
        }
        disk.close().expect("closing");
        storage
    }

    /// Compacts a copy of an image. A power cut at any moment leaves its content, and nothing but
    /// leaks, which a repair frees.
    pub fn cut_in_compaction(&self, image: &dyn Storage) -> CompactReport {
        let crash = CrashStorage::holding(image);
        let storage: Arc<dyn Storage> = crash.clone();
        let before = self.content(&storage);
        let holds = |storage: &Arc<dyn Storage>, what: &str| {
            assert!(self.content(storage) == before, "{what}: other content");
        };
        let compaction = self.driver.compaction().expect("a format that is compacted");
        let options = CompactOptions::default().zero_scan(true);
        let report = compaction.compact(&OfflineImage::new(&storage), options).expect("compacting");
        holds(&storage, "compacted");
        self.audit(&storage, true, "compacted");
        let mut rng = Rng::new(4);
        crash.for_each_crash(|ops, image| {
            let what = format!("after {ops} changes");
            for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
                let storage: Arc<dyn Storage> = Arc::new(survivor);
                self.audit(&storage, false, &what);
                holds(&storage, &what);
                self.check(&storage, Repair::Leaks);
                self.audit(&storage, true, &what);
                holds(&storage, &format!("{what}, repaired"));
            }
        });
        report
    }

    /// Describes, opens, reads and repairs an image that may hold anything: without a panic, and in bounded time.
    pub fn survive(&self, storage: &Arc<dyn Storage>, what: &str) {
        let start = processor_time();
        let mut limits = Limits::default();
        limits.check_bytes_max = 32 << 20;
        let _ = self.driver.describe(storage, &limits);
        if let Ok(disk) = self.open(storage, false) {
            let bytes = disk.guest_bytes();
            for at in [0, 1 << 20, bytes / 2, bytes.saturating_sub(4096)] {
                let _ = disk.read_at(&mut [0; 4096], GuestOffset(at.min(bytes)));
            }
        }
        let image = OfflineImage { limits, ..OfflineImage::new(storage) };
        let _ = self.driver.check(&image, Repair::All);
        let took = processor_time() - start;
        assert!(took < Duration::from_secs(5), "{what} took {took:?}");
    }

    fn random(&self, rng: &mut Rng, guest_bytes: u64) -> Step {
        let most = match rng.below(4) {
            0 => self.write_bytes_max,
            1 => 64 << 10,
            _ => 4096,
        };
        let mut at = rng.below(guest_bytes.max(1));
        let mut len = 1 + rng.below(most);
        if rng.chance(1, 2) {
            at &= !(SECTOR - 1);
            len = len.next_multiple_of(SECTOR);
        }
        let len = len.min(guest_bytes - at);
        match rng.below(20) {
            0 => Step::Flush,
            1 => Step::Reopen,
            2 if self.resizes => {
                let step = 1 + rng.below(self.guest_bytes / SECTOR);
                Step::Resize(step.next_multiple_of(8) * SECTOR)
            }
            3..=5 => Step::Zero(at, len, rng.chance(1, 2)),
            6..=8 => Step::Discard(at, len),
            _ => Step::Write(at, len),
        }
    }

    /// Random operations, each kind of them, then everything is compared and checked.
    pub fn model(&self, seed: u64, steps: u64) {
        let storage: Arc<dyn Storage> = Arc::new(self.image());
        let mut rng = Rng::new(seed);
        let mut disk = self.open(&storage, true).expect("opening");
        let guest = MemoryStorage::with_len("guest", disk.guest_bytes());
        for op in 0..steps {
            let bytes = disk.guest_bytes();
            let step = self.random(&mut rng, bytes);
            let what =
                format!("{} {:?} seed {seed} step {op} {step:?}", self.driver.name(), self.options);
            match step {
                Step::Reopen => {
                    disk.close().expect(&what);
                    self.audit(&storage, true, &what);
                    disk = self.open(&storage, true).expect(&what);
                }
                Step::Resize(to) => {
                    disk.flush().expect(&what);
                    disk.top().resize(to).expect(&what);
                    let now = disk.top().guest_bytes();
                    guest.set_len(now.min(bytes)).expect("memory");
                    guest.set_len(now).expect("memory");
                }
                step => apply(&disk, &guest, step, op).expect(&what),
            }
        }
        compare(&disk, &guest, &format!("seed {seed} at the end"));
        disk.close().expect("closing");
        let what = format!("seed {seed} after closing");
        self.audit(&storage, true, &what);
        let disk = self.open(&storage, false).expect(&what);
        compare(&disk, &guest, &what);
    }

    /// No damage; after a clean close no leak either.
    fn audit(&self, storage: &Arc<dyn Storage>, closed: bool, what: &str) {
        let report = self.check(storage, Repair::Nothing);
        assert_eq!(report.corruptions, 0, "{what}: {:#?}", report.findings);
        assert!(!closed || report.leaks == 0, "{what}: {:#?}", report.findings);
    }

    /// The power fails at some moments of a run; what was flushed is there, what was not is old or
    /// new, and the image is sound but for leaks, which a repair removes.
    pub fn power_cut(&self, seed: u64, steps: u64) {
        let crash = CrashStorage::holding(&self.image());
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = self.open(&storage, true).expect("opening");
        let mut rng = Rng::new(seed);
        let mut history = History::new(disk.guest_bytes());
        let mut moments = vec![(0, 0)];
        for op in 0..steps {
            let step = match self.random(&mut rng, disk.guest_bytes()) {
                Step::Reopen | Step::Resize(_) => Step::Flush,
                step => sectors(step),
            };
            history.begin(step, op);
            let what = || format!("seed {seed} step {op} {step:?}");
            let model = MemoryStorage::with_len("model", disk.guest_bytes());
            if matches!(step, Step::Flush) {
                disk.flush().unwrap_or_else(|error| panic!("{}: {error}", what()));
                history.flushed(op);
            } else {
                apply(&disk, &model, step, op).unwrap_or_else(|e| panic!("{}: {e}", what()));
            }
            moments.push((crash.ops(), op + 1));
        }
        disk.close().expect("closing");
        history.flushed(steps);
        moments.push((crash.ops(), steps + 1));
        let mut cuts = [0; 8].map(|_| rng.below(crash.ops() as u64 + 1) as usize);
        cuts.sort_unstable();
        let mut replay = crash.replay();
        for cut in cuts {
            // Steps that had returned by then, and the one that had begun.
            let done = moments.iter().rev().find(|(ops, _)| *ops <= cut).map_or(0, |m| m.1);
            let image = replay.at(cut);
            let mut left = vec![image.only_durable(), image.everything()];
            left.extend((0..3).map(|_| image.survivor(&mut rng)));
            for (n, survivor) in left.into_iter().enumerate() {
                let what = format!("seed {seed}, cut {cut} after step {done}, survivor {n}");
                self.judge_survivor(survivor, &history, done, &what);
            }
        }
    }

    fn judge_survivor(&self, survivor: MemoryStorage, history: &History, done: u64, what: &str) {
        let storage: Arc<dyn Storage> = Arc::new(survivor);
        let report = self.check(&storage, Repair::Nothing);
        assert_eq!(report.corruptions, 0, "{what}: {:#?}", report.findings);
        let disk = self.open(&storage, false).expect(what);
        history.judge(&disk, done, what);
        drop(disk);
        self.check(&storage, Repair::Leaks);
        let report = self.check(&storage, Repair::Nothing);
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{what}: {:#?}", report.findings);
        let disk = self.open(&storage, true).expect(what);
        history.judge(&disk, done, &format!("{what}, repaired"));
        // It can be written to again.
        disk.write_at(&[7; 512], GuestOffset(0)).expect(what);
        disk.close().expect(what);
        self.audit(&storage, true, what);
    }

    /// Each call to the storage fails once: the operation says so, each byte is old or new, and the
    /// image stays sound.
    pub fn faults(&self, kinds: &[FaultKind], steps: u64) {
        for nth in 0.. {
            let faulty = FaultyStorage::new(Arc::new(self.image()));
            let storage: Arc<dyn Storage> = faulty.clone();
            let disk = self.open(&storage, true).expect("opening");
            let mut rng = Rng::new(11);
            let mut history = History::new(disk.guest_bytes());
            faulty.arm(FaultPlan::nth(kinds, nth).torn(1));
            let model = MemoryStorage::with_len("model", disk.guest_bytes());
            let mut done = 0;
            for op in 0..steps {
                let step = match self.random(&mut rng, disk.guest_bytes()) {
                    Step::Reopen | Step::Resize(_) => Step::Flush,
                    step => sectors(step),
                };
                history.begin(step, op);
                if matches!(step, Step::Flush) {
                    if disk.flush().is_ok() {
                        history.flushed(op);
                    }
                } else if apply(&disk, &model, step, op).is_err() {
                    history.failed(op);
                }
                done = op + 1;
            }
            let closed = disk.close().is_ok();
            let fired = faulty.fired() > 0;
            faulty.heal();
            drop(disk);
            let what = format!("fault {nth}");
            let report = self.check(&storage, Repair::Nothing);
            assert_eq!(report.corruptions, 0, "{what}: {:#?}", report.findings);
            let disk = self.open(&storage, false).expect(&what);
            if closed {
                history.judge_closed(&disk, &what);
            } else {
                history.judge(&disk, done, &what);
            }
            if !fired {
                return;
            }
        }
    }

    /// Syncs of a flush after `writes` allocating writes, one a block.
    pub fn syncs_of_a_flush(&self, writes: u64) -> u64 {
        let counting = CountingStorage::new(Arc::new(self.image()));
        let storage: Arc<dyn Storage> = counting.clone();
        let disk = self.open(&storage, true).expect("opening");
        let step = disk.top().caps().cluster_bytes;
        counting.reset();
        for n in 0..writes {
            disk.write_at(&[5; 4096], GuestOffset(n * step)).expect("writing");
        }
        disk.flush().expect("flushing");
        counting.counts().syncs
    }
}

/// Whole sectors: what a crash leaves of one is one state.
fn sectors(step: Step) -> Step {
    let whole = |at: u64, len: u64| {
        let start = at / SECTOR * SECTOR;
        (start, (at + len).next_multiple_of(SECTOR) - start)
    };
    match step {
        Step::Write(at, len) => {
            let (at, len) = whole(at, len);
            Step::Write(at, len)
        }
        Step::Zero(at, len, unmap) => {
            let (at, len) = whole(at, len);
            Step::Zero(at, len, unmap)
        }
        Step::Discard(at, len) => {
            let (at, len) = whole(at, len);
            Step::Discard(at, len)
        }
        other => other,
    }
}

fn apply(disk: &Disk, guest: &MemoryStorage, step: Step, op: u64) -> Result<()> {
    match step {
        Step::Write(at, len) => {
            let bytes = pattern(op, at, len);
            disk.write_at(&bytes, GuestOffset(at))?;
            guest.write_at(&bytes, HostOffset(at))
        }
        Step::Zero(at, len, unmap) => {
            disk.write_zeroes(GuestOffset(at), len, unmap)?;
            guest.write_zeroes(HostOffset(at), len, ZeroMode::MayUnmap)
        }
        Step::Discard(at, len) => {
            disk.discard(GuestOffset(at), len)?;
            // Zero or as before, by the byte: what it is now is what it stays.
            let mut now = vec![0; len as usize];
            disk.read_at(&mut now, GuestOffset(at))?;
            let mut before = vec![0; len as usize];
            guest.read_padded(&mut before, HostOffset(at))?;
            let either = now.iter().zip(&before).all(|(now, before)| now == before || *now == 0);
            assert!(either, "a discard made other bytes at {at:#x}");
            guest.write_at(&now, HostOffset(at))
        }
        Step::Flush | Step::Reopen | Step::Resize(_) => Ok(()),
    }
}

/// The disk must read as the model.
fn compare(disk: &Disk, guest: &MemoryStorage, what: &str) {
    let len = disk.guest_bytes();
    assert_eq!(len, guest.len().expect("memory"), "{what}: size");
    let mut at = 0;
    while at < len {
        let run =
            guest.extent_at(HostOffset(at), len - at).unwrap_or(StorageExtent { data: true, len });
        let step = run.len.min(1 << 20).min(len - at);
        let mut found = vec![0xee; step as usize];
        let mut wanted = vec![0; step as usize];
        disk.read_at(&mut found, GuestOffset(at)).expect(what);
        guest.read_padded(&mut wanted, HostOffset(at)).expect("memory");
        if let Some(n) = first_difference(&found, &wanted) {
            let (found, wanted, n) = (found[n], wanted[n], at + n as u64);
            panic!("{what}: byte {n:#x} is {found:#x}, not {wanted:#x}");
        }
        at += step;
    }
}

/// What each sector may hold: the first byte of each version and when it came, and which is durable.
#[derive(Debug)]
struct History {
    /// Step and content of each version of a sector; a step that failed may have happened.
    versions: BTreeMap<u64, Vec<Version>>,
    flushes: Vec<u64>,
    guest_bytes: u64,
}

#[derive(Clone, Debug)]
struct Version {
    op: u64,
    /// The content; a discarded sector may also stay as it was.
    bytes: Vec<u8>,
    optional: bool,
}

impl History {
    fn new(guest_bytes: u64) -> Self {
        Self { versions: BTreeMap::new(), flushes: Vec::new(), guest_bytes }
    }

    fn begin(&mut self, step: Step, op: u64) {
        let (at, len, discard) = match step {
            Step::Write(at, len) | Step::Zero(at, len, _) => (at, len, false),
            Step::Discard(at, len) => (at, len, true),
            _ => return,
        };
        for sector in at / SECTOR..(at + len) / SECTOR {
            let bytes = match step {
                Step::Write(..) => pattern(op, sector * SECTOR, SECTOR),
                _ => vec![0; SECTOR as usize],
            };
            let version = Version { op, bytes, optional: discard };
            self.versions.entry(sector).or_default().push(version);
        }
    }

    /// The step may have happened or not, for each sector.
    fn failed(&mut self, op: u64) {
        for version in self.versions.values_mut().flatten().filter(|version| version.op == op) {
            version.optional = true;
        }
    }

    fn flushed(&mut self, op: u64) {
        self.flushes.push(op);
    }

    /// Each sector holds what it had at the last flush among the first `done` steps, or anything
    /// that it was given since.
    fn judge(&self, disk: &Disk, done: u64, what: &str) {
        let flushed = self.flushes.iter().rev().find(|op| **op < done).copied().unwrap_or(0);
        self.judge_since(disk, flushed, done, what);
    }

    /// The disk was closed: each sector holds the last version that is not optional, or a later one.
    fn judge_closed(&self, disk: &Disk, what: &str) {
        self.judge_since(disk, u64::MAX, u64::MAX, what);
    }

    fn judge_since(&self, disk: &Disk, flushed: u64, done: u64, what: &str) {
        assert_eq!(disk.guest_bytes(), self.guest_bytes, "{what}: size");
        let zero = vec![0; SECTOR as usize];
        for (sector, versions) in &self.versions {
            let mut found = vec![0xee; SECTOR as usize];
            disk.read_at(&mut found, GuestOffset(sector * SECTOR)).expect(what);
            // Going back, up to and with the first one that a flush has made durable for sure.
            let mut fits = false;
            let mut durable = false;
            for version in versions.iter().rev().filter(|version| version.op <= done) {
                fits |= found == version.bytes;
                if version.op < flushed && !version.optional {
                    durable = true;
                    break;
                }
            }
            fits |= !durable && found == zero;
            let first = found[0];
            assert!(fits, "{what}: sector {sector} begins with {first:#x}, not with what it may");
        }
    }
}
