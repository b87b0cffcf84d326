//! Moves the bytes of a plan: shares blocks, or reads, detects zeroes and writes.
//!
//! ```text
//!   queue (one lock) ──► chunk n   ──► read ──► zero runs, compression     in parallel
//!                                              │
//!                                   turn n: reserve target space           in order
//!                                              │
//!                                   write ──► publish                      in parallel
//! ```
//!
//! Since space is reserved in order, the same input gives the same output to the byte, whatever the
//! timing of the threads.

mod in_kernel;
mod place;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use vdkit_block::{CompressionSpec, CopyMethod, Error, GuestOffset, Monitor, Result};
use vdkit_chain::Disk;
use vdkit_storage::AlignedBuf;

use crate::crew::run;
use crate::plan::{Planner, Work};
use crate::queue::{Neighbors, Queue};
use crate::sequencer::Sequencer;
use crate::share::{share, share_all};
use crate::source::Source;
use crate::zero::data_runs;
use place::Placed;
use vdkit_deflate::Compressor;

/// Bytes that one thread moves before others start: a small job is done by then.
const ALONE_BYTES: u64 = 8 << 20;
/// Memory alignment that every device accepts.
const PAGE_BYTES: usize = 4096;
/// Maximum piece of zeroes if they are written as data.
const ZERO_BYTES_MAX: u64 = 8 << 20;

/// Options of a mover.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MoveOptions {
    /// Maximum threads; `None` for one per core. The cores are counted only when a second thread is
    /// needed, since that reads the control group's files.
    pub(crate) threads: Option<usize>,
    /// Granularity in bytes of zero detection; `None` disables it.
    pub(crate) detect_zeroes: Option<usize>,
    /// Compress whole clusters.
    pub(crate) compress: Option<CompressionSpec>,
    /// Write in guest order: the target is a pipe.
    pub(crate) in_order: bool,
    /// The target may hold other data.
    pub(crate) over: bool,
    /// Zeroes must be written: what the target holds there is other data.
    pub(crate) write_zeroes: bool,
    /// A sector that cannot be read becomes zeroes.
    pub(crate) salvage: bool,
    /// The target was never written.
    pub(crate) new: bool,
    /// Maximum bytes per second.
    pub(crate) rate: Option<u64>,
}

/// Bytes by method.
#[derive(Debug, Default)]
pub(crate) struct Moved {
    pub(crate) read: AtomicU64,
    pub(crate) written: AtomicU64,
    pub(crate) shared: AtomicU64,
    pub(crate) kernel_copied: AtomicU64,
    pub(crate) zero_known: AtomicU64,
    pub(crate) zero_found: AtomicU64,
    pub(crate) clusters_compressed: AtomicU64,
    pub(crate) compressed_bytes: AtomicU64,
}

/// Bytes by method, as reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct MovedBytes {
    /// Guest bytes read by this process.
    pub read: u64,
    /// Host bytes written by this process.
    pub written: u64,
    /// Shared with the source by reflink.
    pub reflinked: u64,
    /// Copied by the kernel.
    pub kernel_copied: u64,
    /// Known to be zero from maps and holes; not read.
    pub zero_known: u64,
    /// Read, and found to be zero.
    pub zero_found: u64,
    /// Clusters stored compressed.
    pub clusters_compressed: u64,
    /// Host bytes of compressed clusters.
    pub compressed_bytes: u64,
}

impl MovedBytes {
    /// Sum of both.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            read: self.read + other.read,
            written: self.written + other.written,
            reflinked: self.reflinked + other.reflinked,
            kernel_copied: self.kernel_copied + other.kernel_copied,
            zero_known: self.zero_known + other.zero_known,
            zero_found: self.zero_found + other.zero_found,
            clusters_compressed: self.clusters_compressed + other.clusters_compressed,
            compressed_bytes: self.compressed_bytes + other.compressed_bytes,
        }
    }
}

impl Moved {
    pub(crate) fn report(&self) -> MovedBytes {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        MovedBytes {
            read: get(&self.read),
            written: get(&self.written),
            reflinked: get(&self.shared),
            kernel_copied: get(&self.kernel_copied),
            zero_known: get(&self.zero_known),
            zero_found: get(&self.zero_found),
            clusters_compressed: get(&self.clusters_compressed),
            compressed_bytes: get(&self.compressed_bytes),
        }
    }
}

fn add(counter: &AtomicU64, bytes: u64) {
    counter.fetch_add(bytes, Ordering::Relaxed);
}

/// A thread's next step.
enum Next {
    /// A piece, and its turn.
    Work(Work, u64),
    /// Pieces for one share request, and their turn.
    Share(Neighbors, u64),
    /// Unshared parts of a piece to copy, and the bytes of the whole piece.
    Left(Vec<Range<u64>>, u64),
}

/// Shared state of a job.
pub(crate) struct Mover<'a> {
    source: &'a Source,
    target: Option<&'a Disk>,
    options: MoveOptions,
    monitor: &'a Monitor<'a>,
    queue: Mutex<Queue<'a>>,
    turns: Sequencer,
    /// Sharing has succeeded once.
    shares: AtomicBool,
    /// The kernel cannot copy between these files.
    kernel_refuses: AtomicBool,
    started: Instant,
    done: AtomicU64,
    /// Threads that worked.
    pub(crate) threads: AtomicUsize,
    pub(crate) moved: Moved,
}

struct Buffers {
    /// Aligned for direct I/O, to avoid a bounce buffer.
    bytes: AlignedBuf,
    runs: Vec<Range<usize>>,
    compressed: Vec<u8>,
    lens: Vec<u32>,
    compressor: Option<Compressor>,
}

impl Default for Buffers {
    fn default() -> Self {
        let (runs, compressed, lens) = (Vec::new(), Vec::new(), Vec::new());
        Self { bytes: AlignedBuf::new(0, PAGE_BYTES), runs, compressed, lens, compressor: None }
    }
}

impl<'a> Mover<'a> {
    pub(crate) fn new(
        source: &'a Source,
        target: Option<&'a Disk>,
        planner: Planner<'a>,
        options: MoveOptions,
        monitor: &'a Monitor<'a>,
    ) -> Self {
        Self {
            source,
            target,
            options,
            monitor,
            queue: Mutex::new(Queue::new(planner)),
            turns: Sequencer::default(),
            shares: AtomicBool::new(false),
            kernel_refuses: AtomicBool::new(false),
            started: Instant::now(),
            done: AtomicU64::new(0),
            threads: AtomicUsize::new(1),
            moved: Moved::default(),
        }
    }

    /// Moves everything. The calling thread works too; others join when there is enough work.
    pub(crate) fn run(&self) -> Result<()> {
        if let Some(target) = self.target {
            // Movers reserve space in the target's map themselves.
            target.refuse_in_child("write to")?;
        }
        let enough = || {
            let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let moved = of(&self.moved.read).max(of(&self.moved.written));
            // An explicit number of threads is always used.
            self.options.threads.is_some()
                || moved.max(of(&self.moved.kernel_copied)) >= ALONE_BYTES
        };
        let threads = self.options.threads.map(|threads| threads.max(1));
        let used = run(threads, enough, || self.turns.abort(), |buffers| self.step(buffers))?;
        self.threads.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// One piece of work; `false` if none is left.
    fn step(&self, buffers: &mut Buffers) -> Result<bool> {
        self.monitor.cancel.check()?;
        let (work, number) = match self.next_work()? {
            None => return Ok(false),
            Some(Next::Work(work, number)) => (work, number),
            Some(Next::Share(pieces, number)) => {
                self.share(buffers, &pieces, number)?;
                self.progress(pieces.len + pieces.zero);
                return Ok(true);
            }
            Some(Next::Left(parts, len)) => {
                self.copy_parts(buffers, &parts)?;
                self.progress(len);
                return Ok(true);
            }
        };
        let len = match work {
            Work::Zero { at, len } => {
                // Without a target nothing is placed, so no turn is taken.
                if let Some(target) = self.target {
                    self.in_turn(number, || Ok(()))?;
                    if self.options.write_zeroes {
                        target.write_zeroes(GuestOffset(at), len, true)?;
                        if writes_zeroes(target) {
                            add(&self.moved.written, len);
                        }
                    }
                }
                add(&self.moved.zero_known, len);
                len
            }
            Work::Copy { at, len } => {
                self.copy(buffers, number, at, len)?;
                len
            }
            Work::CopyInKernel { at, len, storage, offset } => {
                self.copy_in_kernel(buffers, number, at..at + len, &*storage, offset)?;
                len
            }
            Work::Share { len, ref storage, offset, .. } if self.target.is_none() => {
                storage.read_discard(offset, len)?;
                add(&self.moved.read, len);
                len
            }
            Work::Share { at, len, storage, offset } => {
                let piece = Neighbors::one(at..at + len, storage, offset);
                self.share(buffers, &piece, number)?;
                len
            }
        };
        self.progress(len);
        Ok(true)
    }

    /// Shares pieces, and copies the rest.
    fn share(&self, buffers: &mut Buffers, pieces: &Neighbors, number: u64) -> Result<()> {
        let Some(target) = self.target else { return Ok(()) };
        let Neighbors { parts, storage, offset, .. } = pieces;
        let shared = self.in_turn(number, || match &parts[..] {
            // Other threads may be writing zeroes, which waits for reservations.
            [part] if self.options.over => {
                share(CopyMethod::Reflink, target, part.clone(), &**storage, *offset)
            }
            parts => share_all(target, parts, &**storage, *offset),
        })?;
        add(&self.moved.shared, shared.bytes);
        add(&self.moved.zero_known, pieces.zero);
        self.copy_parts(buffers, &shared.left)
    }

    /// The next piece and its turn.
    fn next_work(&self) -> Result<Option<Next>> {
        let mut queue = self.queue.lock();
        let queue = &mut *queue;
        loop {
            let Some(work) = queue.next_work()? else { return Ok(None) };
            // Nothing comes behind the end of a stream, however large its target is.
            if let (Work::Copy { at, .. }, Some(end)) = (&work, self.source.end_of_stream())
                && *at >= end
            {
                return Ok(None);
            }
            let this = queue.number;
            let (Work::Share { at, len, storage, offset }, Some(target)) = (&work, self.target)
            else {
                queue.number += 1;
                return Ok(Some(Next::Work(work, this)));
            };
            if self.shares.load(Ordering::Relaxed) {
                queue.number += 1;
                if self.options.over {
                    return Ok(Some(Next::Work(work, this)));
                }
                let first = *at..*at + *len;
                let pieces = queue.with_neighbors(first, storage.clone(), *offset)?;
                return Ok(Some(Next::Share(pieces, this)));
            }
            // The first share runs alone, to find out whether sharing works.
            if !self.turns.wait(this) {
                return Err(Error::Interrupted);
            }
            let shared = share(CopyMethod::Reflink, target, *at..at + len, &**storage, *offset)?;
            let first_left = shared.left.first().map_or(at + len, |part| part.start);
            let done = if shared.refused { first_left - at } else { *len };
            if shared.refused {
                queue.planner.copy_from(first_left);
            }
            if done > 0 {
                self.turns.done(this);
                queue.number += 1;
            }
            add(&self.moved.shared, shared.bytes.min(done));
            if !shared.refused {
                self.shares.store(shared.bytes > 0, Ordering::Relaxed);
                if !shared.left.is_empty() {
                    return Ok(Some(Next::Left(shared.left, *len)));
                }
            }
            if done > 0 {
                self.progress(done);
            }
        }
    }

    fn progress(&self, len: u64) {
        let done = self.done.fetch_add(len, Ordering::Relaxed) + len;
        self.monitor.progress.update(done, self.source.bytes());
        if let Some(rate) = self.options.rate {
            // Skipped and shared bytes do not count towards the rate.
            let read = self.moved.read.load(Ordering::Relaxed);
            let copied = self.moved.kernel_copied.load(Ordering::Relaxed);
            let due = Duration::from_secs_f64((read + copied) as f64 / rate.max(1) as f64);
            let mut left = due.saturating_sub(self.started.elapsed());
            while !left.is_zero() && !self.monitor.cancel.is_cancelled() {
                let nap = left.min(Duration::from_millis(50));
                std::thread::sleep(nap);
                left -= nap;
            }
        }
    }

    fn in_turn<R>(&self, number: u64, place: impl FnOnce() -> Result<R>) -> Result<R> {
        if !self.turns.wait(number) {
            return Err(Error::Interrupted);
        }
        let placed = place();
        self.turns.done(number);
        placed
    }

    /// Copies unshared parts of a piece. Its turn is over, so they are placed in any order.
    fn copy_parts(&self, buffers: &mut Buffers, parts: &[Range<u64>]) -> Result<()> {
        let Some(target) = self.target else { return Ok(()) };
        let step = 1 << 20;
        for part in parts {
            let mut here = part.start;
            while here < part.end {
                self.monitor.cancel.check()?;
                let run = (step - here % step).min(part.end - here);
                self.read(buffers, here, run)?;
                self.write_runs(target, buffers, here)?;
                here += run;
            }
        }
        Ok(())
    }

    fn read(&self, buffers: &mut Buffers, at: u64, len: u64) -> Result<()> {
        buffers.bytes.resize(len as usize);
        if self.options.salvage {
            let lost = |offset, error: &Error| self.monitor.progress.unreadable(offset, error);
            self.source.salvage_at(&mut buffers.bytes, at, lost)?;
        } else {
            self.source.read_at(&mut buffers.bytes, at)?;
        }
        add(&self.moved.read, len);
        Ok(())
    }

    /// Writes through the target's ordinary write path.
    fn write_runs(&self, target: &Disk, buffers: &mut Buffers, at: u64) -> Result<()> {
        let Buffers { bytes, runs, .. } = buffers;
        self.find_runs(bytes, runs);
        let mut zero_from = 0;
        for run in runs.iter() {
            self.write_zero_gap(target, at, zero_from..run.start)?;
            self.write_run(target, &bytes[run.clone()], GuestOffset(at + run.start as u64))?;
            add(&self.moved.written, run.len() as u64);
            zero_from = run.end;
        }
        self.write_zero_gap(target, at, zero_from..bytes.len())
    }

    fn write_run(&self, target: &Disk, bytes: &[u8], at: GuestOffset) -> Result<()> {
        // If no write needs a fill (raw), a new file has all its space allocated and no data in it.
        if self.options.new && target.top().caps().fill_bytes == 1 {
            return target.write_new_at(bytes, at);
        }
        target.write_at(bytes, at)
    }

    fn write_zero_gap(&self, target: &Disk, at: u64, gap: Range<usize>) -> Result<()> {
        let len = gap.len() as u64;
        add(&self.moved.zero_found, len);
        if len > 0 && self.options.write_zeroes {
            target.write_zeroes(GuestOffset(at + gap.start as u64), len, true)?;
        }
        Ok(())
    }

    fn find_runs(&self, bytes: &[u8], runs: &mut Vec<Range<usize>>) {
        match self.options.detect_zeroes {
            // If zeroes must be written anyway, writing a small gap is cheaper than a separate
            // request.
            Some(step) if self.options.write_zeroes => {
                data_runs(bytes, step, step.max(64 << 10), runs);
            }
            Some(step) => data_runs(bytes, step, step, runs),
            None => {
                runs.clear();
                runs.push(0..bytes.len());
            }
        }
    }

    /// Reads a chunk, reserves its space in turn, and writes it.
    fn copy(&self, buffers: &mut Buffers, number: u64, at: u64, len: u64) -> Result<()> {
        self.read(buffers, at, len)?;
        if let Some(end) = self.source.end_of_stream() {
            // Bytes after the end of the source are not written.
            let end = end.next_multiple_of(512).saturating_sub(at).min(len);
            buffers.bytes.resize(end as usize);
        }
        let Some(target) = self.target else {
            // Nothing is placed, so no order is needed.
            return Ok(());
        };
        let cluster = target.top().caps().cluster_bytes;
        if self.options.over || cluster == 1 {
            if self.options.in_order {
                return self.in_turn(number, || self.write_runs(target, buffers, at));
            }
            self.in_turn(number, || Ok(()))?;
            return match self.options.compress {
                Some(spec) if cluster > 1 && at.is_multiple_of(cluster) => {
                    self.write_compressed(target, buffers, spec, at)
                }
                _ => self.write_runs(target, buffers, at),
            };
        }
        if let Some(spec) = self.options.compress {
            self.pack(target, buffers, spec, at)?;
        }
        self.find_runs(&buffers.bytes, &mut buffers.runs);
        let write = |placed: Vec<Placed<'_>>| {
            placed.into_iter().try_for_each(|part| self.write_placed(target, buffers, at, part))
        };
        if self.options.in_order {
            return self.in_turn(number, || write(self.place(target, buffers, at)?));
        }
        write(self.in_turn(number, || self.place(target, buffers, at))?)
    }
}

/// Whether zeroes are written as data (raw LUKS), not as metadata or holes.
fn writes_zeroes(target: &Disk) -> bool {
    target.encryption(0).is_some() && !target.top().caps().cheap_zeroes
}

/// Maximum piece of zeroes for a target. If they are written as data, it is bounded, so that
/// threads share the work and cancellation is quick.
pub(crate) fn zero_max(target: &Disk) -> u64 {
    if writes_zeroes(target) { ZERO_BYTES_MAX } else { u64::MAX }
}
