//! A test thread: random calls, and their log.

use vdkit_block::Codec;
use vdkit_chain::Disk;
use vdkit_testkit::concurrent::history::{
    Change, Clock, Flush, Log, SECTOR, Seen, WRITES, What, content_of, stamps,
};
use vdkit_testkit::{CrashClock, Rng};

use super::support::guest::Guest;
use super::support::ops::pack;
use super::support::rig::IntoGuest;

/// Relative frequency of each call.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    pub write: u64,
    pub compressed: u64,
    pub zero: u64,
    pub discard: u64,
    pub read: u64,
    pub flush: u64,
}

impl Mix {
    pub const NOTHING: Self =
        Self { write: 0, compressed: 0, zero: 0, discard: 0, read: 0, flush: 0 };
}

/// State shared by the threads.
pub struct Stage<'a> {
    pub disk: &'a Disk,
    /// The disk's initial content.
    pub first: &'a Guest,
    pub cluster: u64,
    /// Bytes from the start that they use, a whole number of sectors.
    pub bytes: u64,
    /// Maximum sectors per call.
    pub longest: u64,
    pub clock: Clock,
    /// Storage changes, if recorded.
    pub ticks: Option<CrashClock>,
}

impl Stage<'_> {
    /// Makes `calls` calls; `me` is the thread's number.
    pub fn work(&self, me: u64, mix: Mix, calls: u64, seed: u64) -> Log {
        let mut rng = Rng::new(seed ^ (me + 1) << 56);
        let mut log = Log::default();
        for call in 0..calls {
            let number = WRITES + (me << 32 | call);
            self.call(mix, number, &mut rng, &mut log);
        }
        log
    }

    fn call(&self, mix: Mix, number: u64, rng: &mut Rng, log: &mut Log) {
        let Mix { write, compressed, zero, discard, read, flush } = mix;
        let mut roll = rng.below(write + compressed + zero + discard + read + flush);
        let mut one_of = |parts: u64| {
            let hit = roll < parts;
            roll = roll.wrapping_sub(parts);
            hit
        };
        let (first, count) = self.sectors(rng);
        if one_of(write) {
            self.change(log, What::Write(number), first, count, || {
                let bytes = stamps(first, count, number);
                self.disk.write_at(&bytes, (first * SECTOR).into_guest()).expect("writing");
            });
        } else if one_of(compressed) {
            self.pack(log, number, first);
        } else if one_of(zero) {
            let may_unmap = rng.chance(1, 2);
            self.change(log, What::Zero, first, count, || {
                let (at, len) = ((first * SECTOR).into_guest(), count * SECTOR);
                self.disk.write_zeroes(at, len, may_unmap).expect("zeroing");
            });
        } else if one_of(discard) {
            self.change(log, What::Discard, first, count, || {
                let (at, len) = ((first * SECTOR).into_guest(), count * SECTOR);
                self.disk.discard(at, len).expect("discarding");
            });
        } else if one_of(read) {
            self.look(log, first, count);
        } else {
            let begin = self.clock.now();
            self.disk.flush().expect("flushing");
            let ticks_after = self.ticks.as_ref().map_or(0, CrashClock::now);
            log.flushes.push(Flush { begin, ticks_after });
        }
    }

    /// A run of sectors: a few, or whole clusters.
    fn sectors(&self, rng: &mut Rng) -> (u64, u64) {
        let (all, in_cluster) = (self.bytes / SECTOR, self.cluster / SECTOR);
        let (first, count) = match rng.below(3) {
            0 => (rng.below(all) / in_cluster * in_cluster, in_cluster * (1 + rng.below(3))),
            1 => (rng.below(all), 1 + rng.below(4)),
            _ => (rng.below(all), 1 + rng.below(self.longest)),
        };
        (first, count.min(all - first))
    }

    fn change(&self, log: &mut Log, what: What, first: u64, count: u64, call: impl FnOnce()) {
        let begin = self.clock.now();
        call();
        log.changes.push(Change::done(what, first, count, begin, self.clock.now()));
    }

    /// Writes one or two compressed clusters. Sectors beyond the end of the disk do not matter.
    fn pack(&self, log: &mut Log, number: u64, near: u64) {
        let in_cluster = self.cluster / SECTOR;
        let first = near / in_cluster * in_cluster;
        let count = in_cluster.min(self.first.len() / SECTOR - first) * (1 + number % 2);
        let count = count.min(self.first.len() / SECTOR - first);
        let bytes = stamps(first, count, number);
        let codec = self.disk.top().caps().compressed.unwrap_or(Codec::Deflate);
        // The stamps of a small cluster may not shrink.
        if let Some(units) = pack(codec, self.cluster, &bytes) {
            self.change(log, What::Write(number), first, count, || {
                let at = (first * SECTOR).into_guest();
                self.disk.write_compressed(at, &units).expect("writing compressed");
            });
        }
    }

    fn look(&self, log: &mut Log, first: u64, count: u64) {
        let mut bytes = vec![0xee; (count * SECTOR) as usize];
        let begin = self.clock.now();
        self.disk.read_at(&mut bytes, (first * SECTOR).into_guest()).expect("reading");
        let end = self.clock.now();
        for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR as usize)) {
            let before = self.first.read(sector * SECTOR, SECTOR);
            let content = content_of(sector, bytes, &before);
            log.seen.push(Seen { sector, content, begin, end });
        }
    }
}
