//! Compares the contents of two disks.
//!
//! ```text
//!   runs of A ─┐
//!              ├─► pieces ─► both zero, or the same bytes of the same file: nothing to read
//!   runs of B ─┘          ├► one is zero: the other is read
//!                         └► both are read                      (by several threads)
//! ```

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;
use vdkit_block::{GuestOffset, Monitor, Result, Storage};
use vdkit_chain::{Disk, DiskPlace};

use crate::crew::{Plan, work_off};
use crate::runs::{Run, Runs};

/// Bytes per piece: two buffers of this size fit in the L2 cache.
const PIECE_BYTES: u64 = 256 << 10;

/// Options of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompareOptions {
    /// Disks of different sizes differ. Otherwise they are equal if the rest of the longer one
    /// reads as zero.
    pub strict: bool,
    /// Reading threads; `None` for one per core.
    pub threads: Option<usize>,
}

/// Result of a comparison.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct CompareReport {
    /// The disks are equal under the options.
    pub identical: bool,
    /// Guest offset of the first byte that differs.
    pub first_difference: Option<u64>,
    /// The sizes are not the same.
    pub sizes_differ: bool,
    /// Bytes of the first disk.
    pub a_bytes: u64,
    /// Bytes of the second disk.
    pub b_bytes: u64,
    /// Guest bytes read (of one disk or both).
    pub read_bytes: u64,
    /// Guest bytes that are equal by the maps alone.
    pub skipped_bytes: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Compares the guest-visible content of two disks.
///
/// # Errors
/// [`vdkit_block::Error::Interrupted`]; errors of reading and of the maps.
pub fn compare(
    a: &Disk,
    b: &Disk,
    options: &CompareOptions,
    monitor: &Monitor<'_>,
) -> Result<CompareReport> {
    let begun = Instant::now();
    let (a_bytes, b_bytes) = (a.guest_bytes(), b.guest_bytes());
    let total = a_bytes.max(b_bytes);
    let state = State::new(total);
    if !(options.strict && a_bytes != b_bytes) {
        let plan =
            Pairs { a: Side::new(a)?, b: Side::new(b)?, state: &state, monitor, at: 0, end: total };
        work_off(plan, options.threads, monitor, |pair, buffer| {
            state.compare(a, b, &pair, buffer)?;
            state.advance(monitor, pair.len);
            Ok(pair.len)
        })?;
    }
    let first_difference = state.difference();
    let sizes_differ = a_bytes != b_bytes;
    Ok(CompareReport {
        identical: first_difference.is_none() && !(options.strict && sizes_differ),
        first_difference,
        sizes_differ,
        a_bytes,
        b_bytes,
        read_bytes: state.read.load(Ordering::Relaxed),
        skipped_bytes: state.skipped.load(Ordering::Relaxed),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Shared state of the threads.
#[derive(Debug)]
struct State {
    /// Lowest offset of a difference; `u64::MAX` for none.
    first: AtomicU64,
    read: AtomicU64,
    skipped: AtomicU64,
    total: u64,
}

impl State {
    fn new(total: u64) -> Self {
        Self {
            first: AtomicU64::new(u64::MAX),
            read: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            total,
        }
    }

    fn difference(&self) -> Option<u64> {
        Some(self.first.load(Ordering::Relaxed)).filter(|&at| at != u64::MAX)
    }

    fn advance(&self, monitor: &Monitor<'_>, bytes: u64) {
        let read = self.read.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let done = read + self.skipped.load(Ordering::Relaxed);
        monitor.progress.update(done, self.total);
    }

    fn compare(&self, a: &Disk, b: &Disk, pair: &Pair, buffer: &mut Vec<u8>) -> Result<()> {
        let len = pair.len as usize;
        buffer.resize(2 * PIECE_BYTES as usize, 0);
        let (left, right) = buffer.split_at_mut(PIECE_BYTES as usize);
        let (left, right) = (&mut left[..len], &mut right[..len]);
        let at = GuestOffset(pair.at);
        let found = match pair.read {
            Read::A => read_nonzero(a, left, at)?,
            Read::B => read_nonzero(b, right, at)?,
            Read::Both => {
                a.read_at(left, at)?;
                b.read_at(right, at)?;
                if left == right {
                    None
                } else {
                    left.iter().zip(&*right).position(|(x, y)| x != y)
                }
            }
        };
        if let Some(found) = found {
            self.first.fetch_min(pair.at + found as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Reads, and finds the first nonzero byte.
fn read_nonzero(disk: &Disk, bytes: &mut [u8], at: GuestOffset) -> Result<Option<usize>> {
    disk.read_at(bytes, at)?;
    // A fixed-size fold becomes vector instructions.
    let (blocks, _) = bytes.as_chunks::<256>();
    let zero = blocks.iter().take_while(|block| block.iter().fold(0, |seen, b| seen | b) == 0);
    let from = zero.count() * 256;
    Ok(bytes[from..].iter().position(|&b| b != 0).map(|found| from + found))
}

/// Which disks to read for a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Read {
    /// The other one reads as zero.
    A,
    B,
    Both,
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    at: u64,
    len: u64,
    read: Read,
}

/// The runs of one disk, with zeroes beyond its end.
#[derive(Debug)]
pub(crate) struct Side<'a> {
    runs: Runs<'a>,
    run: Option<Run<'a>>,
}

impl<'a> Side<'a> {
    pub(crate) fn new(disk: &'a Disk) -> Result<Self> {
        Ok(Self { runs: Runs::new(disk, 0, disk.guest_bytes())?, run: None })
    }

    /// The run at `at`, which must not decrease.
    pub(crate) fn run_at(&mut self, at: u64, end: u64) -> Result<Run<'a>> {
        while self.run.is_none_or(|run| run.end() <= at) {
            let zero = Run::zeroes(at, end - at);
            self.run = Some(self.runs.next_run()?.unwrap_or(zero));
        }
        Ok(match self.run {
            Some(run) => run.from(at),
            None => Run::zeroes(at, end - at),
        })
    }
}

/// Combines the maps of both disks.
#[derive(Debug)]
struct Pairs<'a> {
    a: Side<'a>,
    b: Side<'a>,
    state: &'a State,
    monitor: &'a Monitor<'a>,
    at: u64,
    end: u64,
}

impl Plan for Pairs<'_> {
    type Piece = Pair;

    fn next_piece(&mut self) -> Result<Option<Pair>> {
        // Later pieces cannot contain the first difference.
        while self.at < self.end && self.state.difference().is_none_or(|found| self.at < found) {
            self.monitor.cancel.check()?;
            let at = self.at;
            let (a, b) = (self.a.run_at(at, self.end)?, self.b.run_at(at, self.end)?);
            let common = a.len.min(b.len);
            let read = match (a.is_zero(), b.is_zero()) {
                (true, true) => None,
                (true, false) => Some(Read::B),
                (false, true) => Some(Read::A),
                (false, false) if same_place(&a, &b) => None,
                (false, false) => Some(Read::Both),
            };
            let Some(read) = read else {
                self.at += common;
                self.state.skipped.fetch_add(common, Ordering::Relaxed);
                self.state.advance(self.monitor, 0);
                continue;
            };
            // Cut at multiples of the piece size, so that no compressed unit is decompressed twice.
            let cut = (at / PIECE_BYTES + 1) * PIECE_BYTES;
            let len = common.min(cut - at);
            self.at += len;
            return Ok(Some(Pair { at, len, read }));
        }
        Ok(None)
    }
}

/// Whether two runs are the same bytes of the same file. Not for encrypted runs: the keys may
/// differ, or one run may be the other's ciphertext.
pub(crate) fn same_place(a: &Run<'_>, b: &Run<'_>) -> bool {
    if !a.is_plain() || !b.is_plain() {
        return false;
    }
    match (&a.place, &b.place) {
        (
            DiskPlace::Data { storage: a, offset: a_offset },
            DiskPlace::Data { storage: b, offset: b_offset },
        ) => a_offset == b_offset && same_file(a, b),
        (
            DiskPlace::Compressed { storage: a, compressed: a_packed },
            DiskPlace::Compressed { storage: b, compressed: b_packed },
        ) => a_packed == b_packed && same_file(a, b),
        _ => false,
    }
}

/// Whether two storages are the same file (as with two overlays of one image).
fn same_file(a: &Arc<dyn Storage>, b: &Arc<dyn Storage>) -> bool {
    if Arc::ptr_eq(a, b) {
        return true;
    }
    let identity = |fd: BorrowedFd<'_>| {
        rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino, stat.st_rdev))
    };
    let (a, b) = (a.as_fd().and_then(identity), b.as_fd().and_then(identity));
    a.is_some() && a == b
}

#[cfg(test)]
mod tests;
