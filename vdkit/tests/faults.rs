//! EIO and ENOSPC at each storage call in turn, on every kind of image, in every operation.
//!
//! After each fault: a clear error, an image as after a crash, no byte that is neither old nor new.
//! Without the fault the same call works and the result is complete.

mod support;

use support::guest::{Guest, assert_same, pattern};
use support::ops::{self, Op};
use support::rig::{IntoGuest, Rig};
use support::shape::{Base, CBC, Content, DataFile, Shape, XTS};
use vdkit_block::{ErrorKind, Result};
use vdkit_chain::Disk;
use vdkit_testkit::{FaultKind, FaultPlan, Rng};

/// Kinds of calls that fail together.
const KINDS: [&[FaultKind]; 4] = [
    &[FaultKind::Write],
    &[FaultKind::Read],
    &[FaultKind::Sync],
    &[FaultKind::Zero, FaultKind::Discard, FaultKind::Allocate, FaultKind::SetLen],
];

/// What one fault is.
#[derive(Clone, Debug)]
struct Fault {
    /// The faulty file: the image, or its data file.
    disk: usize,
    kinds: &'static [FaultKind],
    nth: u64,
    /// ENOSPC, else EIO.
    no_space: bool,
    /// Lasting until healed, else once.
    lasting: bool,
}

/// Every operation, at overlapping offsets.
fn script(shape: &Shape) -> Vec<Op> {
    let (cluster, size) = (shape.cluster, shape.guest_bytes());
    // Small clusters are written in numbers, so that refcounts fill their blocks.
    let unit = cluster.max(8192);
    let whole = size / unit / 2 * unit;
    let mut script = vec![
        Op::Write { at: unit / 2, len: 3 * unit },
        Op::Compressed { at: 5 * unit, clusters: 3 },
        Op::Write { at: 5 * unit + cluster + 100, len: cluster / 2 },
        Op::Zero { at: 8 * unit - 700, len: 2 * unit, may_unmap: true },
        Op::Zero { at: unit, len: 700, may_unmap: false },
        Op::Flush,
        Op::Discard { at: unit, len: 3 * unit },
        Op::Flush,
        Op::Write { at: 2 * unit + 512, len: 2 * unit },
        Op::Compressed { at: unit, clusters: 2 },
        Op::Compressed { at: 5 * unit + cluster, clusters: 1 },
        Op::Write { at: size - 3000, len: 2000 },
        Op::Reopen,
        Op::Resize { to: whole + 1024 },
        Op::Write { at: whole - 512, len: 1024 },
        // With small clusters the L1 table grows too.
        Op::Resize { to: size + (1 << 20) },
        Op::Write { at: size + (1 << 19) - 100, len: 3000 },
        Op::Zero { at: whole, len: size / 4, may_unmap: true },
        Op::Flush,
        Op::Write { at: whole + unit, len: 600 },
    ];
    if !shape.packs() {
        script.retain(|op| !matches!(op, Op::Compressed { .. }));
    }
    script
}

/// The bytes that a failed operation may have changed.
fn range_of(op: Op, shape: &Shape, guest: &Guest) -> std::ops::Range<u64> {
    let range = match op {
        Op::Write { at, len } | Op::Zero { at, len, .. } | Op::Discard { at, len } => at..at + len,
        Op::Compressed { at, clusters } => at..at + clusters * shape.cluster,
        Op::Resize { .. } | Op::Read { .. } | Op::Flush | Op::Reopen => 0..0,
    };
    range.start.min(guest.len())..range.end.min(guest.len())
}

/// One run with one fault.
struct Run<'a> {
    shape: &'a Shape,
    rig: Rig,
    guest: Guest,
    what: String,
    disk_with_fault: usize,
}

impl Run<'_> {
    fn faulty(&self) -> &vdkit_testkit::FaultyStorage {
        self.rig.disks[self.disk_with_fault].faulty()
    }

    /// Repeats a call until it works: first with the fault, then without.
    fn insist<T>(&mut self, op: &str, mut call: impl FnMut(&mut Self) -> Result<T>) -> T {
        let error = match call(self) {
            Ok(value) => return value,
            Err(error) => error,
        };
        let what = format!("{}: {op}", self.what);
        assert!(self.faulty().fired() > 0, "{what}: {error}, without a fault");
        let name = if self.disk_with_fault == 0 { "image.qcow2" } else { "data.raw" };
        let (text, kind) = (error.to_string(), error.kind());
        assert!(text.contains(name), "{what}: '{text}' does not name {name}");
        let no_space = self.what.contains("no_space: true");
        let wanted = if no_space { ErrorKind::NoSpace } else { ErrorKind::Failed };
        assert_eq!(kind, wanted, "{what}: {text}");
        self.faulty().heal();
        // A crash now must leave a consistent image.
        self.rig.audit(true, &format!("{what}, failed"));
        call(self).unwrap_or_else(|error| panic!("{what}, healed: {error}"))
    }

    fn operate(&mut self, disk: &Disk, op: Op, id: u64) {
        let mut tries = 0;
        self.insist(&format!("{op:x?}"), |run| {
            if tries > 0 && !matches!(op, Op::Resize { .. }) {
                run.old_or_new(disk, op, id);
                run.write_elsewhere(disk, op, id);
            }
            tries += 1;
            ops::apply(run.shape, disk, &mut run.guest, op, id)
        });
    }

    /// After a failed operation each byte in its range is old or new, and each other byte old.
    fn old_or_new(&self, disk: &Disk, op: Op, id: u64) {
        let what = format!("{}: {op:x?}, failed", self.what);
        let range = range_of(op, self.shape, &self.guest);
        let (start, written) = ops::payload(self.shape, op, id, self.guest.len());
        let mut found = vec![0xee; disk.guest_bytes() as usize];
        disk.read_at(&mut found, 0.into_guest()).expect("reading after a fault");
        let old = self.guest.read(0, self.guest.len());
        for (at, (found, old)) in (0u64..).zip(found.iter().zip(&old)) {
            let inside = range.contains(&at);
            let new = at.checked_sub(start).and_then(|i| written.get(i as usize)).copied();
            let fine = found == old || (inside && *found == new.unwrap_or(0));
            assert!(fine, "{what}: byte {at:#x} is {found:#x}, was {old:#x}, new {new:x?}");
        }
    }

    /// Writes part of another cluster that reads as zero: its space must not contain data of the
    /// failed operation.
    fn write_elsewhere(&mut self, disk: &Disk, op: Op, id: u64) {
        let cluster = self.shape.cluster;
        let range = range_of(op, self.shape, &self.guest);
        let mut places = (0..self.guest.len() / cluster).rev().map(|c| c * cluster);
        let unused = |at: &u64| {
            (at + cluster <= range.start || range.end <= *at) && self.guest.reads_zero(*at, cluster)
        };
        let Some(at) = places.find(unused) else { return };
        let (inside, mut found) = (at + cluster - 100, vec![0xee; cluster as usize]);
        let bytes = pattern(1000 + id, inside, 100);
        disk.write_at(&bytes, inside.into_guest()).expect("writing elsewhere");
        self.guest.write(inside, &bytes);
        disk.read_at(&mut found, at.into_guest()).expect("reading elsewhere");
        let what = format!("{}: written elsewhere", self.what);
        assert_same(&what, at, &found, &self.guest.read(at, cluster));
    }
}

/// Runs the script with a fault. Returns whether it fired.
fn run(shape: &Shape, fault: &Fault) -> bool {
    let (rig, guest) = Rig::new(shape);
    let what = format!("{shape:?}: {fault:?}");
    let mut run = Run { shape, rig, guest, what: what.clone(), disk_with_fault: fault.disk };
    let plan = FaultPlan::nth(fault.kinds, fault.nth).torn(1);
    let plan = if fault.no_space { plan.no_space() } else { plan };
    run.faulty().arm(if fault.lasting { plan.lasting() } else { plan });
    let mut disk = run.insist("opening", |run| run.rig.open(true));
    for (id, op) in (1..).zip(script(shape)) {
        if op == Op::Reopen {
            run.insist("closing", |_| disk.close());
            drop(disk);
            disk = run.insist("opening again", |run| run.rig.open(true));
        } else {
            run.operate(&disk, op, id);
        }
    }
    run.insist("closing", |_| disk.close());
    drop(disk);
    let fired = run.faulty().fired() > 0;
    run.faulty().heal();
    run.rig.audit(true, &format!("{what}: closed"));
    run.rig.compare(&run.rig.open(false).expect("opening"), &run.guest, &what);
    fired
}

/// Fails each call in turn: all of the first, then samples, since small clusters cause thousands.
fn each_call_fails(shape: &Shape) {
    support::for_seeds(1, |seed| {
        let mut rng = Rng::new(seed);
        let disks = if shape.data_file == DataFile::Inside { 1 } else { 2 };
        for disk in 0..disks {
            for kinds in KINDS {
                let mut nth = 0;
                loop {
                    let (no_space, lasting) = (rng.chance(1, 2), rng.chance(2, 3));
                    if !run(shape, &Fault { disk, kinds, nth, no_space, lasting }) {
                        break;
                    }
                    nth += 1 + rng.below(1 + nth / 8);
                }
            }
        }
    });
}

fn shape(cluster: u64, content: Content) -> Shape {
    Shape { cluster, content, ..Shape::default() }
}

#[test]
fn on_clusters_shared_with_snapshots() {
    each_call_fails(&shape(4096, Content::Snapshots));
}

#[test]
fn on_large_clusters_shared_with_snapshots() {
    each_call_fails(&shape(65536, Content::Snapshots));
}

#[test]
fn on_smallest_clusters() {
    each_call_fails(&Shape { refcount_bits: 64, ..shape(512, Content::Filled) });
}

#[test]
fn on_an_empty_image() {
    each_call_fails(&shape(16384, Content::Empty));
}

#[test]
fn on_a_data_file() {
    each_call_fails(&Shape { data_file: DataFile::Outside, ..shape(65536, Content::Filled) });
}

#[test]
fn on_a_raw_data_file() {
    each_call_fails(&Shape { data_file: DataFile::OutsideRaw, ..shape(4096, Content::Empty) });
}

#[test]
fn on_lazy_refcounts_over_a_backing_image() {
    let base = Base::Longer;
    each_call_fails(&Shape { lazy: true, base, ..shape(4096, Content::Filled) });
}

#[test]
fn on_subclusters_over_a_backing_image() {
    let base = Base::Shorter;
    each_call_fails(&Shape { extended: true, base, ..shape(16384, Content::Snapshots) });
}

#[test]
fn on_zstd_and_wide_refcounts() {
    let shape = shape(4096, Content::Filled);
    each_call_fails(&Shape { zstd: true, refcount_bits: 64, bitmap: true, ..shape });
}

#[test]
fn on_encrypted_clusters_shared_with_snapshots() {
    each_call_fails(&Shape { encryption: XTS, ..shape(4096, Content::Snapshots) });
}

#[test]
fn on_encrypted_subclusters_over_a_backing_image() {
    let shape = shape(16384, Content::Filled);
    each_call_fails(&Shape { extended: true, base: Base::Longer, encryption: CBC, ..shape });
}

#[test]
fn on_an_encrypted_data_file() {
    let shape = shape(65536, Content::Empty);
    each_call_fails(&Shape { data_file: DataFile::Outside, encryption: XTS, ..shape });
}
