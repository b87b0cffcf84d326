//! A commit under a writing guest, with a power cut at any moment. Whichever unsynced sectors of
//! both files survive, the overlay on its base holds all flushed data; after the commit, so does
//! the base alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vdkit::live::LiveImages;
use vdkit::serve::{Export, ExportOptions, Images};
use vdkit::{Disk, GuestOffset, OpenOptions, Options};
use vdkit_block::{BackingRef, CreateRequest, FormatDriver, Limits, OpenRequest, Storage};
use vdkit_testkit::{CrashClock, CrashStorage, Rng, assert_sound, open_image};

const BLOCK: u64 = 4096;
const SECTOR: usize = 512;
const BLOCKS: u64 = 160;
/// Not a multiple of any cluster size.
const DISK_BYTES: u64 = BLOCKS * BLOCK;
/// Number of power cuts, and survivors of each.
const MOMENTS: usize = 60;
const SURVIVORS: usize = 3;

/// Guest actions with their time on the clock of both files.
enum Event {
    /// A block filled with a version, started at this moment.
    Write { block: u64, version: u32, begun: usize },
    /// A flush answered at this moment; it covers this many events.
    Flush { answered: usize, covers: usize },
}

/// The bytes of a version of a block; each sector identifies both.
fn bytes_of(block: u64, version: u32) -> Vec<u8> {
    let mut word = [0; 16];
    if version > 0 {
        word[..8].copy_from_slice(&block.to_le_bytes());
        word[8..12].copy_from_slice(&version.to_le_bytes());
        word[12..].copy_from_slice(b"ver\0");
    }
    word.repeat(BLOCK as usize / word.len())
}

struct Case {
    base: (&'static str, &'static str),
    base_bytes: u64,
    overlay: &'static str,
}

impl Case {
    /// The case of a number below 6.
    fn numbered(number: u64) -> Self {
        Self {
            base: [("raw", ""), ("qcow2", "cluster_size=4K"), ("qcow2", "")][number as usize % 3],
            base_bytes: if number < 3 { DISK_BYTES } else { DISK_BYTES / 2 },
            overlay: ["cluster_size=8K", "", "cluster_size=16K,lazy_refcounts=on"]
                [number as usize / 2],
        }
    }
}

struct Stage {
    clock: CrashClock,
    base: Arc<CrashStorage>,
    overlay: Arc<CrashStorage>,
    case: Case,
    /// The version of each block.
    versions: Vec<u32>,
    next: u32,
    events: Vec<Event>,
}

fn driver(format: &str) -> &'static dyn FormatDriver {
    vdkit::format(format).unwrap()
}

fn make(format: &str, options: &str, storage: Arc<dyn Storage>, bytes: u64, base: Option<&str>) {
    let driver = driver(format);
    let options = options.split(',').filter(|option| !option.is_empty());
    driver
        .create(&CreateRequest {
            storage,
            files: Vec::new(),
            guest_bytes: bytes,
            options: Options::parse(format, driver.options(), options).unwrap(),
            backing: base.map(|format| BackingRef::new("base", Some(format.to_owned()))),
            backing_bytes: None,
        })
        .unwrap();
}

fn open(format: &str, storage: Arc<dyn Storage>, writable: bool) -> Disk {
    let limits = Limits::default();
    let request = OpenRequest { storage, files: Vec::new(), writable, limits };
    open_image(driver(format), request).unwrap()
}

impl Stage {
    /// A base and an overlay, both with data.
    fn new(case: Case, rng: &mut Rng) -> Self {
        let clock = CrashClock::new();
        let (base, overlay) = (CrashStorage::on(&clock), CrashStorage::on(&clock));
        let (format, options) = case.base;
        make(format, options, base.clone(), case.base_bytes, None);
        make("qcow2", case.overlay, overlay.clone(), DISK_BYTES, Some(format));
        let versions = vec![0; BLOCKS as usize];
        let mut stage = Self { clock, base, overlay, case, versions, next: 1, events: Vec::new() };
        let disk = open(format, stage.base.clone(), true);
        stage.fill(&disk, stage.case.base_bytes / BLOCK, rng);
        disk.close().unwrap();
        let disk = stage.chain(true);
        stage.fill(&disk, BLOCKS, rng);
        for _ in 0..6 {
            // Zeroes of the overlay hide data of the base.
            let block = rng.below(BLOCKS);
            disk.write_zeroes(GuestOffset(block * BLOCK), BLOCK, true).unwrap();
            stage.versions[block as usize] = 0;
        }
        disk.close().unwrap();
        stage
    }

    fn fill(&mut self, disk: &Disk, blocks: u64, rng: &mut Rng) {
        for _ in 0..blocks / 3 {
            let block = rng.below(blocks);
            disk.write_at(&bytes_of(block, self.next), GuestOffset(block * BLOCK)).unwrap();
            self.versions[block as usize] = self.next;
            self.next += 1;
        }
    }

    fn chain(&self, writable: bool) -> Disk {
        let base = open(self.case.base.0, self.base.clone(), false);
        open("qcow2", self.overlay.clone(), writable).over(base)
    }

    /// One guest write, sometimes with a flush.
    fn step(&mut self, export: &Export, rng: &mut Rng) {
        let (block, version) = (rng.below(BLOCKS), self.next);
        self.next += 1;
        self.events.push(Event::Write { block, version, begun: self.clock.now() });
        export.write(&bytes_of(block, version), block * BLOCK, false).unwrap();
        if rng.chance(1, 6) {
            let covers = self.events.len();
            export.flush().unwrap();
            self.events.push(Event::Flush { answered: self.clock.now(), covers });
        }
    }

    /// Possible versions of each block after a crash: the flushed one, and later ones.
    fn allowed(&self, moment: usize) -> Vec<Vec<u32>> {
        let mut allowed: Vec<Vec<u32>> = self.versions.iter().map(|v| vec![*v]).collect();
        let flushed = self.events.iter().filter_map(|event| match event {
            Event::Flush { answered, covers } if *answered <= moment => Some(*covers),
            _ => None,
        });
        let flushed = flushed.max().unwrap_or(0);
        for (index, event) in self.events.iter().enumerate() {
            let Event::Write { block, version, begun } = event else { continue };
            let versions = &mut allowed[*block as usize];
            if index < flushed {
                *versions = vec![*version];
            } else if *begun <= moment {
                versions.push(*version);
            }
        }
        allowed
    }
}

/// Every sector has a possible version of its block.
fn assert_holds(disk: &Disk, allowed: &[Vec<u32>], what: &str) {
    let mut found = vec![0xee; BLOCK as usize];
    for (block, versions) in allowed.iter().enumerate() {
        disk.read_at(&mut found, GuestOffset(block as u64 * BLOCK)).unwrap();
        for (sector, bytes) in found.chunks(SECTOR).enumerate() {
            let fits =
                versions.iter().any(|version| bytes_of(block as u64, *version)[..SECTOR] == *bytes);
            let seen = &bytes[..16];
            assert!(fits, "{what}: block {block}, sector {sector}: {seen:x?}, not {versions:?}");
        }
    }
}

fn assert_not_corrupt(format: &str, storage: &Arc<dyn Storage>, what: &str) {
    assert_sound(driver(format), storage, true, what);
}

/// Commits while another thread writes, before, meanwhile and after; returns the moment at which
/// the commit was done.
fn commit_beside_writes(
    live: &LiveImages,
    export: &Export,
    stage: &mut Stage,
    rng: &mut Rng,
) -> usize {
    let (under_way, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let clock = stage.clock.clone();
    let committed = std::thread::scope(|scope| {
        let (under_way, over) = (&under_way, &over);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                stage.step(export, rng);
                under_way.store(true, Ordering::Relaxed);
                // Let the commit finish.
                std::thread::yield_now();
            }
            for _ in 0..40 {
                stage.step(export, rng);
            }
        });
        while !under_way.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let done = live.commit(export, true);
        let at = clock.now();
        over.store(true, Ordering::Relaxed);
        done.map(|_| at)
    });
    committed.unwrap()
}

/// Moments of power cuts from `began` to `end`, more of them around the exchange than elsewhere.
fn moments_of_cuts(began: usize, committed: usize, end: usize, rng: &mut Rng) -> Vec<usize> {
    let mut moments: Vec<usize> =
        (0..MOMENTS).map(|_| rng.within(began as u64..end as u64) as usize).collect();
    moments.extend((committed.saturating_sub(15)..=(committed + 5)).filter(|at| *at <= end));
    moments.push(end);
    moments.retain(|moment| *moment >= began);
    moments
}

/// The images of a survivor are not corrupt, and the overlay on its base holds what it may; so
/// does the base alone, if it was committed to.
fn assert_survives(
    base: (&str, Arc<dyn Storage>),
    overlay: Arc<dyn Storage>,
    committed: bool,
    allowed: &[Vec<u32>],
    what: &str,
) {
    let (format, base) = base;
    assert_not_corrupt("qcow2", &overlay, what);
    if format == "qcow2" {
        assert_not_corrupt(format, &base, what);
    }
    let disk = open("qcow2", overlay, false).over(open(format, base.clone(), false));
    assert_holds(&disk, allowed, &format!("{what}: the overlay"));
    if committed {
        assert_holds(&open(format, base, false), allowed, &format!("{what}: the base"));
    }
}

#[test]
fn what_was_flushed_survives_a_cut_in_a_commit() {
    for number in 0..6 {
        let mut rng = Rng::from_env(number);
        let name = format!("case {number}, seed {}", rng.seed());
        let mut stage = Stage::new(Case::numbered(number), &mut rng);
        let export = Export::new(stage.chain(true), ExportOptions::default());
        let began = stage.clock.now();
        let live = LiveImages::new(vdkit::registry(), OpenOptions::read_write());
        let committed = commit_beside_writes(&live, &export, &mut stage, &mut rng);
        let end = stage.clock.now();
        for moment in moments_of_cuts(began, committed, end, &mut rng) {
            let allowed = stage.allowed(moment);
            let (lower, upper) =
                (stage.base.crash_at_tick(moment), stage.overlay.crash_at_tick(moment));
            for survivor in 0..SURVIVORS {
                let what = format!(
                    "{name}, moment {moment} of {began}..{committed}..{end}, survivor {survivor}"
                );
                let base: Arc<dyn Storage> = Arc::new(lower.survivor(&mut rng));
                let overlay: Arc<dyn Storage> = Arc::new(upper.survivor(&mut rng));
                let base = (stage.case.base.0, base);
                assert_survives(base, overlay, moment >= committed, &allowed, &what);
            }
        }
    }
}
