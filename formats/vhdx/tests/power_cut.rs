//! Cuts the power at any storage operation of a random run, and once more during the replay.
//! Whatever subset of the unsynced sectors and lengths survives, the image opens, is sound, and
//! holds everything that was flushed.

mod common;

use std::collections::HashMap;
use std::sync::Arc;

use common::{Kind, Op, SECTOR, amend, apply, for_seeds, open_format, random_op, same, sound};
use vdkit_block::{BackingRef, FormatDriver, GuestOffset, Limits, Storage};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashImage, CrashStorage, Rng, explained, qemu, require_peer, save_sparse};
use vdkit_vhdx::VhdxDriver;

/// A completed operation, and the later content of the sectors that it may have changed.
struct Done {
    op: Op,
    begin: usize,
    end: usize,
    size: (u64, u64),
    touched: Vec<(usize, Vec<u8>)>,
}

impl Done {
    fn flushes(&self) -> bool {
        matches!(self.op, Op::Flush | Op::Reopen | Op::Abandon)
    }
}

struct Run {
    crash: Arc<CrashStorage>,
    first: Vec<u8>,
    done: Vec<Done>,
}

fn sectors(guest: &[u8], from: u64, to: u64) -> Vec<(usize, Vec<u8>)> {
    let last = to.div_ceil(SECTOR as u64) as usize;
    (from as usize / SECTOR..last)
        .map(|n| {
            let mut bytes = guest[n * SECTOR..((n + 1) * SECTOR).min(guest.len())].to_vec();
            bytes.resize(SECTOR, 0);
            (n, bytes)
        })
        .collect()
}

impl Run {
    fn record(kind: &Kind, rng: &mut Rng) -> Self {
        let made: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        kind.create(&made);
        let crash = CrashStorage::holding(&*made);
        let storage: Arc<dyn Storage> = crash.clone();
        let mut guest = kind.guest();
        let first = guest.clone();
        let mut disk = kind.open(&storage, true).expect("opening");
        let mut done = Vec::new();
        for id in 0..8 + rng.below(14) {
            let size = guest.len() as u64;
            let op = random_op(rng, size, true);
            let begin = crash.ops();
            let mut touched = Vec::new();
            match op {
                Op::Reopen | Op::Abandon => {
                    if op == Op::Reopen { disk.close() } else { disk.flush() }.expect("flushing");
                    drop(disk);
                    let end = crash.ops();
                    done.push(Done { op, begin, end, size: (size, size), touched });
                    disk = kind.open(&storage, true).expect("opening again");
                    continue;
                }
                op => {
                    if let Err(error) = apply(&disk, &mut guest, op, id + 1) {
                        panic!("{op:x?}: {error}");
                    }
                }
            }
            let now = guest.len() as u64;
            match op {
                Op::Write { at, len } | Op::Zero { at, len, .. } | Op::Discard { at, len } => {
                    touched = sectors(&guest, at, at + len);
                }
                Op::Resize { .. } if now > size => touched = sectors(&guest, size, now),
                _ => {}
            }
            done.push(Done { op, begin, end: crash.ops(), size: (size, now), touched });
        }
        Self { crash, first, done }
    }

    /// What was begun before a moment, for messages.
    fn before(&self, moment: usize) -> String {
        let done = self.done.iter().take_while(|done| done.begin <= moment);
        done.map(|done| format!("\n  {:4}..{:<4} {:x?}", done.begin, done.end, done.op)).collect()
    }

    fn expect(&self, moment: usize) -> Expected<'_> {
        let mut expected = Expected {
            first: &self.first,
            durable: HashMap::new(),
            since: HashMap::new(),
            sizes: vec![self.first.len() as u64],
        };
        let mut current: HashMap<usize, Vec<u8>> = HashMap::new();
        for done in self.done.iter().take_while(|done| done.begin <= moment) {
            let resizes = matches!(done.op, Op::Resize { .. });
            for (sector, bytes) in &done.touched {
                expected.since.entry(*sector).or_default().push(bytes.clone());
                current.insert(*sector, bytes.clone());
            }
            let returned = done.end <= moment;
            expected.sizes =
                if returned { vec![done.size.1] } else { vec![done.size.0, done.size.1] };
            if returned && done.flushes() {
                expected.durable.clone_from(&current);
                expected.since.clear();
            }
            if returned && resizes {
                for (sector, bytes) in &done.touched {
                    expected.durable.insert(*sector, bytes.clone());
                    expected.since.remove(sector);
                }
            }
        }
        expected
    }
}

struct Expected<'a> {
    first: &'a [u8],
    durable: HashMap<usize, Vec<u8>>,
    since: HashMap<usize, Vec<Vec<u8>>>,
    sizes: Vec<u64>,
}

impl Expected<'_> {
    /// Reads a whole survivor and returns its guest content.
    fn check(&self, disk: &Disk) -> Vec<u8> {
        let size = disk.guest_bytes();
        assert!(self.sizes.contains(&size), "size {size:#x}, expected one of {:x?}", self.sizes);
        let mut seen = vec![0; size as usize];
        disk.read_at(&mut seen, GuestOffset(0)).expect("a survivor can be read");
        for (sector, found) in seen.chunks(SECTOR).enumerate() {
            let durable = match self.durable.get(&sector) {
                Some(bytes) => found == bytes,
                None => {
                    let start = sector * SECTOR;
                    let first = self.first.get(start..start + SECTOR);
                    first.is_none_or(|first| found == first)
                }
            };
            let since = self.since.get(&sector);
            let allowed = durable || since.is_some_and(|all| all.iter().any(|b| found == b));
            assert!(
                allowed,
                "sector at {:#x} holds {:02x?}.., not what was flushed, nor any of {} since",
                sector * SECTOR,
                &found[..8],
                since.map_or(0, Vec::len),
            );
        }
        seen
    }
}

fn survivors(cut: &CrashImage, rng: &mut Rng) -> Vec<MemoryStorage> {
    let mut all = vec![cut.only_durable(), cut.everything(), cut.survivor(rng), cut.survivor(rng)];
    all.push(cut.extreme(rng.below(cut.extremes_count() as u64) as usize).1);
    all
}

fn try_survivor(kind: &Kind, expected: &Expected<'_>, content: MemoryStorage, rng: &mut Rng) {
    let storage: Arc<dyn Storage> = Arc::new(content.clone());
    let before = content.len().expect("a length");
    let mut guest = expected.check(&kind.open(&storage, false).expect("a survivor opens"));
    sound(&storage, true, "the survivor");
    assert_eq!(storage.len().expect("a length"), before, "reading changes nothing");
    if rng.chance(1, 4) {
        cut_while_replaying(kind, &content, &guest, rng);
    }
    // QEMU supports neither differencing images nor sectors of 4 KiB.
    let qemu_reads = kind.parent.is_none() && !kind.options.contains("4096");
    if rng.chance(1, 25) && qemu_reads {
        replayed_by_qemu(&content, &guest);
    }
    if rng.chance(1, 4) {
        let disk = kind.open(&storage, true).expect("a survivor opens for writing");
        same(&disk, &guest, "replayed");
        for id in 0..5 {
            let op = random_op(rng, guest.len() as u64, true);
            if !matches!(op, Op::Reopen | Op::Abandon) {
                apply(&disk, &mut guest, op, 1000 + id).expect("writing on");
            }
        }
        same(&disk, &guest, "written on");
        disk.close().expect("closing a survivor");
        drop(disk);
        sound(&storage, true, "a survivor that was closed");
        same(&kind.open(&storage, false).expect("opening"), &guest, "closed");
    }
}

/// A power cut during the replay: repeating it gives the same result.
fn cut_while_replaying(kind: &Kind, content: &MemoryStorage, guest: &[u8], rng: &mut Rng) {
    let crash = CrashStorage::holding(content);
    let storage: Arc<dyn Storage> = crash.clone();
    drop(open_format(&storage, true).expect("replaying"));
    crash.for_each_crash(|_, cut| {
        for survivor in [cut.only_durable(), cut.everything(), cut.survivor(rng)] {
            let storage: Arc<dyn Storage> = Arc::new(survivor);
            same(&kind.open(&storage, false).expect("opening"), guest, "replayed half-way");
            same(&kind.open(&storage, true).expect("opening"), guest, "replayed again");
        }
    });
}

/// QEMU replays the log with the same result.
fn replayed_by_qemu(content: &MemoryStorage, guest: &[u8]) {
    if !require_peer("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (image, raw) = (folder.path().join("image.vhdx"), folder.path().join("guest.raw"));
    save_sparse(content, &image);
    std::fs::write(&raw, guest).expect("a scratch file");
    let checked = qemu::check(&image, "vhdx", Some("all"));
    assert_eq!(checked.code, 0, "qemu-img check -r all: {}", checked.text);
    assert!(qemu::same((&image, "vhdx"), (&raw, "raw")), "replayed by QEMU");
    let storage: Arc<dyn Storage> =
        Arc::new(MemoryStorage::from_bytes("image", &std::fs::read(&image).expect("reading")));
    sound(&storage, true, "replayed by QEMU");
}

fn case(kind: &Kind, seed: u64) {
    let mut rng = Rng::new(seed);
    let run = Run::record(kind, &mut rng);
    let all = run.crash.ops();
    let mut moments: Vec<usize> = (0..16).map(|_| rng.below(all as u64 + 1) as usize).collect();
    // Order matters around flushes, closing, opening and resizing.
    let edges = run.done.iter().filter(|d| d.flushes() || matches!(d.op, Op::Resize { .. }));
    let inside: Vec<usize> =
        edges.flat_map(|d| d.begin..=d.end + 8).filter(|m| *m <= all).collect();
    if !inside.is_empty() {
        moments.extend((0..24).map(|_| inside[rng.below(inside.len() as u64) as usize]));
    }
    moments.sort_unstable();
    moments.dedup();
    let mut replay = run.crash.replay();
    for moment in moments {
        let cut = replay.at(moment);
        let expected = run.expect(moment);
        for survivor in survivors(cut, &mut rng) {
            let about =
                || format!("{kind:?}\npower cut at {moment} of {all}{}", run.before(moment));
            explained(about, || try_survivor(kind, &expected, survivor, &mut rng));
        }
    }
}

#[test]
fn every_kind_survives_a_power_cut() {
    let kinds = Kind::all();
    for_seeds(4, |seed| case(&kinds[seed as usize % kinds.len()], seed));
}

/// The name of an image's parent.
fn parent_of(storage: &Arc<dyn Storage>) -> Option<String> {
    VhdxDriver.describe(storage, &Limits::default()).expect("describing").backing_file
}

/// The parent is changed or removed: a survivor has the old or the new parent, keeps its data, and
/// can be amended again.
#[test]
fn a_change_of_the_parent_is_done_or_not_begun() {
    let other = BackingRef {
        name: "other/place.vhdx".to_owned(),
        identity: Some("fedcba98-7654-3210-fedc-ba9876543210".to_owned()),
        ..common::parent_ref()
    };
    for to in [Some(other), None] {
        let made: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        common::create(&made, 4 * common::MIB, "block_size=1M", Some(common::parent_ref()));
        // Opened without its parent: missing data reads as zero, as after removing the parent.
        let alone = |storage: &Arc<dyn Storage>, writable| {
            common::disk_of(open_format(storage, writable).expect("opening"), writable)
        };
        let disk = alone(&made, true);
        for (at, len) in [(0, 512), (700 * 512, 9000), (common::MIB, 1 << 20), (5000 * 512, 4096)] {
            disk.write_at(&common::pattern(at, at, len), GuestOffset(at)).expect("writing");
        }
        disk.close().expect("closing");
        let mut guest = vec![0; disk.guest_bytes() as usize];
        disk.read_at(&mut guest, GuestOffset(0)).expect("reading");
        drop(disk);
        let (old, new) = (parent_of(&made), to.as_ref().map(|to| to.name.clone()));
        assert_ne!(old, new);
        let crash = CrashStorage::holding(&*made);
        let storage: Arc<dyn Storage> = crash.clone();
        amend(&storage, to.clone());
        assert_eq!(parent_of(&storage), new);
        let mut rng = Rng::new(11);
        let (mut before, mut after) = (0, 0);
        crash.for_each_crash(|moment, cut| {
            for survivor in survivors(cut, &mut rng) {
                let storage: Arc<dyn Storage> = Arc::new(survivor);
                let what = format!("cut at {moment} of {}", crash.ops());
                let found = parent_of(&storage);
                assert!(found == old || found == new, "{what}: stands on {found:?}");
                before += u32::from(found == old);
                after += u32::from(found == new);
                sound(&storage, true, &what);
                same(&alone(&storage, false), &guest, &what);
                amend(&storage, to.clone());
                assert_eq!(parent_of(&storage), new, "{what}: amended again");
                sound(&storage, true, &what);
                same(&alone(&storage, true), &guest, &what);
            }
        });
        assert!(before > 0 && after > 0, "{before} survivors before, {after} after");
    }
}
