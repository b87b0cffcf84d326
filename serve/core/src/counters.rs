//! Counters of an export, cheap enough to be always on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vdkit_block::MapCacheStats;

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Writing zeroes.
    Zero,
    /// Discards.
    Discard,
    /// Flushes.
    Flush,
}

impl OpKind {
    /// All kinds.
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

/// Histogram buckets: four per doubling from 1 µs up to 2^26 µs (a minute).
const BUCKETS: usize = 26 * 4 + 1;

/// Latency histogram. With four buckets per doubling, values are accurate to about a fifth.
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
        // In quarters of a microsecond, so that the first doublings have four buckets too.
        let quarters = (took.as_nanos() / 250).clamp(4, 1 << 60) as u64;
        let doubling = quarters.ilog2() as usize - 2;
        let within = (quarters >> doubling) as usize & 3;
        (doubling * 4 + within).min(BUCKETS - 1)
    }

    /// Upper bound of a bucket.
    fn bound(bucket: usize) -> Duration {
        let quarters = (5 + bucket as u64 % 4) << (bucket / 4);
        Duration::from_nanos(quarters * 250)
    }

    fn add(&self, took: Duration) {
        self.counts[Self::bucket(took)].fetch_add(1, Ordering::Relaxed);
    }

    /// The non-empty buckets, in order.
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

/// Counters of one kind.
#[derive(Debug, Default)]
struct Kind {
    ops: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    nanos: AtomicU64,
    latency: Histogram,
}

/// Counters of an export.
#[derive(Debug, Default)]
pub struct Counters {
    kinds: [Kind; OpKind::ALL.len()],
    fast: AtomicU64,
    slow: AtomicU64,
}

impl Counters {
    /// Counts an answered request.
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

    /// Counts a request by path.
    pub fn lane(&self, fast: bool) {
        let lane = if fast { &self.fast } else { &self.slow };
        lane.fetch_add(1, Ordering::Relaxed);
    }

    /// Latencies of a kind.
    pub fn latency(&self, kind: OpKind) -> &Histogram {
        &self.kinds[kind as usize].latency
    }

    /// A copy of all counters.
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

/// Counters of one kind of request, since the export started.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct OpStats {
    /// The kind.
    pub kind: OpKind,
    /// Answered requests.
    pub ops: u64,
    /// Bytes of successful requests.
    pub bytes: u64,
    /// Failed requests.
    pub errors: u64,
    /// Sum of their durations.
    pub total_nanoseconds: u64,
    /// Median duration (see [`Histogram`]).
    pub p50_microseconds: f64,
    /// 99th percentile.
    pub p99_microseconds: f64,
    /// 99.9th percentile.
    pub p999_microseconds: f64,
    /// The non-empty buckets of their durations, in order.
    pub latency: Vec<LatencyBucket>,
}

/// Requests with a duration below a bound, and at least the bound of the bucket before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LatencyBucket {
    /// Upper bound.
    pub below_nanoseconds: u64,
    /// Number of requests.
    pub requests: u64,
}

/// The quantile `share` (0 to 1) of a histogram, rounded up to a bucket's bound; `None` without
/// requests. The buckets must be in order.
pub fn quantile(buckets: &[LatencyBucket], share: f64) -> Option<Duration> {
    let total = buckets.iter().fold(0u64, |sum, bucket| sum.saturating_add(bucket.requests));
    let wanted = ((total as f64 * share).ceil() as u64).max(1);
    let mut seen = 0u64;
    buckets.iter().find_map(|bucket| {
        seen = seen.saturating_add(bucket.requests);
        (seen >= wanted).then(|| Duration::from_nanos(bucket.below_nanoseconds))
    })
}

/// An export's counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Stats {
    /// By kind: all kinds, in fixed order.
    pub ops: Vec<OpStats>,
    /// Requests served without waiting (non-blocking path).
    pub fast_lane: u64,
    /// Requests handed to another thread.
    pub slow_lane: u64,
    /// Statistics of the map caches, if the format has them.
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
