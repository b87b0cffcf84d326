//! The power fails at any storage operation of a random run. Whatever subset of the unsynced
//! sectors and lengths survives: the image opens, is consistent, and holds all flushed data.

mod support;

use std::collections::HashMap;

use support::disks::{Survival, power_cut, survivors};
use support::guest::{Guest, SECTOR};
use support::ops::{self, Op, Span, Step};
use support::rig::{IntoGuest, Rig};
use support::shape::{Base, Content, DataFile, Shape};
use vdkit_block::Format;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{CrashClock, Rng, explained};

type Sector = [u8; SECTOR as usize];

/// A finished operation, and its effect on the guest's content.
struct Done {
    op: Op,
    /// Storage operations before its start and after its end.
    begin: usize,
    end: usize,
    /// Disk size before and after.
    size: (u64, u64),
    touched: Vec<(u64, Sector)>,
}

impl Done {
    /// Whether it makes everything before it durable.
    fn flushes(&self) -> bool {
        matches!(self.op, Op::Flush | Op::Reopen)
    }
}

/// One recorded run.
struct Run {
    rig: Rig,
    clock: CrashClock,
    first: Guest,
    done: Vec<Done>,
}

fn sector_of(guest: &Guest, sector: u64) -> Sector {
    guest.read(sector * SECTOR, SECTOR).try_into().expect("a whole sector")
}

/// The range of bytes that an operation may change.
fn range_of(op: Op, shape: &Shape, size: (u64, u64)) -> std::ops::Range<u64> {
    match op {
        Op::Write { at, len } | Op::Zero { at, len, .. } | Op::Discard { at, len } => at..at + len,
        Op::Compressed { at, clusters } => at..(at + clusters * shape.cluster).min(size.1),
        Op::Resize { to } => to.min(size.0)..to.max(size.0),
        Op::Read { .. } | Op::Flush | Op::Reopen => 0..0,
    }
}

impl Run {
    fn record(shape: &Shape, ops: usize, next: fn(&mut Rng) -> Step, rng: &mut Rng) -> Self {
        let clock = CrashClock::new();
        let (rig, first) = Rig::recording(shape, &clock);
        let mut guest = first.clone();
        let mut disk = rig.open(true).expect("opening a good image");
        let mut done = Vec::new();
        for id in 0..ops {
            let size = guest.len();
            let mut op = next(rng).on(shape, size);
            if shape.version == 2 && shape.base == Base::Longer && matches!(op, Op::Resize { .. }) {
                // Without zero flags the backing data cannot be hidden in advance, as documented.
                op = Op::Flush;
            }
            let begin = clock.now();
            if op == Op::Reopen {
                disk.close().expect("closing");
                drop(disk);
                // Before reopening: the close is tested.
                let (end, touched) = (clock.now(), Vec::new());
                done.push(Done { op, begin, end, size: (size, size), touched });
                disk = rig.open(true).expect("re-opening");
                continue;
            }
            if let Err(error) = ops::apply(shape, &disk, &mut guest, op, id as u64 + 1) {
                panic!("{op:x?}: {error}");
            }
            let size = (size, guest.len());
            let range = range_of(op, shape, size);
            let range = range.start / SECTOR..range.end.div_ceil(SECTOR);
            let touched = range.map(|sector| (sector, sector_of(&guest, sector))).collect();
            done.push(Done { op, begin, end: clock.now(), size, touched });
        }
        Self { rig, clock, first, done }
    }

    /// Expected content after a power cut at a moment.
    fn expect(&self, moment: usize) -> Expected<'_> {
        let mut expected = Expected {
            first: &self.first,
            durable: HashMap::new(),
            since: HashMap::new(),
            sizes: vec![self.first.len()],
            marked: Vec::new(),
            bitmaps_may_go: false,
        };
        let mut written = Vec::new();
        let mut current: HashMap<u64, Sector> = HashMap::new();
        for done in self.done.iter().take_while(|done| done.begin <= moment) {
            for (sector, bytes) in &done.touched {
                expected.since.entry(*sector).or_default().push(*bytes);
                current.insert(*sector, *bytes);
            }
            let returned = done.end <= moment;
            written.push(range_of(done.op, &self.rig.shape, done.size));
            // Bitmap tables are resized with the disk, or removed.
            expected.bitmaps_may_go = !returned && matches!(done.op, Op::Resize { .. });
            if returned && (done.flushes() || matches!(done.op, Op::Resize { .. })) {
                expected.marked.append(&mut written);
            }
            if returned {
                expected.sizes = vec![done.size.1];
            } else {
                expected.sizes = vec![done.size.0, done.size.1];
            }
            if returned && done.flushes() {
                expected.durable.clone_from(&current);
                expected.since.clear();
            }
            if returned && matches!(done.op, Op::Resize { .. }) {
                // A new size is durable, and hides old data durably.
                for (sector, bytes) in &done.touched {
                    expected.durable.insert(*sector, *bytes);
                    expected.since.remove(sector);
                }
            }
        }
        expected
    }
}

/// Expected content of a survivor.
struct Expected<'a> {
    first: &'a Guest,
    durable: HashMap<u64, Sector>,
    since: HashMap<u64, Vec<Sector>>,
    sizes: Vec<u64>,
    /// Ranges that bitmaps must mark, within the disk.
    marked: Vec<std::ops::Range<u64>>,
    bitmaps_may_go: bool,
}

impl Expected<'_> {
    /// Recording bitmaps are consistent, and mark everything flushed.
    fn check_bitmaps(&self, rig: &Rig) {
        if !rig.shape.bitmap {
            return;
        }
        let format = rig.format(false).expect("a survivor opens");
        let bitmaps = format.bitmaps().expect("a format with bitmaps");
        let list = bitmaps.list().expect("bitmaps of a survivor");
        if list.is_empty() && self.bitmaps_may_go {
            return;
        }
        let names: Vec<&str> = list.iter().map(|b| b.info.name.as_str()).collect();
        assert_eq!(names, ["dirt", "fine"]);
        for bitmap in &list {
            assert!(bitmap.info.enabled && !bitmap.info.in_use, "{bitmap:?}");
            let mut found = Vec::new();
            let mut add = |run| {
                found.push(run);
                Ok(())
            };
            bitmaps.for_each_dirty(&bitmap.info.name, &mut add).expect("a sound bitmap");
            for range in &self.marked {
                let range =
                    range.start.min(format.guest_bytes())..range.end.min(format.guest_bytes());
                let within =
                    |run: &std::ops::Range<u64>| run.start <= range.start && range.end <= run.end;
                assert!(
                    range.is_empty() || found.iter().any(within),
                    "{} does not mark {range:x?}, only {found:x?}",
                    bitmap.info.name
                );
            }
        }
    }

    fn allows(&self, sector: u64, found: &[u8]) -> bool {
        let durable = match self.durable.get(&sector) {
            Some(bytes) => found == bytes,
            None => found == sector_of(self.first, sector),
        };
        durable || self.since.get(&sector).is_some_and(|all| all.iter().any(|bytes| found == bytes))
    }

    /// Reads a whole survivor and returns its guest content.
    fn check(&self, rig: &Rig) -> Guest {
        let disk = rig.open(false).expect("a survivor opens");
        let size = disk.guest_bytes();
        assert!(self.sizes.contains(&size), "size {size:#x}, expected one of {:x?}", self.sizes);
        let seen = Guest(MemoryStorage::with_len("seen", size));
        let mut seen = seen;
        for window in rig.shape.windows(size) {
            let mut buf = vec![0; (window.end - window.start) as usize];
            disk.read_at(&mut buf, window.start.into_guest()).expect("a survivor can be read");
            for (i, found) in buf.chunks(SECTOR as usize).enumerate() {
                let sector = window.start / SECTOR + i as u64;
                if !self.allows(sector, found) {
                    let wanted = self.durable.get(&sector).copied();
                    let wanted = wanted.unwrap_or_else(|| sector_of(self.first, sector));
                    let since = self.since.get(&sector).map_or(0, Vec::len);
                    panic!(
                        "guest sector at {:#x} holds {:02x?}.., flushed was {:02x?}.., and \
                         none of {since} contents since",
                        sector * SECTOR,
                        &found[..8],
                        &wanted[..8],
                    );
                }
            }
            seen.write(window.start, &buf);
        }
        seen
    }
}

/// A survivor must be usable: readable, consistent, and writable.
fn try_survivor(run: &Run, expected: &Expected<'_>, content: Vec<MemoryStorage>, rng: &mut Rng) {
    let rig = run.rig.with_content(content);
    let mut guest = expected.check(&rig);
    expected.check_bitmaps(&rig);
    let dirty = dirty_bit(&rig);
    if !dirty {
        rig.audit(true, "the survivor");
    }
    if rng.chance(1, 40) && !dirty {
        rig.ask_qemu(Some(&guest), true, "the survivor");
    }
    if dirty || rng.chance(1, 6) {
        let disk = rig.open(true).expect("a survivor opens for writing");
        for id in 0..5 {
            let op = ops::random_step(rng).on(&rig.shape, guest.len());
            if op != Op::Reopen {
                ops::apply(&rig.shape, &disk, &mut guest, op, 1000 + id).expect("writing on");
            }
        }
        rig.compare(&disk, &guest, "a survivor that was written to");
        disk.close().expect("closing a survivor");
        drop(disk);
        rig.audit(true, "a survivor that was closed");
        rig.compare(&rig.open(false).expect("opening"), &guest, "a survivor that was closed");
        if rng.chance(1, 10) {
            rig.ask_qemu(Some(&guest), true, "a survivor that was closed");
        }
    }
}

fn dirty_bit(rig: &Rig) -> bool {
    let mut bits = [0; 8];
    let storage = rig.image().storage();
    storage.read_padded(&mut bits, vdkit_block::HostOffset(72)).expect("memory");
    rig.shape.version == 3 && bits[7] & 1 != 0
}

/// Moments to test: first those within flushes, closing and resizing, where the order matters.
fn moments(run: &Run, most: usize, rng: &mut Rng) -> Vec<usize> {
    let all = run.clock.now();
    if all <= most {
        return (0..=all).collect();
    }
    let order_matters = |done: &&Done| done.flushes() || matches!(done.op, Op::Resize { .. });
    let inside: Vec<usize> =
        run.done.iter().filter(order_matters).flat_map(|done| done.begin..=done.end).collect();
    let mut chosen: Vec<usize> = (0..most)
        .map(|i| match inside.len() as u64 {
            n if n > 0 && i % 3 != 0 => inside[rng.below(n) as usize],
            _ => rng.below(all as u64 + 1) as usize,
        })
        .collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

/// Operations of a run, and the number of power cuts.
#[derive(Clone, Copy)]
struct Plan {
    next: fn(&mut Rng) -> Step,
    ops: u64,
    moments: usize,
}

const ANYTHING: Plan = Plan { next: ops::random_step, ops: 20, moments: 40 };

/// Compressed clusters over plain ones and the reverse, at one offset, and small writes at many
/// others, so that space with old bytes is partly reused.
fn packing_step(rng: &mut Rng) -> Step {
    let bits = rng.next_u64();
    let (at, inside, len) = (bits as u16, (bits >> 16) as u16, (bits >> 32) as u16);
    // Lengths by their last bits: 0 is small, 3 a cluster, 5 up to six clusters.
    let here = |kind: u16| Span { at: at % 6, inside, len: len & !7 | kind, kind: 0 };
    match rng.below(10) {
        0 | 1 => Step::Compressed(here(3)),
        2 => Step::Compressed(here(5)),
        3 => Step::Write(here(3)),
        4 | 5 => Step::Write(Span { at, inside, len: len & !7, kind: 0x30 }),
        6 => Step::Discard(here(5)),
        _ => Step::Flush,
    }
}

/// Many sizes, so that disks often end within a cluster that has data.
fn resizing_step(rng: &mut Rng) -> Step {
    match rng.below(3) {
        0 => Step::Resize(rng.next_u64() as u16),
        _ => ops::random_step(rng),
    }
}

fn case(shape: &Shape, plan: Plan, seed: u64) {
    let mut rng = Rng::new(seed);
    let ops = 6 + rng.below(plan.ops) as usize;
    let run = Run::record(shape, ops, plan.next, &mut rng);
    for moment in moments(&run, plan.moments, &mut rng) {
        let cuts = power_cut(&run.rig.disks, moment);
        let expected = run.expect(moment);
        for survival in Survival::SOME {
            let content = survivors(&cuts, survival, &mut rng);
            let about = || {
                let done = run.done.iter().take_while(|done| done.begin <= moment);
                let done: String = done
                    .map(|done| format!("\n  {:4}..{:<4} {:x?}", done.begin, done.end, done.op))
                    .collect();
                format!("{shape:?}\npower cut at {moment}, surviving: {survival:?}{done}")
            };
            explained(about, || try_survivor(&run, &expected, content, &mut rng));
        }
    }
}

/// Shapes without large clusters, whose survivors take long to make.
fn shapes() -> Vec<Shape> {
    Shape::all().into_iter().filter(|shape| shape.cluster <= 65536 && !shape.wide).collect()
}

#[test]
fn each_kind_of_image_survives_a_power_cut() {
    let shapes = shapes();
    support::for_seeds(6, |seed| case(&shapes[seed as usize % shapes.len()], ANYTHING, seed));
}

#[test]
fn encrypted_images_survive_a_power_cut() {
    let shapes = Shape::encrypted();
    support::for_seeds(6, |seed| case(&shapes[seed as usize % shapes.len()], ANYTHING, seed));
}

/// What was never written decrypts to noise.
#[test]
fn encrypted_images_that_are_resized_survive_a_power_cut() {
    let plan = Plan { next: resizing_step, ..ANYTHING };
    let shapes = Shape::encrypted();
    support::for_seeds(6, |seed| case(&shapes[seed as usize % shapes.len()], plan, seed));
}

#[test]
fn bitmaps_mark_what_was_flushed_before_a_power_cut() {
    let shapes: Vec<Shape> = shapes()
        .into_iter()
        .filter(|shape| shape.version == 3 && shape.cluster <= 4096 || shape.bitmap)
        .map(|shape| Shape { bitmap: true, ..shape })
        .collect();
    support::for_seeds(24, |seed| case(&shapes[seed as usize % shapes.len()], ANYTHING, seed));
}

#[test]
fn any_mixture_of_options_survives_a_power_cut() {
    support::for_seeds(6, |seed| {
        let mut shape = Shape::random(&mut Rng::new(seed));
        shape.wide = false;
        case(&shape, ANYTHING, seed);
    });
}

#[test]
fn clusters_of_two_mebibytes_survive_a_power_cut() {
    let large = |shape: &Shape| shape.cluster == 2 << 20;
    let shapes: Vec<Shape> = Shape::all().into_iter().filter(large).collect();
    support::for_seeds(1, |seed| {
        let shape = Shape {
            extended: seed % 8 == 7,
            version: 3,
            base: [Base::None, Base::Longer][seed as usize / 8 % 2],
            ..shapes[seed as usize % shapes.len()].clone()
        };
        case(&shape, Plan { ops: 10, moments: 4, ..ANYTHING }, seed);
    });
}

#[test]
fn data_files_survive_a_power_cut() {
    let outside = |shape: &Shape| shape.data_file != DataFile::Inside;
    let shapes: Vec<Shape> = shapes().into_iter().filter(outside).collect();
    support::for_seeds(4, |seed| {
        let plan = Plan { moments: 20, ..ANYTHING };
        case(&shapes[seed as usize % shapes.len()], plan, seed);
    });
}

#[test]
fn compressed_writes_survive_a_power_cut() {
    support::for_seeds(6, |seed| {
        let shape = Shape {
            cluster: [512, 4096, 4096, 16384][seed as usize % 4],
            extended: seed % 8 == 3,
            zstd: seed % 3 == 0,
            refcount_bits: [16, 1, 8][seed as usize / 8 % 3],
            content: Content::Empty,
            ..Shape::default()
        };
        let plan = Plan { next: packing_step, ops: 40, moments: 16 };
        case(&shape, plan, seed);
    });
}
