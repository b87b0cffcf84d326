//! Runs a load in the lab's own process on vdkit's library, without a server or a kernel in
//! between.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Context, Result};
use serde_json::Value;
use vdkit_block::{CacheMode, CancelToken, GuestOffset};
use vdkit_chain::{Disk, OpenOptions};

use super::Bench;
use crate::cells::{Rng, shuffled};
use crate::fio::{Answer, both_series, interval_ms, percentiles};
use crate::layout::{Image, noise};
use crate::model::{Histogram, Series};
use crate::profile::{Load, Pattern, Sync};

/// The counts of one thread.
#[derive(Default)]
struct Done {
    buckets: BTreeMap<u64, u64>,
    sum_ns: f64,
    reads: u64,
    writes: u64,
    sync_ns: f64,
    syncs: u64,
    /// Number of requests that ended in each interval of the load.
    intervals: BTreeMap<u64, u64>,
}

/// The bucket of a latency: 64 buckets for each power of two, as in fio.
fn bucket(ns: u64) -> u64 {
    let shift = (64 - ns.leading_zeros()).saturating_sub(7);
    (ns >> shift) << shift
}

impl Done {
    /// Adds the counts of another thread.
    fn add(&mut self, other: Self) {
        for (ns, count) in other.buckets {
            *self.buckets.entry(ns).or_default() += count;
        }
        self.sum_ns += other.sum_ns;
        self.reads += other.reads;
        self.writes += other.writes;
        self.sync_ns += other.sync_ns;
        self.syncs += other.syncs;
        for (interval, count) in other.intervals {
            *self.intervals.entry(interval).or_default() += count;
        }
    }
}

struct Worker<'a> {
    disk: &'a Disk,
    load: &'a Load,
    cancel: &'a CancelToken,
    /// The part of the disk that the thread uses.
    part: std::ops::Range<u64>,
    /// Start of the load, the same for all threads.
    start: Instant,
    interval_ms: u64,
    until: Instant,
    /// Largest number of requests, for a load without a time limit.
    most: u64,
    /// The blocks of the part in order, for a load that writes each block once.
    blocks: Vec<u64>,
    rng: Rng,
}

impl Worker<'_> {
    fn run(mut self) -> vdkit_block::Result<Done> {
        let mut done = Done::default();
        let mut buffer = vec![0; self.load.block as usize];
        noise(&mut buffer, &mut self.rng);
        let blocks = (self.part.end - self.part.start) / self.load.block;
        let mut next = 0;
        while blocks > 0 && done.reads + done.writes < self.most {
            // At least one request per thread, so that a load always has results: a thread may
            // start late.
            let some = done.reads + done.writes > 0;
            if some && Instant::now() >= self.until {
                break;
            }
            self.cancel.check()?;
            let (reads, random) = match self.load.rw {
                Pattern::Read => (true, false),
                Pattern::Write => (false, false),
                Pattern::RandomRead => (true, true),
                Pattern::RandomWrite => (false, true),
                Pattern::RandomMix(reads) => (self.rng.below(100) < u64::from(reads), true),
            };
            let block = match self.blocks.get(next as usize) {
                Some(block) => *block,
                None if random => self.rng.below(blocks),
                None => next % blocks,
            };
            next += 1;
            let at = GuestOffset(self.part.start + block * self.load.block);
            let began = Instant::now();
            if reads {
                self.disk.read_at(&mut buffer, at)?;
                done.reads += 1;
            } else {
                self.disk.write_at(&buffer, at)?;
                done.writes += 1;
            }
            let ns = began.elapsed().as_nanos() as u64;
            *done.buckets.entry(bucket(ns)).or_default() += 1;
            done.sum_ns += ns as f64;
            let ended = self.start.elapsed().as_millis() as u64;
            *done.intervals.entry(ended / self.interval_ms).or_default() += 1;
            let (Sync::Fsync(every) | Sync::Fdatasync(every)) = self.load.sync else { continue };
            if !reads && done.writes.is_multiple_of(u64::from(every)) {
                let began = Instant::now();
                self.disk.flush()?;
                done.sync_ns += began.elapsed().as_nanos() as f64;
                done.syncs += 1;
            }
        }
        Ok(done)
    }
}

pub(super) fn run(
    bench: &mut Bench<'_>,
    load: &Load,
    image: &Image,
    cache: CacheMode,
) -> Result<(Answer, Vec<Series>)> {
    let options = OpenOptions::read_write().format(image.format).cache(cache);
    let disk = Disk::open(bench.registry, &image.path, &options)?;
    let (began, interval_ms) = (Instant::now(), interval_ms(&bench.effort));
    let all = threads(bench, load, (&disk, image.bytes), began, interval_ms)?;
    let load_seconds = began.elapsed().as_secs_f64();
    let began = Instant::now();
    disk.flush()?;
    let flush = began.elapsed().as_secs_f64();
    disk.close()?;
    bench.commands.push(format!(
        "# in the lab's process: {} of {} bytes, {} threads, on {}",
        load.rw.word(),
        load.block,
        u64::from(load.jobs) * u64::from(load.depth),
        image.path.display()
    ));
    let series = series(&all.intervals, interval_ms, load_seconds, load.block);
    Ok((answer(load, all, load_seconds, flush), series))
}

/// Runs all threads of the load to their end. The load began at `began`.
fn threads(
    bench: &Bench<'_>,
    load: &Load,
    (disk, bytes): (&Disk, u64),
    began: Instant,
    interval_ms: u64,
) -> Result<Done> {
    let (jobs, depth) = (u64::from(load.jobs), u64::from(load.depth));
    let part = bytes / jobs;
    let each = if load.to_the_end { bench.effort.bytes.min(part) } else { part };
    let most = if load.to_the_end { each / load.block / depth } else { u64::MAX };
    let until = began + Duration::from_secs_f64(bench.effort.seconds);
    let results: Vec<_> = std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for job in 0..jobs {
            let mut rng = Rng::new(bench.seed ^ job);
            let count = if load.once { (each / load.block) as usize } else { 0 };
            let order = shuffled(count, &mut rng);
            for lane in 0..depth {
                let blocks = order.iter().skip(lane as usize).step_by(load.depth as usize);
                let worker = Worker {
                    disk,
                    load,
                    cancel: &bench.cancel,
                    part: job * each..(job + 1) * each,
                    start: began,
                    interval_ms,
                    until,
                    most,
                    blocks: blocks.map(|block| *block as u64).collect(),
                    rng: Rng::new(bench.seed ^ (job << 32 | lane)),
                };
                workers.push(scope.spawn(move || worker.run()));
            }
        }
        workers.into_iter().map(|worker| worker.join()).collect()
    });
    let mut all = Done::default();
    for done in results {
        all.add(done.ok().context("a thread of the load has failed")??);
    }
    Ok(all)
}

/// Requests over time, without the last interval, which is incomplete.
fn series(
    counts: &BTreeMap<u64, u64>,
    interval_ms: u64,
    load_seconds: f64,
    block: u64,
) -> Vec<Series> {
    let whole = (load_seconds * 1e3) as u64 / interval_ms;
    let seconds = interval_ms as f64 / 1e3;
    let (ends, iops) = (0..whole)
        .map(|i| {
            let count = counts.get(&i).copied().unwrap_or(0);
            ((i + 1) as f64 * seconds, count as f64 / seconds)
        })
        .unzip();
    both_series(ends, iops, block)
}

fn answer(load: &Load, done: Done, seconds: f64, flush: f64) -> Answer {
    let requests = (done.reads + done.writes) as f64;
    let all = if load.to_the_end { seconds + flush } else { seconds };
    let latencies = Histogram { buckets: done.buckets.into_iter().collect() };
    let mut values = super::values([
        ("iops", requests / all.max(1e-9)),
        ("bytes_per_second", requests * load.block as f64 / all.max(1e-9)),
        ("latency_mean_ns", done.sum_ns / requests.max(1.0)),
    ]);
    if done.writes > 0 {
        values.insert("final_fsync_seconds".to_owned(), flush);
    }
    if done.syncs > 0 {
        values.insert("sync_mean_ns".to_owned(), done.sync_ns / done.syncs as f64);
    }
    values.extend(percentiles(&latencies));
    Answer { values, latencies: Some(latencies), raw: Value::Null }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_has_each_whole_interval_also_those_without_requests() {
        let counts = BTreeMap::from([(0, 50), (2, 30), (3, 7)]);
        let found = series(&counts, 100, 0.35, 4096);
        assert_eq!(found[1].metric, "iops");
        assert_eq!(found[1].values, [500.0, 0.0, 300.0]);
        assert_eq!(found[0].values, [500.0 * 4096.0, 0.0, 300.0 * 4096.0]);
        assert!((found[0].seconds[2] - 0.3).abs() < 1e-9, "{found:?}");
        assert_eq!(series(&counts, 100, 0.19, 4096), []);
    }

    #[test]
    fn buckets_are_within_two_percent() {
        for ns in [0, 1, 63, 127, 128, 1000, 123_456_789, u64::MAX] {
            let found = bucket(ns);
            assert!(found <= ns && (ns - found) as f64 <= ns as f64 * 0.016, "{ns}: {found}");
        }
    }
}
