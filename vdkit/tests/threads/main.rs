//! Many threads on one disk with random delays, so that they interleave in unusual orders.
//!
//! Afterwards the reads of all threads are checked against their writes
//! (`vdkit_testkit::concurrent::history`), vdkit and QEMU check the image, and power cuts are tried
//! at moments of the run.

#[path = "../support/mod.rs"]
mod support;

mod worker;

use std::sync::Arc;

use support::disks::{Survival, power_cut, survivors};
use support::guest::Guest;
use support::rig::{IntoGuest, Rig};
use support::shape::{Base, CBC, Content, DataFile, Shape, XTS};
use vdkit_block::{Error, Limits};
use vdkit_chain::Disk;
use vdkit_testkit::concurrent::history::{Clock, History, Log, Moment, SECTOR, Seen, content_of};
use vdkit_testkit::{CrashClock, Rng};
use worker::{Mix, Stage};

/// Parameters of a test.
struct Plan {
    /// One entry per thread.
    workers: Vec<Mix>,
    /// Calls per thread.
    calls: u64,
    /// Clusters used, from the start of the disk.
    clusters: u64,
    /// Maximum clusters per call.
    longest: u64,
}

const WRITES: Mix = Mix { write: 8, read: 3, flush: 1, ..Mix::NOTHING };
const EVERYTHING: Mix = Mix { write: 6, compressed: 2, zero: 2, discard: 2, read: 3, flush: 1 };

/// Runs the plan on a fresh image and checks the result.
fn run(shape: &Shape, plan: &Plan, seed: u64) {
    let (rig, guest) = Rig::new(shape);
    let disk = rig.open(true).expect("opening a good image");
    run_on(&rig, disk, &guest, plan, seed);
}

fn run_on(rig: &Rig, disk: Disk, guest: &Guest, plan: &Plan, seed: u64) {
    let (shape, what) = (&rig.shape, format!("{:?}", rig.shape));
    rig.disks.iter().for_each(|disk| disk.stumble(true));
    let logs = work(shape, plan, &disk, guest, seed, None);
    rig.disks.iter().for_each(|disk| disk.stumble(false));
    let history = History::new(&logs, &guest.0);
    logs.iter().flat_map(|log| &log.seen).for_each(|seen| history.judge(seen, &what));
    let last = settle(&history, &disk, guest, &what);
    disk.close().expect("closing");
    drop(disk);
    rig.audit(false, &what);
    rig.compare(&rig.open(false).expect("opening"), &last, &what);
    rig.ask_qemu(Some(&last), false, &what);
}

fn work(
    shape: &Shape,
    plan: &Plan,
    disk: &Disk,
    guest: &Guest,
    seed: u64,
    ticks: Option<&CrashClock>,
) -> Vec<Log> {
    let stage = Stage {
        disk,
        first: guest,
        cluster: shape.cluster,
        bytes: (plan.clusters * shape.cluster).min(guest.len()) / SECTOR * SECTOR,
        longest: plan.longest * shape.cluster / SECTOR,
        clock: Clock::default(),
        ticks: ticks.cloned(),
    };
    std::thread::scope(|scope| {
        let stage = &stage;
        let start = |(me, mix): (usize, &Mix)| {
            let (mix, calls) = (*mix, plan.calls);
            scope.spawn(move || stage.work(me as u64, mix, calls, seed))
        };
        let threads: Vec<_> = plan.workers.iter().enumerate().map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Log>| match thread.join() {
            Ok(log) => log,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    })
}

/// After all threads have ended, reads everything, checks it, and returns it.
fn settle(history: &History, disk: &Disk, first: &Guest, what: &str) -> Guest {
    let mut last = first.clone();
    let mut bytes = vec![0xee; first.len() as usize];
    disk.read_at(&mut bytes, 0.into_guest()).expect("reading back");
    for (sector, bytes) in (0u64..).zip(bytes.chunks(SECTOR as usize)) {
        let before = first.read(sector * SECTOR, SECTOR);
        let content = content_of(sector, bytes, &before);
        let (begin, end) = (u64::MAX - 1, u64::MAX);
        history.judge(&Seen { sector, content, begin, end }, what);
    }
    last.write(0, &bytes);
    last
}

fn shape(cluster: u64) -> Shape {
    Shape { cluster, ..Shape::default() }
}

#[test]
fn flushes_while_the_file_grows_over_refcount_blocks() {
    for refcount_bits in [16, 64] {
        support::for_seeds(2, |seed| {
            // A refcount block with 64-bit refcounts covers 32 KiB here.
            let (mut rig, mut guest) = Rig::new(&Shape { refcount_bits, ..shape(512) });
            rig.limits = Limits::default();
            let disk = rig.open(true).expect("opening a good image");
            guest.resize(8 << 20);
            disk.resize(guest.len()).expect("enlarging");
            let flusher = Mix { flush: 1, ..Mix::NOTHING };
            let writer = Mix { write: 1, ..Mix::NOTHING };
            let workers = vec![writer, writer, flusher];
            let plan = Plan { workers, calls: 60, clusters: guest.len() / 512, longest: 512 };
            run_on(&rig, disk, &guest, &plan, seed);
        });
    }
}

#[test]
fn of_overlapping_writes_each_sector_is_one() {
    support::for_seeds(2, |seed| {
        for shape in [
            shape(4096),
            shape(65536),
            Shape { base: Base::Longer, ..shape(4096) },
            Shape { content: Content::Snapshots, ..shape(65536) },
            Shape { extended: true, base: Base::Shorter, ..shape(16384) },
            Shape { data_file: DataFile::Outside, ..shape(4096) },
            Shape { content: Content::Snapshots, encryption: XTS, ..shape(4096) },
            Shape { extended: true, base: Base::Longer, encryption: CBC, ..shape(16384) },
        ] {
            run(
                &shape,
                &Plan { workers: vec![WRITES; 4], calls: 150, clusters: 4, longest: 2 },
                seed,
            );
        }
    });
}

#[test]
fn compressed_clusters_beside_plain_writes() {
    support::for_seeds(2, |seed| {
        for shape in [
            shape(4096),
            shape(65536),
            Shape { zstd: true, base: Base::Equal, ..shape(4096) },
            Shape { extended: true, ..shape(16384) },
            Shape { refcount_bits: 1, ..shape(4096) },
            Shape { content: Content::Snapshots, ..shape(4096) },
        ] {
            let packer = Mix { compressed: 6, read: 1, flush: 1, ..Mix::NOTHING };
            let workers = vec![packer, WRITES, packer, WRITES];
            run(&shape, &Plan { workers, calls: 100, clusters: 8, longest: 2 }, seed);
        }
    });
}

#[test]
fn discards_and_zeroes_beside_writes() {
    support::for_seeds(2, |seed| {
        for shape in [
            shape(4096),
            Shape { version: 2, ..shape(4096) },
            Shape { base: Base::Longer, ..shape(65536) },
            Shape { extended: true, base: Base::Equal, ..shape(16384) },
            Shape { content: Content::Filled, lazy: true, ..shape(4096) },
            Shape { data_file: DataFile::OutsideRaw, ..shape(4096) },
            Shape { base: Base::Shorter, encryption: XTS, ..shape(4096) },
            Shape { content: Content::Filled, encryption: CBC, ..shape(65536) },
        ] {
            let giver = Mix { discard: 4, zero: 4, read: 1, flush: 1, ..Mix::NOTHING };
            let workers = vec![WRITES, giver, WRITES, giver];
            run(&shape, &Plan { workers, calls: 150, clusters: 8, longest: 2 }, seed);
        }
    });
}

#[test]
fn everything_at_once_on_any_mixture_of_options() {
    support::for_seeds(8, |seed| {
        let mut shape = Shape::random(&mut Rng::new(seed));
        shape.wide = false;
        let compressed = if shape.packs() { EVERYTHING.compressed } else { 0 };
        let workers = vec![Mix { compressed, ..EVERYTHING }; 4];
        let clusters = 4 + seed % 60;
        run(&shape, &Plan { workers, calls: 100, clusters, longest: 2 }, seed);
    });
}

/// Power cuts during a run of several threads: flushed data survives.
#[test]
fn a_power_cut_while_threads_write_keeps_what_was_flushed() {
    support::for_seeds(3, |seed| {
        let mut rng = Rng::new(seed);
        let mut shape = Shape::random(&mut rng);
        shape.wide = false;
        let compressed = if shape.packs() { EVERYTHING.compressed } else { 0 };
        let mix = Mix { compressed, flush: 4, ..EVERYTHING };
        let plan = Plan { workers: vec![mix; 3], calls: 30, clusters: 12, longest: 2 };
        let ticks = CrashClock::new();
        let (rig, guest) = Rig::recording(&shape, &ticks);
        let disk = rig.open(true).expect("opening a good image");
        rig.disks.iter().for_each(|disk| disk.stumble(true));
        let logs = work(&shape, &plan, &disk, &guest, seed, Some(&ticks));
        drop(disk);
        let history = History::new(&logs, &guest.0);
        for _ in 0..12 {
            let moment = rng.below(ticks.now() as u64 + 1) as usize;
            let cuts = power_cut(&rig.disks, moment);
            for survival in [Survival::Nothing, Survival::Everything, Survival::Lot] {
                let survivor = rig.with_content(survivors(&cuts, survival, &mut rng));
                let what = format!("{shape:?}, cut at {moment}, surviving: {survival:?}");
                judge_survivor(&survivor, &history.at(moment), &guest, &what);
            }
        }
    });
}

fn judge_survivor(rig: &Rig, moment: &Moment<'_>, first: &Guest, what: &str) {
    let disk = rig.open(true).unwrap_or_else(|error| panic!("{what}: {error}"));
    let mut bytes = vec![0xee; first.len() as usize];
    disk.read_at(&mut bytes, 0.into_guest()).expect("a survivor can be read");
    for (sector, bytes) in (0u64..).zip(bytes.chunks(SECTOR as usize)) {
        let before = first.read(sector * SECTOR, SECTOR);
        let content = content_of(sector, bytes, &before);
        moment.judge(sector, content).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    disk.close().expect("closing a survivor");
    rig.audit(true, what);
}

/// One thread shrinks and grows the disk, while others write before and beyond its end.
#[test]
fn a_resize_beside_writes() {
    support::for_seeds(4, |seed| {
        for shape in [
            shape(512),
            shape(4096),
            Shape { extended: true, ..shape(16384) },
            Shape { encryption: XTS, ..shape(4096) },
        ] {
            let (rig, guest) = Rig::new(&shape);
            let disk = Arc::new(rig.open(true).expect("opening a good image"));
            rig.image().stumble(true);
            let (half, full) = (guest.len() / 2 / SECTOR * SECTOR, guest.len());
            let clusters = (half / shape.cluster).min(8);
            let compressed = if shape.packs() { EVERYTHING.compressed } else { 0 };
            let workers = vec![Mix { compressed, ..EVERYTHING }; 2];
            let plan = Plan { workers, calls: 150, clusters, longest: 2 };
            let logs = std::thread::scope(|scope| {
                let resizer = disk.clone();
                scope.spawn(move || {
                    let mut rng = Rng::new(seed);
                    for _ in 0..30 {
                        resizer.resize(half + rng.below((full - half) / SECTOR) * SECTOR).unwrap();
                        resizer.resize(full).unwrap();
                    }
                });
                let (beyond, mut rng) = (disk.clone(), Rng::new(seed + 1));
                scope.spawn(move || {
                    for _ in 0..300 {
                        let at = half + rng.below((full - half) / SECTOR - 8) * SECTOR;
                        match beyond.write_at(&[0xbb; 4096], at.into_guest()) {
                            Err(Error::Invalid { .. }) => {}
                            result => result.unwrap(),
                        }
                    }
                });
                work(&shape, &plan, &disk, &guest, seed, None)
            });
            rig.image().stumble(false);
            let what = format!("{shape:?}");
            let history = History::new(&logs, &guest.0);
            logs.iter().flat_map(|log| &log.seen).for_each(|seen| history.judge(seen, &what));
            let mut last = vec![0xee; full as usize];
            disk.read_at(&mut last, 0.into_guest()).unwrap();
            let behind = &last[half as usize..];
            assert!(behind.iter().all(|b| matches!(*b, 0 | 0xbb)), "{what}: behind the end");
            // Data cut off by the shrink does not come back.
            disk.resize(half).unwrap();
            disk.resize(full).unwrap();
            disk.read_at(&mut last, 0.into_guest()).unwrap();
            assert!(last[half as usize..].iter().all(|b| *b == 0), "{what}: old bytes came back");
            disk.close().unwrap();
            let mut seen = guest.clone();
            seen.write(0, &last);
            rig.audit(false, &what);
            rig.ask_qemu(Some(&seen), false, &what);
        }
    });
}
