//! Clients of one disk: random requests, and a log of what was asked and answered.

use std::ops::Range;

use parking_lot::RwLock;
use vdkit_block::{CacheMode, Error, GuestOffset, Result};
use vdkit_chain::Disk;

use super::history::{Answer, Change, Clock, Flush, Log, SECTOR, Seen, What, content_of, stamps};
use crate::{CrashClock, Rng};

/// What clients send their requests to.
pub trait Front: Sync {
    /// Writes at a byte of the disk. With `durable` the bytes are durable when it returns, in each
    /// cache mode, where the front has such writes: it says so.
    ///
    /// # Errors
    /// What the disk returns.
    fn write(&self, bytes: &[u8], at: u64, durable: bool) -> Result<bool>;

    /// Makes bytes zero.
    ///
    /// # Errors
    /// What the disk returns.
    fn zero(&self, at: u64, len: u64, may_unmap: bool) -> Result<()>;

    /// Gives bytes back.
    ///
    /// # Errors
    /// What the disk returns.
    fn discard(&self, at: u64, len: u64) -> Result<()>;

    /// Reads.
    ///
    /// # Errors
    /// What the disk returns.
    fn read(&self, bytes: &mut [u8], at: u64) -> Result<()>;

    /// Makes durable what was done before.
    ///
    /// # Errors
    /// What the disk returns.
    fn flush(&self) -> Result<()>;
}

/// A disk without a server in front of it.
#[derive(Debug)]
pub struct Alone {
    /// The disk.
    pub disk: Disk,
    /// Keeps requests away from a resize, where the format leaves that to its caller.
    pub gate: Option<RwLock<()>>,
}

impl Alone {
    fn request<T>(&self, call: impl FnOnce(&Disk) -> Result<T>) -> Result<T> {
        let _held = self.gate.as_ref().map(RwLock::read);
        call(&self.disk)
    }

    /// Does something with the disk, without requests in flight where the format asks for that.
    ///
    /// # Errors
    /// What `call` returns.
    pub fn alone<T>(&self, call: impl FnOnce(&Disk) -> Result<T>) -> Result<T> {
        let _held = self.gate.as_ref().map(RwLock::write);
        call(&self.disk)
    }
}

impl Front for Alone {
    fn write(&self, bytes: &[u8], at: u64, _durable: bool) -> Result<bool> {
        self.request(|disk| disk.write_at(bytes, GuestOffset(at))).map(|()| false)
    }

    fn zero(&self, at: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.request(|disk| disk.write_zeroes(GuestOffset(at), len, may_unmap))
    }

    fn discard(&self, at: u64, len: u64) -> Result<()> {
        self.request(|disk| disk.discard(GuestOffset(at), len))
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        self.request(|disk| disk.read_at(bytes, GuestOffset(at)))
    }

    fn flush(&self) -> Result<()> {
        self.request(Disk::flush)
    }
}

/// How often a client does what, in parts of all.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Writes.
    pub write: u64,
    /// Zeroing.
    pub zero: u64,
    /// Discarding.
    pub discard: u64,
    /// Reads.
    pub read: u64,
    /// Flushes.
    pub flush: u64,
}

impl Mix {
    /// Everything.
    pub const ALL: Self = Self { write: 8, zero: 2, discard: 2, read: 2, flush: 2 };
    /// Writes, and a flush now and then.
    pub const WRITES: Self = Self { write: 12, zero: 0, discard: 0, read: 1, flush: 1 };
}

/// Where the clients meet.
pub struct Stage<'a> {
    /// The disk.
    pub front: &'a dyn Front,
    /// The sectors that they work on.
    pub windows: Vec<Range<u64>>,
    /// What a sector held at first.
    pub first: &'a (dyn Fn(u64) -> [u8; SECTOR as usize] + Sync),
    /// Sectors of a unit of allocation.
    pub unit: u64,
    /// What the disk promises.
    pub cache: CacheMode,
    /// Calls may fail by other causes than the end of the disk.
    pub faults: bool,
    /// Orders calls.
    pub clock: &'a Clock,
    /// Orders changes of the storages.
    pub ticks: &'a CrashClock,
}

/// When a call was made.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// On the threads' clock.
    pub begin: u64,
    /// On the threads' clock.
    pub end: u64,
    /// Changes of the storages before it.
    pub ticks_before: usize,
    /// Changes of the storages when it had ended.
    pub ticks_after: usize,
}

impl Stage<'_> {
    /// Makes a call, and says when.
    pub fn time<T>(&self, call: impl FnOnce() -> T) -> (T, Span) {
        let (ticks_before, begin) = (self.ticks.now(), self.clock.now());
        let answer = call();
        let (end, ticks_after) = (self.clock.now(), self.ticks.now());
        (answer, Span { begin, end, ticks_before, ticks_after })
    }

    /// Makes so many calls; writes are numbered from `number`.
    pub fn work(&self, mix: Mix, number: u64, calls: u64, rng: &mut Rng) -> Log {
        let mut log = Log::default();
        for call in 0..calls {
            self.call(mix, number + call, rng, &mut log);
        }
        log
    }

    fn call(&self, mix: Mix, number: u64, rng: &mut Rng, log: &mut Log) {
        let Mix { write, zero, discard, read, flush } = mix;
        let roll = rng.below(write + zero + discard + read + flush);
        let (first, count) = self.run(rng);
        let (at, len) = (first * SECTOR, count * SECTOR);
        if roll < write {
            let (bytes, durable) = (stamps(first, count, number), rng.chance(1, 4));
            self.change(log, What::Write(number), first, count, || {
                self.front.write(&bytes, at, durable)
            });
        } else if roll < write + zero {
            let may_unmap = rng.chance(1, 2);
            self.change(log, What::Zero, first, count, || {
                self.front.zero(at, len, may_unmap).map(|()| false)
            });
        } else if roll < write + zero + discard {
            self.change(log, What::Discard, first, count, || {
                self.front.discard(at, len).map(|()| false)
            });
        } else if roll < write + zero + discard + read {
            self.look(log, first, count);
        } else {
            self.flush(log);
        }
    }

    /// A flush, noted where it returned.
    pub fn flush(&self, log: &mut Log) -> bool {
        let (answer, span) = self.time(|| self.front.flush());
        match answer {
            Ok(()) => {
                let (begin, ticks_after) = (span.begin, span.ticks_after);
                log.flushes.push(Flush { begin, ticks_after });
                true
            }
            Err(error) => {
                assert!(self.faults, "a flush failed: {error}");
                false
            }
        }
    }

    /// A run of sectors: a unit, a few sectors, or more; half of them in the first quarter of a
    /// window, so that many meet.
    fn run(&self, rng: &mut Rng) -> (u64, u64) {
        let window = &self.windows[rng.below(self.windows.len() as u64) as usize];
        let all = window.end - window.start;
        let within = if rng.chance(1, 2) { all.div_ceil(4) } else { all };
        let at = rng.below(within);
        let (at, count) = match rng.below(4) {
            0 => (at / self.unit * self.unit, self.unit.min(64)),
            1 => (at, 1 + rng.below(32)),
            _ => (at, 1 + rng.below(6)),
        };
        (window.start + at, count.min(all - at))
    }

    fn change(
        &self,
        log: &mut Log,
        what: What,
        first: u64,
        count: u64,
        call: impl FnOnce() -> Result<bool>,
    ) {
        let (answer, span) = self.time(call);
        let answer = match answer {
            Ok(durable) if durable || self.cache.write_durable() => Answer::Durable,
            Ok(_) => Answer::Done,
            // Another one has made the disk smaller.
            Err(Error::Invalid { .. }) => Answer::Failed,
            Err(error) => {
                assert!(self.faults, "{what:?} of {count} sectors at {first} failed: {error}");
                Answer::Failed
            }
        };
        log.changes.push(span.change(what, first, count, answer));
    }

    fn look(&self, log: &mut Log, first: u64, count: u64) {
        let mut bytes = vec![0xee; (count * SECTOR) as usize];
        let (answer, span) = self.time(|| self.front.read(&mut bytes, first * SECTOR));
        if let Err(error) = answer {
            let known = self.faults || matches!(error, Error::Invalid { .. });
            assert!(known, "a read of {count} sectors at {first} failed: {error}");
            return;
        }
        for (sector, bytes) in (first..).zip(bytes.chunks(SECTOR as usize)) {
            let content = content_of(sector, bytes, &(self.first)(sector));
            log.seen.push(Seen { sector, content, begin: span.begin, end: span.end });
        }
    }
}

impl Span {
    /// A change that was made then.
    pub fn change(self, what: What, first: u64, count: u64, answer: Answer) -> Change {
        let Self { begin, end, ticks_before, ticks_after } = self;
        Change { what, first, count, begin, end, ticks_before, ticks_after, answer }
    }
}
