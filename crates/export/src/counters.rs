//! Counts of what an export does: cheap enough to be always on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vdkit_block::MapCacheStats;

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Writing zeroes.
    Zero,
    /// Giving bytes back.
    Discard,
    /// Making everything durable.
    Flush,
}

impl OpKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Zero, Self::Discard, Self::Flush];

    /// The name in statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Zero => "zero",
            Self::Discard => "discard",
            Self::Flush => "flush",
        }
    }
}

/// Buckets of a histogram: four to each doubling from 1 µs, up to 2^26 µs (a minute).
const BUCKETS: usize = 26 * 4 + 1;

/// How long requests took. Four buckets to each doubling: a value is known to about a fifth.
#[derive(Debug)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Histogram {
    fn bucket(took: Duration) -> usize {
        // In quarters of a microsecond, so that the first doublings have four buckets as well.
        let quarters = (took.as_nanos() / 250).clamp(4, 1 << 60) as u64;
        let doubling = quarters.ilog2() as usize - 2;
        let within = (quarters >> doubling) as usize & 3;
        (doubling * 4 + within).min(BUCKETS - 1)
    }

    /// The upper end of a bucket.
    fn bound(bucket: usize) -> Duration {
        let quarters = (5 + bucket as u64 % 4) << (bucket / 4);
        Duration::from_nanos(quarters * 250)
    }

    fn add(&self, took: Duration) {
        self.counts[Self::bucket(took)].fetch_add(1, Ordering::Relaxed);
    }

    /// The buckets that are not empty, in order.
    pub fn buckets(&self) -> Vec<LatencyBucket> {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).enumerate();
        let bucket = |(bucket, requests)| LatencyBucket {
            below_nanoseconds: Self::bound(bucket).as_nanos() as u64,
            requests,
        };
        counts.filter(|(_, n)| *n > 0).map(bucket).collect()
    }

    /// As [`quantile`], of this histogram.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        quantile(&self.buckets(), share)
    }
}

/// One kind's counts.
#[derive(Debug, Default)]
struct Kind {
    ops: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    latency: Histogram,
}

/// What an export counts.
#[derive(Debug, Default)]
pub struct Counters {
    kinds: [Kind; OpKind::ALL.len()],
    fast: AtomicU64,
    slow: AtomicU64,
}

impl Counters {
    /// A request that was answered.
    pub fn done(&self, kind: OpKind, bytes: u64, took: Duration, ok: bool) {
        let kind = &self.kinds[kind as usize];
        kind.ops.fetch_add(1, Ordering::Relaxed);
        if ok {
            kind.bytes.fetch_add(bytes, Ordering::Relaxed);
        } else {
            kind.errors.fetch_add(1, Ordering::Relaxed);
        }
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        kind.nanos.fetch_add(nanos, Ordering::Relaxed);
        kind.latency.add(took);
    }

    /// Counts a request's lane.
    pub fn lane(&self, fast: bool) {
        let lane = if fast { &self.fast } else { &self.slow };
        lane.fetch_add(1, Ordering::Relaxed);
    }

    /// A kind's latencies.
    pub fn latency(&self, kind: OpKind) -> &Histogram {
        &self.kinds[kind as usize].latency
    }

    /// All counts as they are now.
    pub fn stats(&self) -> Stats {
        let ops = OpKind::ALL.map(|which| {
            let kind = &self.kinds[which as usize];
            let latency = kind.latency.buckets();
            let micros = |share| {
                quantile(&latency, share).map_or(0.0, |took| took.as_nanos() as f64 / 1000.0)
            };
            OpStats {
                kind: which,
                ops: kind.ops.load(Ordering::Relaxed),
                bytes: kind.bytes.load(Ordering::Relaxed),
                errors: kind.errors.load(Ordering::Relaxed),
                total_nanoseconds: kind.nanos.load(Ordering::Relaxed),
                p50_microseconds: micros(0.5),
                p99_microseconds: micros(0.99),
                p999_microseconds: micros(0.999),
                latency,
            }
        });
        Stats {
            ops: ops.to_vec(),
            fast_lane: self.fast.load(Ordering::Relaxed),
            slow_lane: self.slow.load(Ordering::Relaxed),
            map_cache: None,
        }
    }
}

/// One kind of requests, since the export began.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct OpStats {
    /// Which.
    pub kind: OpKind,
    /// Requests that were answered.
    pub ops: u64,
    /// Bytes of those without an error.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// The sum of their times.
    pub total_nanoseconds: u64,
    /// Half of them took at most so long (see [`Histogram`]).
    pub p50_microseconds: f64,
    /// 99 of 100.
    pub p99_microseconds: f64,
    /// 999 of 1000.
    pub p999_microseconds: f64,
    /// How long they took: the buckets that are not empty, in order.
    pub latency: Vec<LatencyBucket>,
}

/// Requests that took less than a time, and not less than the bucket before says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyBucket {
    /// The time.
    pub below_nanoseconds: u64,
    /// How many.
    pub requests: u64,
}

/// The time within which a share (0 to 1) of the requests of a histogram ended, to the bucket's
/// upper end; nothing without requests. The buckets are in order.
pub fn quantile(buckets: &[LatencyBucket], share: f64) -> Option<Duration> {
    let total = buckets.iter().fold(0u64, |sum, bucket| sum.saturating_add(bucket.requests));
    let wanted = ((total as f64 * share).ceil() as u64).max(1);
    let mut seen = 0u64;
    buckets.iter().find_map(|bucket| {
        seen = seen.saturating_add(bucket.requests);
        (seen >= wanted).then(|| Duration::from_nanos(bucket.below_nanoseconds))
    })
}

/// An export's counts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Stats {
    /// By kind, always all kinds in the same order.
    pub ops: Vec<OpStats>,
    /// Requests done where they stood, without waiting.
    pub fast_lane: u64,
    /// Requests that went to a thread of their own.
    pub slow_lane: u64,
    /// The caches of the images' maps, where the format has such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub map_cache: Option<MapCacheStats>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_what_lies_below_its_bound() {
        for nanos in [0, 1, 999, 1000, 1001, 1249, 1250, 5000, 12_345, 1_000_000, 777_777_777] {
            let took = Duration::from_nanos(nanos);
            let bucket = Histogram::bucket(took);
            assert!(took < Histogram::bound(bucket), "{nanos} in {bucket}");
            assert!(bucket == 0 || took >= Histogram::bound(bucket - 1), "{nanos} in {bucket}");
        }
        assert_eq!(Histogram::bucket(Duration::from_secs(1 << 40)), BUCKETS - 1);
    }

    #[test]
    fn quantiles_come_from_the_right_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        for _ in 0..99 {
            histogram.add(Duration::from_micros(10));
        }
        histogram.add(Duration::from_millis(50));
        let near = |found: Option<Duration>, micros: u64| {
            let found = found.unwrap().as_micros() as u64;
            found >= micros && found <= micros * 5 / 4
        };
        assert!(near(histogram.quantile(0.5), 10));
        assert!(near(histogram.quantile(0.99), 10));
        assert!(near(histogram.quantile(0.999), 50_000));
    }

    #[test]
    fn counts_are_kept_by_kind() {
        let counters = Counters::default();
        counters.done(OpKind::Write, 4096, Duration::from_micros(3), true);
        counters.done(OpKind::Write, 4096, Duration::from_micros(3), false);
        counters.lane(true);
        let stats = counters.stats();
        let write = &stats.ops[OpKind::Write as usize];
        assert_eq!((write.ops, write.bytes, write.errors), (2, 4096, 1));
        assert_eq!((stats.fast_lane, stats.slow_lane), (1, 0));
        assert_eq!(stats.ops[OpKind::Read as usize].ops, 0);
    }
}
