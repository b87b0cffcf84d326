//! Requests beside resizes: no acknowledged write is lost, and no thread waits for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use vdkit_block::{Error, GuestOffset, Result, Storage};
use vdkit_chain::{Disk, DiskExtent};

use super::resizes::Resizes;
use super::{SECTOR, pattern};
use crate::{CrashStorage, FaultKind, GatedStorage, Rng};

const WRITERS: u64 = 3;
/// Places to which the writers write: in so many blocks below the smallest size, and as many beyond.
const SPOTS: u64 = 16;
/// What is written beyond the smallest size, where it may be cut off.
const BEYOND: u8 = 0xbb;
/// A resize that does not wait has ended by then.
const EARLY: Duration = Duration::from_millis(200);

/// Ends the writers, also where a resize fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A thread with sectors of its own, next to those of the others.
struct Writer<'a> {
    disk: &'a Disk,
    number: u64,
    /// The disk never ends before this.
    kept: u64,
    /// What the sectors hold.
    mine: Vec<Vec<u8>>,
    rng: Rng,
    what: &'a str,
}

impl<'a> Writer<'a> {
    fn new(disk: &'a Disk, number: u64, kept: u64, seed: u64, what: &'a str) -> Self {
        let mine = vec![vec![0; SECTOR as usize]; SPOTS as usize];
        Self { disk, number, kept, mine, rng: Rng::new(seed + number), what }
    }

    fn place(&self, spot: u64) -> GuestOffset {
        GuestOffset((self.kept / SPOTS * spot / SECTOR + self.number) * SECTOR)
    }

    fn run(mut self, ends: &AtomicBool) -> Self {
        let mut op = self.number;
        while !ends.load(Ordering::Relaxed) {
            self.step(op);
            op += WRITERS;
        }
        self
    }

    fn step(&mut self, op: u64) {
        let spot = self.rng.below(SPOTS);
        let at = self.place(spot);
        match self.rng.below(12) {
            0..5 => {
                let bytes = pattern(op, at.0, SECTOR);
                self.disk.write_at(&bytes, at).expect(self.what);
                self.mine[spot as usize] = bytes;
            }
            5 => {
                self.disk.write_zeroes(at, SECTOR, true).expect(self.what);
                self.mine[spot as usize].fill(0);
            }
            6..9 => self.verify(self.disk, spot, self.what),
            9 => self.beyond(),
            10 => {
                let extents = self.disk.extents(GuestOffset(0), self.kept).expect(self.what);
                let extents: Result<Vec<DiskExtent<'_>>, Error> = extents.collect();
                let mapped: u64 = extents.expect(self.what).iter().map(|extent| extent.len).sum();
                assert_eq!(mapped, self.kept, "{}: the map", self.what);
            }
            _ => self.disk.flush().expect(self.what),
        }
    }

    fn verify(&self, disk: &Disk, spot: u64, what: &str) {
        let (at, mut found) = (self.place(spot), vec![0xee; SECTOR as usize]);
        disk.read_at(&mut found, at).expect(what);
        let wanted = &self.mine[spot as usize];
        assert!(found == *wanted, "{what}: writer {} lost its bytes at {at}", self.number);
    }

    /// Beyond the smallest size, requests may find that the disk has ended.
    fn beyond(&mut self) {
        let more = self.disk.guest_bytes().saturating_sub(self.kept) / SECTOR;
        if more == 0 {
            return;
        }
        let spot = self.rng.below(SPOTS);
        let at = GuestOffset(self.kept + more * spot / SPOTS * SECTOR);
        let mut found = vec![BEYOND; SECTOR as usize];
        let done = match self.rng.below(2) {
            0 => self.disk.write_at(&found, at),
            _ => self.disk.read_at(&mut found, at),
        };
        match done {
            Ok(()) => {
                let strange = found.iter().find(|byte| !matches!(**byte, 0 | BEYOND));
                assert_eq!(strange, None, "{}: at {at}", self.what);
            }
            Err(Error::Invalid(_) | Error::InvalidFor { .. }) => {}
            Err(error) => panic!("{}: at {at}: {error}", self.what),
        }
    }

    fn verify_all(&self, disk: &Disk, what: &str) {
        (0..SPOTS).for_each(|spot| self.verify(disk, spot, what));
    }
}

impl Resizes<'_> {
    /// Threads write, read and walk the map while the disk takes all sizes, so often. What they wrote
    /// below the smallest size is there, at each moment and in the end.
    pub fn beside_requests(&self, times: u64, seed: u64) {
        let crash = CrashStorage::holding(&self.trial.image());
        let storage: Arc<dyn Storage> = crash.clone();
        let disk = self.trial.open(&storage, true).expect("opening");
        crash.stumble(true);
        let what = format!("{} {:?} seed {seed}", self.trial.driver.name(), self.trial.options);
        let all = self.sizes.iter().chain([&self.trial.guest_bytes]);
        let kept = all.min().expect("a size") / SECTOR * SECTOR;
        if !disk.top().new_reads_zero() {
            disk.write_zeroes(GuestOffset(0), kept, true).expect(&what);
        }
        let ends = AtomicBool::new(false);
        let writers: Vec<Writer<'_>> = std::thread::scope(|scope| {
            let (disk, ends, what) = (&disk, &ends, &what);
            let run = |n| scope.spawn(move || Writer::new(disk, n, kept, seed, what).run(ends));
            let threads: Vec<_> = (0..WRITERS).map(run).collect();
            let ended = Ends(ends);
            for size in (0..times).flat_map(|_| self.sizes) {
                disk.resize(*size).unwrap_or_else(|error| panic!("{what}, to {size}: {error}"));
                assert!(disk.guest_bytes() >= *size, "{what}: {} bytes", disk.guest_bytes());
            }
            drop(ended);
            threads.into_iter().map(|thread| thread.join().expect("a writer")).collect()
        });
        crash.stumble(false);
        writers.iter().for_each(|writer| writer.verify_all(&disk, &what));
        let size = disk.guest_bytes();
        disk.close().expect(&what);
        self.trial.audit(&storage, true, &what);
        let again = self.trial.open(&storage, false).expect(&what);
        assert_eq!(again.guest_bytes(), size, "{what}: size");
        writers.iter().for_each(|writer| writer.verify_all(&again, &format!("{what}, reopened")));
    }

    /// A write is about to reach the storage when the disk gets its first size: that waits. The write
    /// goes to the last sector of the disk.
    pub fn waits_for_a_write(&self) {
        let storage = GatedStorage::new(Arc::new(self.trial.image()));
        let (disk, at, what) =
            self.changed_beside_a_write(&storage, |disk| disk.resize(self.sizes[0]));
        let size = disk.guest_bytes();
        if at.0 < size {
            let mut found = [0; SECTOR as usize];
            disk.read_at(&mut found, at).expect(&what);
            assert_eq!(found, [2; SECTOR as usize], "{what}: an acknowledged write is lost");
        }
        disk.close().expect(&what);
        let storage: Arc<dyn Storage> = storage;
        self.trial.audit(&storage, true, &what);
        assert_eq!(self.trial.open(&storage, false).expect(&what).guest_bytes(), size, "{what}");
    }

    /// As [`Resizes::waits_for_a_write`], for a close.
    pub fn a_close_waits_for_a_write(&self) {
        let storage = GatedStorage::new(Arc::new(self.trial.image()));
        let (_, at, what) = self.changed_beside_a_write(&storage, Disk::close);
        let storage: Arc<dyn Storage> = storage;
        self.trial.audit(&storage, true, &what);
        let mut found = [0; SECTOR as usize];
        self.trial.open(&storage, false).expect(&what).read_at(&mut found, at).expect(&what);
        assert_eq!(found, [2; SECTOR as usize], "{what}: an acknowledged write is lost");
    }

    /// The disk after a change that had to wait for a write of 2 to the last sector, and where that is.
    fn changed_beside_a_write(
        &self,
        gated: &Arc<GatedStorage>,
        change: impl Fn(&Disk) -> Result<()> + Sync,
    ) -> (Disk, GuestOffset, String) {
        let storage: Arc<dyn Storage> = gated.clone();
        let disk = self.trial.open(&storage, true).expect("opening");
        let what = format!("{} {:?}", self.trial.driver.name(), self.trial.options);
        let at = GuestOffset(disk.guest_bytes() - SECTOR);
        disk.write_at(&[1; SECTOR as usize], at).expect(&what);
        disk.flush().expect(&what);
        let first = AtomicBool::new(true);
        gated.hold(move |call| {
            call.kind == FaultKind::Write && !call.done && first.swap(false, Ordering::Relaxed)
        });
        let (tell, changed) = channel();
        std::thread::scope(|scope| {
            let (disk, change) = (&disk, &change);
            let write = scope.spawn(move || disk.write_at(&[2; SECTOR as usize], at));
            gated.reached();
            scope.spawn(move || tell.send(change(disk)).expect("the test waits"));
            let early = changed.recv_timeout(EARLY);
            gated.release();
            assert!(early.is_err(), "{what}: changed under a write");
            write.join().expect("the writer").expect(&what);
            changed.recv().expect("the change").expect(&what);
        });
        (disk, at, what)
    }

    /// A thread is within a request, and another one resizes the disk: the first one makes more
    /// requests, and would wait for itself if it resized or closed the disk.
    pub fn waits_for_a_guard(&self) {
        let storage: Arc<dyn Storage> = Arc::new(self.trial.image());
        let disk = self.trial.open(&storage, true).expect("opening");
        let what = format!("{} {:?}", self.trial.driver.name(), self.trial.options);
        let (at, zero) = (GuestOffset(0), GuestOffset(disk.guest_bytes() - SECTOR));
        disk.write_at(&[1; SECTOR as usize], at).expect(&what);
        let ready = || disk.read_ready(&mut [0; SECTOR as usize], zero).is_some();
        disk.read_at(&mut [0; SECTOR as usize], zero).expect(&what);
        assert!(ready(), "{what}: zeroes of a cached map");
        std::thread::scope(|scope| {
            let guard = disk.enter();
            let resizes = scope.spawn(|| disk.resize(self.sizes[0]));
            // Until the resize waits, which keeps new requests of other threads away.
            while scope.spawn(ready).join().expect("a reader") {
                assert!(!resizes.is_finished(), "{what}: resized under a request");
            }
            assert!(ready(), "{what}: not within the request");
            disk.write_at(&[2; SECTOR as usize], at).expect(&what);
            let mut found = [0; SECTOR as usize];
            disk.read_at(&mut found, at).expect(&what);
            assert_eq!(found, [2; SECTOR as usize], "{what}");
            let mut extents = disk.extents(at, SECTOR).expect(&what);
            assert!(extents.next().is_some_and(|extent| extent.is_ok()), "{what}");
            for refused in [disk.resize(self.sizes[0]), disk.close()] {
                assert!(matches!(refused, Err(Error::Invalid(_))), "{what}: {refused:?}");
            }
            drop(guard);
            resizes.join().expect("the resizer").expect(&what);
        });
        assert!(disk.guest_bytes() >= self.sizes[0], "{what}");
        disk.close().expect(&what);
        self.trial.audit(&storage, true, &what);
    }
}
