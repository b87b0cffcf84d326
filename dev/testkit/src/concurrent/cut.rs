//! A run of clients over storages that record every change, and the power cuts that it survives.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::RwLock;
use vdkit_block::{CacheMode, HostOffset, Monitor, NewBitmap, Repair, Storage, StorageExt};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;

use super::admin::{Admin, Chores, Deeds, STEADY};
use super::clients::{Alone, Mix, Stage};
use super::history::{Clock, History, Log, Moment, SECTOR, Seen, find_content, stamps};
use super::shape::{Files, Shape};
use crate::{CrashClock, CrashImage, CrashStorage, FaultyStorage, Rng};

/// The cache modes of a disk whose storages make nothing durable by themselves.
pub const CACHES: [CacheMode; 4] =
    [CacheMode::Writeback, CacheMode::None, CacheMode::Writethrough, CacheMode::DirectSync];

/// The files of an image, which record every change and fail when they are told to.
#[derive(Debug)]
pub struct Recording {
    /// Counts the changes of all of them.
    pub clock: CrashClock,
    /// What records.
    pub crash: Vec<Arc<CrashStorage>>,
    /// What fails, in front of it.
    pub faulty: Vec<Arc<FaultyStorage>>,
}

impl Recording {
    /// Files that hold this, durably.
    pub fn new(content: &[MemoryStorage]) -> Self {
        Self::over(content, CacheMode::Writeback)
    }

    /// As [`Recording::new`], of storages whose syncs do nothing and that say so.
    pub fn volatile(content: &[MemoryStorage]) -> Self {
        Self::over(content, CacheMode::Unsafe)
    }

    fn over(content: &[MemoryStorage], cache: CacheMode) -> Self {
        let clock = CrashClock::new();
        let record = |file: &MemoryStorage| CrashStorage::holding_in(file, cache, &clock);
        let crash: Vec<Arc<CrashStorage>> = content.iter().map(record).collect();
        let faulty = crash.iter().map(|file| FaultyStorage::new(file.clone())).collect();
        Self { clock, crash, faulty }
    }

    /// For use by a disk.
    pub fn files(&self) -> Files {
        self.faulty.iter().map(|file| file.clone() as Arc<dyn Storage>).collect()
    }

    /// Everything works again; says whether anything had failed.
    pub fn heal(&self) -> bool {
        self.faulty.iter().for_each(|file| file.heal());
        self.faulty.iter().any(|file| file.fired() > 0)
    }

    /// Lets calls wait now and then.
    pub fn stumble(&self, on: bool) {
        self.crash.iter().for_each(|file| file.stumble(on));
    }
}

/// What is done to an image.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The image.
    pub shape: Shape,
    /// What the disk promises.
    pub cache: CacheMode,
    /// Threads that make requests.
    pub clients: u64,
    /// Requests of each.
    pub calls: u64,
    /// Which.
    pub mix: Mix,
    /// What is done beside them.
    pub chores: Chores,
    /// Calls may fail.
    pub faults: bool,
    /// The number of the first write.
    pub first_write: u64,
    /// The seed of everything.
    pub seed: u64,
}

/// What the clients and the administrator of a disk did.
#[derive(Debug)]
pub struct Run {
    plan: Plan,
    /// What all threads did and saw.
    pub history: History,
    deeds: Deeds,
    /// Changes of the storages when it began and when it had ended.
    ticks: std::ops::Range<usize>,
}

/// What the window of a disk holds, as long as the disk.
fn content_of_window(shape: &Shape, disk: &Disk) -> MemoryStorage {
    let memory = MemoryStorage::with_len("first", disk.guest_bytes());
    for (sector, bytes) in shape.read_windows(disk).expect("reading a good image") {
        memory.write_at(&bytes, HostOffset(sector * SECTOR)).expect("memory");
    }
    memory
}

impl Plan {
    /// For messages: how to repeat the run.
    pub fn what(&self) -> String {
        let Self { shape, cache, clients, calls, chores, seed, .. } = self;
        let name = shape.name;
        format!("VDKIT_SEED={seed} {name} {cache}, {clients} clients, {calls} calls, {chores:?}")
    }

    /// The disk for the clients.
    fn front(&self, disk: Disk) -> Alone {
        Alone { disk, gate: self.shape.resizes_alone.then(RwLock::default) }
    }

    /// Opens the image, runs the clients and the administrator, and returns the disk.
    ///
    /// # Panics
    /// If a call fails that may not, or a read returns what cannot be there.
    pub fn run(&self, recording: &Recording, arm: impl FnOnce()) -> (Run, Disk) {
        let disk = self.shape.open(&recording.files(), true, self.cache).expect("a good image");
        let first = content_of_window(&self.shape, &disk);
        self.prepare(&disk);
        let front = self.front(disk);
        recording.stumble(true);
        arm();
        let began = recording.clock.now();
        let (logs, deeds) = self.work(&front, &first, recording);
        let ticks = began..recording.clock.now();
        recording.stumble(false);
        let history = History::new(logs.iter().chain([&deeds.log]), &first);
        for seen in logs.iter().flat_map(|log| &log.seen) {
            history.judge(seen, &self.what());
        }
        (Run { plan: *self, history, deeds, ticks }, front.disk)
    }

    /// Takes away what an earlier run left for the administrator, and adds the bitmap that stays.
    fn prepare(&self, disk: &Disk) {
        if self.chores.snapshots {
            let all = disk.top().snapshots().expect("a format with snapshots");
            for snapshot in all.list().expect("a list") {
                all.delete(&snapshot.name, &Monitor::default()).expect("deleting a snapshot");
            }
        }
        if self.chores.bitmaps {
            let all = disk.top().bitmaps().expect("a format with bitmaps");
            for bitmap in all.list().expect("a list") {
                all.remove(&bitmap.info.name).expect("removing a bitmap");
            }
            let new = NewBitmap { name: STEADY, granularity: None, enabled: true };
            all.add(&new).expect("adding a bitmap");
        }
    }

    fn work(
        &self,
        front: &Alone,
        first: &MemoryStorage,
        recording: &Recording,
    ) -> (Vec<Log>, Deeds) {
        let first = |sector: u64| {
            let mut bytes = [0; SECTOR as usize];
            first.read_padded(&mut bytes, HostOffset(sector * SECTOR)).expect("memory");
            bytes
        };
        let stage = Stage {
            front,
            windows: self.shape.windows(),
            first: &first,
            unit: (self.shape.unit / SECTOR).max(1),
            cache: self.cache,
            faults: self.faults,
            clock: &Clock::default(),
            ticks: &recording.clock,
        };
        let admin = Admin { stage: &stage, front, shape: &self.shape };
        let Self { mix, calls, chores, first_write, seed, .. } = *self;
        std::thread::scope(|scope| {
            let (stage, admin) = (&stage, &admin);
            let start = |client: u64| {
                let mut rng = Rng::new(seed ^ (client + 1) << 48);
                let number = first_write + client * calls;
                scope.spawn(move || stage.work(mix, number, calls, &mut rng))
            };
            let clients: Vec<_> = (0..self.clients).map(start).collect();
            let deeds = scope.spawn(move || admin.work(chores, calls, &mut Rng::new(!seed)));
            let logs = clients.into_iter().map(join).collect();
            (logs, join(deeds))
        })
    }
}

fn noise(sector: u64, bytes: &[u8]) -> String {
    let (head, tail) = (&bytes[..32], &bytes[bytes.len() - 16..]);
    format!("sector {sector} holds what nobody wrote there: {head:02x?}..{tail:02x?}")
}

fn join<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Which of the changes survive that were not durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// None.
    Nothing,
    /// All.
    Everything,
    /// Each by lot.
    Lot,
}

impl Survival {
    /// A survivor of one file.
    pub fn of(self, image: &CrashImage, rng: &mut Rng) -> MemoryStorage {
        match self {
            Self::Nothing => image.only_durable(),
            Self::Everything => image.everything(),
            Self::Lot => image.survivor(rng),
        }
    }
}

/// What power cuts showed.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Moments that were looked at.
    pub cuts: u64,
    /// Survivors that were judged.
    pub survivors: u64,
    /// Moments of which some survivor was wrong.
    pub bad_cuts: u64,
    /// The first of them, in words.
    pub first: Option<String>,
}

impl Run {
    /// Changes of the storages when the clients began and when they had ended.
    pub fn ticks(&self) -> std::ops::Range<usize> {
        self.ticks.clone()
    }

    /// Writes and other changes that were acknowledged as durable, by themselves or by a flush.
    pub fn durable_changes(&self) -> u64 {
        let all = self.history.at(usize::MAX - 1);
        let durable = self.history.changes().filter(|change| all.durable(change));
        durable.map(|change| change.begin).collect::<BTreeSet<u64>>().len() as u64
    }

    /// Moments for power cuts: right after acknowledgements, and anywhere.
    fn moments(&self, count: u64, rng: &mut Rng) -> BTreeSet<usize> {
        let acknowledged: Vec<usize> = self.history.acknowledgements().collect();
        let anywhere = self.ticks.start as u64..self.ticks.end as u64 + 1;
        let mut moments = BTreeSet::from([self.ticks.end]);
        for number in 0..count {
            moments.insert(match acknowledged.len() as u64 {
                n if n > 0 && number % 2 == 0 => acknowledged[rng.below(n) as usize],
                _ => rng.within(anywhere.clone()) as usize,
            });
        }
        moments
    }

    /// Lets the power fail at so many moments and judges what survives.
    pub fn cut(&self, recording: &Recording, count: u64, rng: &mut Rng) -> Verdict {
        let mut replays: Vec<_> = recording.crash.iter().map(CrashStorage::replay).collect();
        let mut verdict = Verdict::default();
        for ticks in self.moments(count, rng) {
            verdict.cuts += 1;
            let moment = self.history.at(ticks);
            let images: Vec<&CrashImage> =
                replays.iter_mut().map(|replay| replay.at_tick(ticks)).collect();
            let mut bad = None;
            for survival in [Survival::Nothing, Survival::Everything, Survival::Lot, Survival::Lot]
            {
                verdict.survivors += 1;
                let files = images.iter().map(|image| survival.of(image, rng)).collect();
                if let Err(error) = self.judge(files, &moment, rng) {
                    bad.get_or_insert(format!(
                        "{}, power cut at {ticks} of {:?}, surviving: {survival:?}: {error}",
                        self.plan.what(),
                        self.ticks
                    ));
                }
            }
            verdict.bad_cuts += u64::from(bad.is_some());
            verdict.first = verdict.first.or(bad);
        }
        verdict
    }

    /// A survivor opens, is sound, and holds what was acknowledged; sometimes it is written to.
    ///
    /// # Errors
    /// What is wrong.
    pub fn judge(
        &self,
        survivor: Vec<MemoryStorage>,
        moment: &Moment<'_>,
        rng: &mut Rng,
    ) -> Result<(), String> {
        let shape = &self.plan.shape;
        let files: Files =
            survivor.into_iter().map(|file| Arc::new(file) as Arc<dyn Storage>).collect();
        if !shape.lazy {
            shape.audit(&files, true)?;
        }
        let text = |error: vdkit_block::Error| error.to_string();
        let disk = shape.open(&files, false, CacheMode::Writeback).map_err(text)?;
        moment.judge_size(disk.guest_bytes())?;
        for (sector, bytes) in shape.read_windows(&disk).map_err(text)? {
            if shape.noisy && moment.is_new(sector) {
                continue;
            }
            let content = find_content(sector, &bytes, &self.history.first(sector));
            let content = content.ok_or_else(|| noise(sector, &bytes))?;
            moment.judge(sector, content)?;
        }
        self.deeds.judge_snapshots(shape, &disk, &self.history, moment)?;
        if self.plan.chores.bitmaps && !self.plan.chores.sizes {
            self.deeds.judge_bitmaps(&disk, &self.history, moment)?;
        }
        drop(disk);
        if shape.lazy || rng.chance(1, 8) {
            go_on(shape, &files).map_err(|error| format!("written to afterwards: {error}"))?;
        }
        Ok(())
    }

    /// Compares what a disk shows now with what was done, as a read that came last.
    ///
    /// # Errors
    /// What it cannot show.
    pub fn judge_now(&self, disk: &Disk) -> Result<(), String> {
        let shape = &self.plan.shape;
        for (sector, bytes) in shape.read_windows(disk).map_err(|error| error.to_string())? {
            let content = find_content(sector, &bytes, &self.history.first(sector));
            let content = content.ok_or_else(|| noise(sector, &bytes))?;
            let (begin, end) = (u64::MAX - 1, u64::MAX);
            self.history.try_judge(&Seen { sector, content, begin, end })?;
        }
        Ok(())
    }
}

/// A survivor is as good as any image: it is written to, closed, and sound; its leaks can be
/// repaired.
///
/// # Errors
/// What is wrong.
pub fn go_on(shape: &Shape, files: &Files) -> Result<(), String> {
    let text = |error: vdkit_block::Error| error.to_string();
    if shape.driver.name() == "vdi" {
        // A header counts the blocks of the file: those that leaked leave no room for others.
        shape.check(files, Repair::Leaks).map_err(text)?;
    }
    let disk = shape.open(files, true, CacheMode::Writeback).map_err(text)?;
    for first in shape.windows().into_iter().flat_map(|window| window.step_by(60)) {
        let bytes = stamps(first, 20, 1 << 60);
        let at = vdkit_block::GuestOffset(first * SECTOR);
        if at.0 + bytes.len() as u64 <= disk.guest_bytes() {
            disk.write_at(&bytes, at).map_err(text)?;
            let mut back = vec![0; bytes.len()];
            disk.read_at(&mut back, at).map_err(text)?;
            if back != bytes {
                return Err(format!("sectors at {first} do not hold what was written"));
            }
        }
    }
    disk.close().map_err(text)?;
    drop(disk);
    shape.audit(files, true)?;
    let report = shape.check(files, Repair::Leaks).map_err(text)?;
    // What may be a lost table is kept.
    if report.leaks_left() != report.leaks_kept {
        return Err(format!("leaks that were not repaired: {:#?}", report.findings));
    }
    Ok(())
}
