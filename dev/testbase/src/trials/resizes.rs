//! Other sizes: grown, made smaller and grown again, in one session and over several, on a storage that
//! fails, and with the power cut at each change of the file. Sizes are those where tables need
//! another sector, cluster, block or region; disks may be large, since storages are sparse.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{
    GuestOffset, HostOffset, Place, Repair, SpaceMap, Storage, StorageExt, StorageExtent, is_zero,
};
use vdkit_chain::Disk;
use vdkit_storage::MemoryStorage;

use super::{SECTOR, Trial, pattern};
use crate::{
    CrashImage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng, first_difference, read_all,
};

/// Bytes of one mark.
const MARK: u64 = 4096;
/// Moments of one resize at which the power is cut, at most.
const MOMENTS_MAX: usize = 10;

/// Images whose sizes change.
#[derive(Clone, Copy, Debug)]
pub struct Resizes<'a> {
    /// The images, of their first size.
    pub trial: Trial,
    /// What they become, one after the other.
    pub sizes: &'a [u64],
    /// What a power cut may cost.
    pub cut: Cut,
}

/// What a resize may leave of a disk where the power is cut in it. It has the old size or the new one in
/// any case, and the bytes that both have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// All that the old disk held, where it has the old size; zeroes, where the new one has more.
    Nothing,
    /// What a smaller size cuts off may be gone, while the disk still has it: its only metadata takes that
    /// place.
    CutOff,
    /// As that, and what the new size shows may be noise: no metadata says that it is not written yet.
    All,
}

/// Where marks are written to a disk of so many bytes: at both ends, and in between.
fn places(bytes: u64) -> Vec<Range<u64>> {
    let mut places: Vec<Range<u64>> = Vec::new();
    for at in [0, bytes / 3, bytes / 2, bytes / 8 * 7, bytes.saturating_sub(MARK)] {
        let at = at / SECTOR * SECTOR;
        let range = at..(at + MARK).min(bytes);
        if places.last().is_none_or(|last| last.end <= range.start) && !range.is_empty() {
            places.push(range);
        }
    }
    places
}

fn mark(disk: &Disk, model: &MemoryStorage, op: u64, what: &str) {
    for place in places(disk.guest_bytes()) {
        let bytes = pattern(op, place.start, place.end - place.start);
        disk.write_at(&bytes, GuestOffset(place.start))
            .unwrap_or_else(|error| panic!("{what}: marking: {error}"));
        model.write_at(&bytes, HostOffset(place.start)).expect("memory");
    }
}

/// Makes the model as long; what is new is zero.
fn resized(model: &MemoryStorage, bytes: u64) {
    let before = model.len().expect("memory");
    model.set_len(before.min(bytes)).expect("memory");
    model.set_len(bytes).expect("memory");
}

/// The disk reads as the model; where the map says zero, that counts as read.
fn verify(disk: &Disk, model: &MemoryStorage, what: &str) {
    assert_eq!(disk.guest_bytes(), model.len().expect("memory"), "{what}: size");
    verify_up_to(disk, model, disk.guest_bytes(), what);
}

fn verify_up_to(disk: &Disk, model: &MemoryStorage, end: u64, what: &str) {
    let mut at = 0;
    while at < end {
        let extent = disk.top().resolve(GuestOffset(at), end - at);
        let extent = extent.unwrap_or_else(|error| panic!("{what}: at {at:#x}: {error}"));
        let data = matches!(extent.place, Place::Data { .. });
        let len = extent.len.min(end - at);
        let len = if data { len.min(1 << 20) } else { len };
        if data {
            let (mut found, mut wanted) = (vec![0xee; len as usize], vec![0; len as usize]);
            disk.read_at(&mut found, GuestOffset(at)).unwrap_or_else(|e| panic!("{what}: {e}"));
            model.read_padded(&mut wanted, HostOffset(at)).expect("memory");
            if let Some(n) = first_difference(&found, &wanted) {
                let (found, wanted, n) = (found[n], wanted[n], at + n as u64);
                panic!("{what}: byte {n:#x} is {found:#x}, not {wanted:#x}");
            }
        } else {
            assert_zero(model, at..at + len, what);
        }
        at += len;
    }
}

/// The model has nothing but zeroes in a range that the disk has as zeroes.
fn assert_zero(model: &MemoryStorage, range: Range<u64>, what: &str) {
    let mut at = range.start;
    while at < range.end {
        let StorageExtent { data, len } =
            model.extent_at(HostOffset(at), range.end - at).expect("memory");
        let len = if data { len.min(1 << 20) } else { len }.min(range.end - at).max(1);
        if data {
            let mut wanted = vec![0; len as usize];
            model.read_padded(&mut wanted, HostOffset(at)).expect("memory");
            assert!(is_zero(&wanted), "{what}: what was written at {at:#x} reads as zero");
        }
        at += len;
    }
}

impl Trial {
    /// A growth of an open disk to `to` bytes finds no space from one of its calls on, each in turn.
    /// Sectors of blocks that are new are written at `places` afterwards: what the growth had
    /// written to the file shows nowhere.
    pub fn growth_without_space(&self, to: u64, places: &[u64]) {
        let end = places.iter().copied().max().expect("places").next_multiple_of(2 << 20);
        for nth in 0.. {
            let faulty = FaultyStorage::new(Arc::new(self.image()));
            let storage: Arc<dyn Storage> = faulty.clone();
            let disk = self.open(&storage, true).expect("opening");
            let mut wanted = vec![0; end as usize];
            wanted[..65536].fill(0xaa);
            disk.write_at(&wanted[..65536], GuestOffset(0)).expect("writing");
            disk.flush().expect("flushing");
            faulty.arm(FaultPlan::nth(&FaultKind::SPACE, nth).no_space().lasting());
            let grown = disk.resize(to);
            faulty.heal();
            assert!(grown.is_err() || disk.guest_bytes() == to);
            for at in places {
                wanted[*at as usize..][..512].fill(0xbb);
                disk.write_at(&[0xbb; 512], GuestOffset(*at)).expect("writing");
            }
            disk.flush().expect("flushing");
            let verify = |disk: &Disk| {
                let mut found = vec![0xee; wanted.len()];
                disk.read_at(&mut found, GuestOffset(0)).expect("reading");
                assert_eq!(first_difference(&found, &wanted), None, "failed at {nth}");
            };
            verify(&disk);
            disk.close().expect("closing");
            verify(&self.open(&storage, true).expect("opening"));
            let corruptions = self.check(&storage, Repair::Nothing).corruptions;
            assert_eq!(corruptions, 0, "failed at {nth}");
            if grown.is_ok() {
                assert!(nth > 5, "{nth} calls are not all");
                return;
            }
        }
    }

    /// The power is cut after each change that a growth of `image` to `to` bytes makes: what
    /// survives is sound, of the old or the new size, and has the same bytes. Returns the image, and
    /// the numbers of survivors of the old and of the new size.
    pub fn cut_in_growth(&self, image: &dyn Storage, to: u64) -> (Arc<CrashStorage>, [u64; 2]) {
        let crash = CrashStorage::holding(image);
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = self.open(&storage, true).expect("opening");
        let before = read_all(&disk);
        disk.top().resize(to).expect("growing");
        disk.close().expect("closing");
        let (mut rng, mut survivors) = (Rng::new(5), [0, 0]);
        crash.for_each_crash(|ops, image| {
            for survivor in [image.only_durable(), image.everything(), image.survivor(&mut rng)] {
                let storage: Arc<dyn Storage> = Arc::new(survivor);
                let corruptions = self.check(&storage, Repair::Nothing).corruptions;
                assert_eq!(corruptions, 0, "after {ops} changes");
                let disk = self.open(&storage, false).expect("opening");
                let size = disk.guest_bytes();
                assert!(size == before.len() as u64 || size == to, "{size}");
                let mut bytes = vec![0; before.len()];
                disk.read_at(&mut bytes, GuestOffset(0)).expect("reading");
                assert!(bytes == before, "after {ops} changes");
                survivors[usize::from(size == to)] += 1;
            }
        });
        (crash, survivors)
    }
}

/// What one resize did, for power cuts during it.
struct Resized {
    /// Changes of the file before it and after it.
    ops: (usize, usize),
    before: MemoryStorage,
    after: MemoryStorage,
}

impl Resized {
    /// What the disk holds that has this one of both sizes.
    fn of_size(&self, bytes: u64) -> &MemoryStorage {
        if bytes == self.after.len().expect("memory") { &self.after } else { &self.before }
    }
}

impl<'a> Resizes<'a> {
    /// Images of which a power cut costs nothing.
    pub const fn new(trial: Trial, sizes: &'a [u64]) -> Self {
        Self { trial, sizes, cut: Cut::Nothing }
    }

    /// [`Resizes::model`], in one session and over several.
    pub fn models(&self) {
        self.model(true);
        self.model(false);
    }

    /// [`Resizes::faults`] of all that a resize does: changes that fail once, a disk that is full until the
    /// resize has ended, for calls of these kinds, and reads that fail.
    pub fn all_faults(&self, space: &[FaultKind]) {
        self.faults(&FaultKind::CHANGES, false, false);
        self.faults(space, true, true);
        self.faults(&[FaultKind::Read], false, false);
    }

    fn what(&self, more: &str) -> String {
        format!("{} {:?} {more}", self.trial.driver.name(), self.trial.options)
    }

    /// Each size in turn, with marks and a check of everything in between: in one session, or each in one
    /// of its own.
    pub fn model(&self, live: bool) {
        let storage: Arc<dyn Storage> = Arc::new(self.trial.image());
        let mut disk = self.trial.open(&storage, true).expect("opening");
        let model = MemoryStorage::with_len("model", disk.guest_bytes());
        for (op, size) in (1..).zip(self.sizes) {
            let what = self.what(&format!("live {live}, to {size}"));
            mark(&disk, &model, op, &what);
            disk.resize(*size).unwrap_or_else(|error| panic!("{what}: {error}"));
            resized(&model, disk.guest_bytes());
            assert!(disk.guest_bytes() >= *size, "{what}: {} bytes", disk.guest_bytes());
            verify(&disk, &model, &what);
            if !live {
                disk.close().expect(&what);
                drop(disk);
                self.trial.audit(&storage, true, &what);
                disk = self.trial.open(&storage, true).expect(&what);
                verify(&disk, &model, &what);
            }
        }
        let what = self.what(&format!("live {live}, at the end"));
        mark(&disk, &model, 99, &what);
        disk.close().expect("closing");
        drop(disk);
        self.trial.audit(&storage, true, &what);
        verify(&self.trial.open(&storage, false).expect(&what), &model, &what);
    }

    /// Each call of these kinds fails, once or until the resize has ended: the disk has the old size or
    /// the new one and loses nothing; it can be written to, takes the size when nothing fails any
    /// more, and is sound when it is closed.
    pub fn faults(&self, kinds: &[FaultKind], no_space: bool, lasting: bool) {
        let mut nth = 0;
        loop {
            let faulty = FaultyStorage::new(Arc::new(self.trial.image()));
            let storage: Arc<dyn Storage> = faulty.clone();
            let mut disk = self.trial.open(&storage, true).expect("opening");
            let model = MemoryStorage::with_len("model", disk.guest_bytes());
            let what = self.what(&format!("fault {nth} of {kinds:?}, lasting {lasting}"));
            let (mut fired, mut left) = (false, nth);
            for (op, size) in (1..).zip(self.sizes) {
                mark(&disk, &model, op, &what);
                disk.flush().expect(&what);
                let what = format!("{what}, {} to {size}", disk.guest_bytes());
                if !fired {
                    let plan = FaultPlan::nth(kinds, left).torn(1);
                    let plan = if no_space { plan.no_space() } else { plan };
                    faulty.arm(if lasting { plan.lasting() } else { plan });
                }
                let done = disk.resize(*size);
                faulty.heal();
                if !fired {
                    fired = faulty.fired() > 0;
                    left -= faulty.matched().min(left);
                }
                if let Err(error) = done {
                    assert!(faulty.fired() > 0, "{what}: {error}, without a fault");
                    let what = format!("{what}: {error}");
                    self.go_on(&disk, &model, op, &what);
                    if nth % 2 == 0 {
                        disk.close().expect(&what);
                        drop(disk);
                        disk = self.trial.open(&storage, true).expect(&what);
                        verify(&disk, &model, &format!("{what}, opened again"));
                    }
                    disk.resize(*size).unwrap_or_else(|e| panic!("{what}, and again: {e}"));
                }
                resized(&model, disk.guest_bytes());
                verify(&disk, &model, &what);
            }
            mark(&disk, &model, 99, &what);
            disk.close().expect(&what);
            drop(disk);
            self.trial.audit(&storage, false, &what);
            verify(&self.trial.open(&storage, false).expect(&what), &model, &what);
            if !fired {
                return;
            }
            // All of the first ones, then samples: each page of a large table is a call.
            nth += 1 + nth / 8;
        }
    }

    /// After a resize that failed.
    fn go_on(&self, disk: &Disk, model: &MemoryStorage, op: u64, what: &str) {
        let before = model.len().expect("memory");
        resized(model, disk.guest_bytes());
        verify(disk, model, what);
        // Blocks that are new since must not show what the failed resize has left.
        mark(disk, model, 50 + op, what);
        let end = model.len().expect("memory");
        for at in [end / 5, end / 4 + SECTOR] {
            let at = at / SECTOR * SECTOR;
            disk.write_at(&[0x77; 512], GuestOffset(at)).expect(what);
            model.write_at(&[0x77; 512], HostOffset(at)).expect("memory");
        }
        disk.flush().expect(what);
        verify(disk, model, &format!("{what}, written to since (it had {before})"));
    }

    /// The power is cut at some of the changes that a resize makes, and the process is killed at each: the disk has the old size or the new one, and
    /// what it held; it can be grown over all that it ever had, of which nothing comes back.
    pub fn power_cut(&self, seed: u64) {
        let crash = CrashStorage::holding(&self.trial.image());
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = self.trial.open(&storage, true).expect("opening");
        let model = MemoryStorage::with_len("model", disk.guest_bytes());
        let mut done = Vec::new();
        for (op, size) in (1..).zip(self.sizes) {
            mark(&disk, &model, op, "before the power cut");
            disk.flush().expect("flushing");
            let (begin, before) = (crash.ops(), MemoryStorage::clone(&model));
            disk.resize(*size).expect("another size");
            // As a caller that guarantees the size does: that of a raw disk is its file's length, and nothing more.
            disk.flush().expect("flushing");
            resized(&model, disk.guest_bytes());
            let after = MemoryStorage::clone(&model);
            done.push(Resized { ops: (begin, crash.ops()), before, after });
        }
        disk.close().expect("closing");
        let (mut rng, mut replay) = (Rng::new(seed), crash.replay());
        for resized in &done {
            let (begin, end) = resized.ops;
            let mut cuts: Vec<usize> = (begin..=end).collect();
            while cuts.len() > MOMENTS_MAX {
                // The first and the last ones stay.
                let middle = cuts.len() as u64 - 2;
                cuts.remove(1 + rng.below(middle) as usize);
            }
            for moment in begin..=end {
                let image = replay.at(moment);
                if cuts.contains(&moment) {
                    self.cut(image, resized, moment, &mut rng);
                    continue;
                }
                // A process that is killed loses nothing that it wrote.
                let storage: Arc<dyn Storage> = Arc::new(image.everything());
                let what = self.what(&format!("killed at {moment} in {begin}..{end}"));
                self.read_back(&storage, resized, moment == end, &what);
            }
        }
    }

    /// All that survives a kill, and a part of it that survives a power cut.
    fn cut(&self, image: &CrashImage, resized: &Resized, moment: usize, rng: &mut Rng) {
        let mut survivors = vec![image.everything(), image.only_durable()];
        survivors.extend([image.survivor(rng), image.survivor(rng)]);
        survivors.push(image.extreme(rng.below(image.extremes_count() as u64) as usize).1);
        for (number, survivor) in survivors.into_iter().enumerate() {
            let sizes = (resized.before.len(), resized.after.len());
            let (old, new) = (sizes.0.expect("memory"), sizes.1.expect("memory"));
            let (begin, end) = resized.ops;
            let what = self.what(&format!(
                "{old} to {new}, cut at {moment} in {begin}..{end}, survivor {number}"
            ));
            self.judge(survivor, resized, moment == end, &what);
        }
    }

    /// What a cut leaves can be read: the disk has one of both sizes, and its bytes. Returns the size, and
    /// how much of it is sure.
    fn read_back(
        &self,
        storage: &Arc<dyn Storage>,
        resized: &Resized,
        done: bool,
        what: &str,
    ) -> (u64, u64) {
        self.trial.audit(storage, false, what);
        let disk = self.trial.open(storage, false).expect(what);
        let (old, new) = (resized.before.len(), resized.after.len());
        let (old, new) = (old.expect("memory"), new.expect("memory"));
        let size = disk.guest_bytes();
        assert!(size == new || (size == old && !done), "{what}: {size} bytes");
        let sure = match self.cut {
            _ if done => size,
            Cut::Nothing => size,
            Cut::CutOff => size.min(new),
            Cut::All => old.min(new),
        };
        verify_up_to(&disk, resized.of_size(size), sure, what);
        (size, sure)
    }

    fn judge(&self, survivor: MemoryStorage, resized: &Resized, done: bool, what: &str) {
        let storage: Arc<dyn Storage> = Arc::new(survivor);
        let (size, sure) = self.read_back(&storage, resized, done, what);
        let model = resized.of_size(size);
        let model = MemoryStorage::clone(model);
        let disk = self.trial.open(&storage, true).expect(what);
        if sure < size {
            disk.resize(sure).expect(what);
            self::resized(&model, sure);
        }
        self.grow_again(&disk, &model, what);
        disk.close().expect(what);
        drop(disk);
        self.trial.audit(&storage, false, what);
        self.trial.check(&storage, Repair::Leaks);
        let report = self.trial.check(&storage, Repair::Nothing);
        let left = (report.corruptions, report.leaks);
        assert_eq!(left, (0, 0), "{what}, repaired: {:#?}", report.findings);
        let disk = self.trial.open(&storage, false).expect(what);
        verify(&disk, &model, &format!("{what}, grown again, closed"));
    }

    fn grow_again(&self, disk: &Disk, model: &MemoryStorage, what: &str) {
        let most = self.sizes.iter().copied().max().unwrap_or(0).max(disk.guest_bytes());
        disk.resize(most).unwrap_or_else(|error| panic!("{what}, growing again: {error}"));
        resized(model, disk.guest_bytes());
        verify(disk, model, &format!("{what}, grown again"));
        mark(disk, model, 77, what);
        verify(disk, model, &format!("{what}, grown again and written to"));
    }
}
