//! Commits an overlay under many clients, in each cache mode, with a power cut at any moment. The
//! overlay on its base holds everything acknowledged as durable; after the commit, so does the base
//! alone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use vdkit_block::StorageExt;

use vdkit::live::LiveImages;
use vdkit::serve::{Export, ExportOptions, Images};
use vdkit::storage::MemoryStorage;
use vdkit::{
    BackingRef, CacheMode, CreateRequest, Disk, GuestOffset, HostOffset, Limits, OfflineImage,
    OpenOptions, OpenRequest, Options, Repair, Result, Storage,
};
use vdkit_testkit::concurrent::clients::{Front, Mix, Stage};
use vdkit_testkit::concurrent::history::{
    Clock, History, Log, Moment, SECTOR, WRITES, find_content, stamps,
};
use vdkit_testkit::concurrent::{CACHES, Recording, Survival};
use vdkit_testkit::{Rng, cases};

const SECTORS: u64 = 640;
/// Number of power cuts, besides those around the end of the commit.
const CUTS: u64 = 10;

struct Served<'a>(&'a Export);

impl Front for Served<'_> {
    fn write(&self, bytes: &[u8], at: u64, durable: bool) -> Result<bool> {
        self.0.write(bytes, at, durable).map(|()| durable)
    }

    fn zero(&self, at: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.0.zero(at, len, may_unmap, false)
    }

    fn discard(&self, at: u64, len: u64) -> Result<()> {
        self.0.discard(at, len, false)
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        self.0.read(bytes, at)
    }

    fn flush(&self) -> Result<()> {
        self.0.flush()
    }
}

/// Formats and options of a base and its overlay.
#[derive(Clone, Copy, Debug)]
struct Case {
    base: (&'static str, &'static str),
    base_sectors: u64,
    overlay: &'static str,
    cache: CacheMode,
    clients: u64,
}

impl Case {
    fn new(seed: u64) -> Self {
        let bases =
            [("raw", ""), ("qcow2", "cluster_size=4K"), ("vdi", ""), ("qcow2", "extended_l2=on")];
        Self {
            base: bases[seed as usize / 4 % 4],
            base_sectors: if (seed / 16).is_multiple_of(2) { SECTORS } else { SECTORS / 2 },
            overlay: ["cluster_size=8K", "", "cluster_size=16K,lazy_refcounts=on"]
                [seed as usize % 3],
            cache: CACHES[seed as usize % 4],
            clients: [2, 4, 8][seed as usize % 3],
        }
    }

    fn make(&self) -> [MemoryStorage; 2] {
        let (format, options) = self.base;
        let base = make(format, options, self.base_sectors, None);
        let overlay = make("qcow2", self.overlay, SECTORS, Some(format));
        let files: Vec<Arc<dyn Storage>> = vec![base.clone(), overlay.clone()];
        let disk = self.base(&files, true).expect("a new base");
        for first in (0..self.base_sectors).step_by(24) {
            let bytes = stamps(first, 12.min(self.base_sectors - first), 1 << 40);
            disk.write_at(&bytes, GuestOffset(first * SECTOR)).expect("writing");
        }
        disk.close().expect("closing");
        let disk = self.chain(&files, true).expect("a new overlay");
        for (number, first) in (0..SECTORS).step_by(40).enumerate() {
            let at = GuestOffset(first * SECTOR);
            match number % 4 {
                // Zeroes of the overlay hide data of the base.
                3 => disk.write_zeroes(at, 16 * SECTOR, true).expect("zeroing"),
                _ => disk.write_at(&stamps(first, 18, 1 << 41), at).expect("writing"),
            }
        }
        disk.close().expect("closing");
        [base, overlay].map(|file| MemoryStorage::clone(&file))
    }

    fn base(&self, files: &[Arc<dyn Storage>], writable: bool) -> Result<Disk> {
        open(self.base.0, &files[0], writable, self.cache)
    }

    fn chain(&self, files: &[Arc<dyn Storage>], writable: bool) -> Result<Disk> {
        Ok(open("qcow2", &files[1], writable, self.cache)?.over(self.base(files, false)?))
    }
}

fn make(format: &str, options: &str, sectors: u64, base: Option<&str>) -> Arc<MemoryStorage> {
    let driver = vdkit::format(format).expect("a format");
    let memory = Arc::new(MemoryStorage::new(format));
    driver
        .create(&CreateRequest {
            storage: memory.clone(),
            files: Vec::new(),
            guest_bytes: sectors * SECTOR,
            options: Options::parse(format, driver.options(), [options]).expect("good options"),
            backing: base.map(|format| BackingRef::new("base", Some(format.to_owned()))),
            backing_bytes: None,
        })
        .expect("a new image");
    memory
}

fn open(
    format: &str,
    storage: &Arc<dyn Storage>,
    writable: bool,
    cache: CacheMode,
) -> Result<Disk> {
    let (driver, limits) = (vdkit::format(format)?, Limits::default());
    let info = driver.describe(storage, &limits)?;
    let request = OpenRequest { storage: storage.clone(), files: Vec::new(), writable, limits };
    let format = driver.open(request)?;
    let options = OpenOptions::default().writable(writable).cache(cache);
    Ok(Disk::from_format(format, info, &options))
}

fn read_all(disk: &Disk) -> Vec<u8> {
    let mut bytes = vec![0xee; (SECTORS * SECTOR) as usize];
    disk.read_at(&mut bytes, GuestOffset(0)).expect("reading a good image");
    bytes
}

/// Clients work until a little after the commit. Returns the number of storage changes at the end
/// of the commit.
fn work(case: &Case, seed: u64, recording: &Recording, first: &MemoryStorage) -> (Vec<Log>, usize) {
    let files: Vec<Arc<dyn Storage>> =
        recording.crash.iter().map(|file| file.clone() as Arc<dyn Storage>).collect();
    let disk = case.chain(&files, true).expect("a good chain");
    let export = Export::new(disk, ExportOptions::default());
    let options = OpenOptions::read_write().cache(case.cache);
    let live = LiveImages::new(vdkit::registry(), options);
    let of_first = |sector: u64| {
        let mut bytes = [0; SECTOR as usize];
        first.read_at(&mut bytes, HostOffset(sector * SECTOR)).expect("memory");
        bytes
    };
    let stage = Stage {
        front: &Served(&export),
        windows: std::iter::once(0..SECTORS).collect(),
        first: &of_first,
        unit: 16,
        cache: case.cache,
        faults: false,
        clock: &Clock::default(),
        ticks: &recording.clock,
    };
    let over = AtomicBool::new(false);
    recording.stumble(true);
    std::thread::scope(|scope| {
        let (stage, over) = (&stage, &over);
        let start = |client: u64| {
            scope.spawn(move || {
                let mut rng = Rng::new(seed ^ (client + 1) << 48);
                let mut logs = Vec::new();
                let mut number = WRITES + (client << 20);
                let mut rounds_after = 0;
                while rounds_after < 2 {
                    rounds_after += u64::from(over.load(Ordering::Relaxed));
                    logs.push(stage.work(Mix::ALL, number, 8, &mut rng));
                    number += 8;
                }
                logs
            })
        };
        let clients: Vec<_> = (0..case.clients).map(start).collect();
        let committed = live.commit(&export, true);
        let ticks = recording.clock.now();
        over.store(true, Ordering::Relaxed);
        let logs = clients.into_iter().flat_map(|client| client.join().expect("a client"));
        let logs = logs.collect();
        committed.expect("a commit");
        (logs, ticks)
    })
}

fn judge(disk: &Disk, history: &History, moment: &Moment<'_>) -> std::result::Result<(), String> {
    for (sector, bytes) in (0..).zip(read_all(disk).chunks(SECTOR as usize)) {
        let content = find_content(sector, bytes, &history.first(sector));
        moment.judge(sector, content.ok_or(format!("noise in sector {sector}"))?)?;
    }
    Ok(())
}

fn sound(format: &str, file: &Arc<dyn Storage>) -> std::result::Result<(), String> {
    let driver = vdkit::format(format).expect("a format");
    let report = driver.check(&OfflineImage::new(file), Repair::Nothing);
    let report = report.map_err(|error| error.to_string())?;
    match report.corruptions {
        0 => Ok(()),
        _ => Err(format!("{:#?}", report.findings)),
    }
}

#[test]
fn acknowledged_writes_survive_beside_a_commit() {
    let seed = Rng::from_env(17).seed();
    for seed in seed..seed + cases(16) {
        let mut rng = Rng::new(seed);
        let case = Case::new(seed);
        let recording = Recording::new(&case.make());
        let files = recording.files();
        let chain = case.chain(&files, false).expect("a good chain");
        let first = MemoryStorage::from_bytes("first", &read_all(&chain));
        drop(chain);
        let (logs, committed) = work(&case, seed, &recording, &first);
        recording.stumble(false);
        let end = recording.clock.now();
        let history = History::new(&logs, &first);
        let what = format!("VDKIT_SEED={seed} {case:?}");
        logs.iter().flat_map(|log| &log.seen).for_each(|seen| history.judge(seen, &what));
        let acknowledged: Vec<usize> = history.acknowledgements().collect();
        let mut moments = BTreeSet::from([end]);
        moments.extend((committed.saturating_sub(6)..=committed + 2).filter(|at| *at <= end));
        for _ in 0..CUTS {
            moments.insert(rng.below(end as u64 + 1) as usize);
            moments.insert(acknowledged[rng.below(acknowledged.len() as u64) as usize]);
        }
        let mut replays: Vec<_> = recording.crash.iter().map(|file| file.replay()).collect();
        for at in moments {
            let images: Vec<_> = replays.iter_mut().map(|replay| replay.at_tick(at)).collect();
            for survival in [Survival::Nothing, Survival::Everything, Survival::Lot] {
                let survivor = images.iter().map(|image| survival.of(image, &mut rng));
                let files: Vec<Arc<dyn Storage>> =
                    survivor.map(|file| Arc::new(file) as Arc<dyn Storage>).collect();
                let verdict = judge_survivor(&case, &files, &history, at, at >= committed);
                verdict.unwrap_or_else(|error| {
                    panic!("{what}, cut at {at} of {committed}..{end}, {survival:?}: {error}")
                });
            }
        }
    }
}

fn judge_survivor(
    case: &Case,
    files: &[Arc<dyn Storage>],
    history: &History,
    at: usize,
    committed: bool,
) -> std::result::Result<(), String> {
    let text = |error: vdkit::Error| error.to_string();
    let moment = history.at(at);
    if !case.overlay.contains("lazy") {
        sound("qcow2", &files[1])?;
    }
    sound(case.base.0, &files[0])?;
    judge(&case.chain(files, false).map_err(text)?, history, &moment)?;
    if committed {
        let base = case.base(files, false).map_err(text)?;
        judge(&base, history, &moment).map_err(|error| format!("the base alone: {error}"))?;
    }
    Ok(())
}
