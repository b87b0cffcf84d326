//! Threads that use a disk like guests and always know its expected content.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vdkit::serve::Export;
use vdkit_testkit::Rng;

/// Stripe size in bytes; stripes cross clusters of every size.
const STRIPE: u64 = 7 * 1024;

/// One thread; only it changes its stripes.
pub struct Guest {
    index: u64,
    count: u64,
    rng: Rng,
    /// Expected content of its stripes; other bytes are unused.
    known: Vec<u8>,
    scratch: Vec<u8>,
}

impl Guest {
    fn stripe(&mut self) -> Range<u64> {
        let stripes = (self.known.len() as u64).div_ceil(STRIPE);
        let mine = stripes.saturating_sub(self.index).div_ceil(self.count);
        let start = (self.rng.below(mine) * self.count + self.index) * STRIPE;
        let end = (start + STRIPE).min(self.known.len() as u64);
        let from = self.rng.within(start..end);
        let whole = self.rng.chance(1, 4);
        if whole { start..end } else { from..self.rng.within(from..end) + 1 }
    }

    fn known(&mut self, range: &Range<u64>) -> &mut [u8] {
        &mut self.known[range.start as usize..range.end as usize]
    }

    fn read(&mut self, export: &Export, range: &Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0xee; (range.end - range.start) as usize];
        match export.read_ready(&mut bytes, range.start) {
            Some(Ok(vdkit::Ready::Zero)) => bytes.fill(0),
            Some(done) => drop(done.expect("a read")),
            None => export.read(&mut bytes, range.start).expect("a read"),
        }
        bytes
    }

    fn check(&mut self, export: &Export, range: &Range<u64>) {
        let seen = self.read(export, range);
        let known = self.known(range);
        if seen != known {
            let at = seen.iter().zip(known.iter()).position(|(a, b)| a != b).unwrap_or(0);
            panic!("{:#x}: {:#x} instead of {:#x}", range.start + at as u64, seen[at], known[at]);
        }
    }

    fn step(&mut self, export: &Export) {
        let range = self.stripe();
        let len = range.end - range.start;
        match self.rng.below(16) {
            0..=6 => {
                let mut bytes = std::mem::take(&mut self.scratch);
                bytes.resize(len as usize, 0);
                self.rng.fill(&mut bytes);
                if self.rng.chance(1, 2) {
                    match export.write_ready(&bytes, range.start) {
                        Some(done) => done.expect("a write"),
                        None => export.write(&bytes, range.start, false).expect("a write"),
                    }
                } else {
                    export.write(&bytes, range.start, false).expect("a write");
                }
                self.known(&range).copy_from_slice(&bytes);
                self.scratch = bytes;
            }
            7 | 8 => {
                let may_unmap = self.rng.chance(1, 2);
                export.zero(range.start, len, may_unmap, false).expect("zeroes");
                self.known(&range).fill(0);
            }
            9 => {
                export.discard(range.start, len, false).expect("a discard");
                let seen = self.read(export, &range);
                for (known, seen) in self.known(&range).iter_mut().zip(seen) {
                    assert!(seen == 0 || seen == *known, "a discard made {seen:#x}");
                    *known = seen;
                }
            }
            10 => export.flush().expect("a flush"),
            _ => self.check(export, &range),
        }
    }
}

/// Guests on a disk.
pub struct Guests {
    guests: Vec<Guest>,
    bytes: u64,
}

impl Guests {
    /// `count` guests on a disk with content `known`.
    pub fn new(count: u64, known: &[u8], rng: &mut Rng) -> Self {
        let guest = |index| Guest {
            index,
            count,
            rng: Rng::new(rng.next_u64()),
            known: known.to_vec(),
            scratch: Vec::new(),
        };
        Self { guests: (0..count).map(guest).collect(), bytes: known.len() as u64 }
    }

    /// Lets the guests work while `act` runs; returns their number of steps.
    pub fn work_while<T>(&mut self, export: &Export, act: impl FnOnce(&AtomicU64) -> T) -> T {
        let (over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for guest in &mut self.guests {
                let (over, steps) = (&over, &steps);
                scope.spawn(move || {
                    let _fate = Fate(steps);
                    while !over.load(Ordering::Relaxed) {
                        guest.step(export);
                        steps.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            // Even if `act` panics, or the test would hang instead of failing.
            let _over = Over(&over);
            act(&steps)
        })
    }

    /// The expected content.
    pub fn content(&self) -> Vec<u8> {
        let mut all = vec![0; self.bytes as usize];
        for (number, stripe) in all.chunks_mut(STRIPE as usize).enumerate() {
            let guest = &self.guests[number % self.guests.len()];
            let start = number * STRIPE as usize;
            stripe.copy_from_slice(&guest.known[start..start + stripe.len()]);
        }
        all
    }
}

/// Step count that marks a failed guest.
const FAILED: u64 = 1 << 62;

/// Tells waiting threads that a guest has failed.
struct Fate<'a>(&'a AtomicU64);

impl Drop for Fate<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(FAILED, Ordering::Relaxed);
        }
    }
}

struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until guests did `more` steps. A timeout fails the test.
pub fn let_work(steps: &AtomicU64, more: u64) {
    let until = steps.load(Ordering::Relaxed).saturating_add(more);
    let began = std::time::Instant::now();
    while steps.load(Ordering::Relaxed) < until {
        assert!(began.elapsed().as_secs() < 300, "the guests stand still");
        assert_ne!(steps.load(Ordering::Relaxed) >> 32, FAILED >> 32, "a guest has failed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
