//! Rates of a service between two samples.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use vdkit::MapCacheStats;
use vdkit::serve::{LatencyBucket, OpKind, OpStats, Stats, quantile};

/// A service's answers at one time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When the sample was taken.
    pub at: Instant,
    pub status: Status,
    pub stats: Stats,
}

/// The fields of the answer to `status` that are shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Status {
    pub filename: String,
    pub virtual_size: u64,
    pub read_only: bool,
    pub paused: bool,
    pub parked: Parked,
    pub uptime_seconds: f64,
}

/// Writes that wait for space.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Parked {
    pub requests: u64,
    pub bytes: u64,
    pub seconds: f64,
    pub reason: String,
}

/// The JSON answer of `vdkit top`: one interval.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Rates {
    /// The later state.
    #[serde(flatten)]
    pub status: Status,
    pub interval_seconds: f64,
    /// Every kind of request, in the service's order.
    pub ops: Vec<OpRates>,
    /// Share of this interval's requests that were completed without blocking; none without
    /// requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fast_lane_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub map_cache: Option<CacheRates>,
}

/// One kind of request in an interval. Latencies are those of requests that ended in the interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct OpRates {
    pub kind: OpKind,
    pub requests_per_second: f64,
    pub bytes_per_second: f64,
    /// Number of failed requests, not a rate.
    pub errors: u64,
    pub mean_microseconds: f64,
    /// Upper end of the histogram bucket, as for the other percentiles.
    pub p50_microseconds: f64,
    pub p99_microseconds: f64,
}

/// The cache of image metadata in an interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct CacheRates {
    pub lookups_per_second: f64,
    /// Share of lookups that needed no read; none without lookups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hit_share: Option<f64>,
    pub used_bytes: u64,
    pub capacity_bytes: u64,
    pub map_bytes: u64,
}

impl Rates {
    /// Rates from one sample to a later one. If the service was restarted in between, its counters
    /// began at zero.
    pub fn between(earlier: &Sample, later: &Sample) -> Self {
        let seconds = later.at.saturating_duration_since(earlier.at).as_secs_f64().max(1e-3);
        let anew = later.status.uptime_seconds < earlier.status.uptime_seconds;
        let before = (!anew).then_some(&earlier.stats);
        let op_before =
            |kind| before.and_then(|stats| stats.ops.iter().find(|op: &&OpStats| op.kind == kind));
        let ops = later.stats.ops.iter();
        let ops = ops.map(|op| OpRates::between(op_before(op.kind), op, seconds)).collect();
        let lane = |count: fn(&Stats) -> u64| {
            count(&later.stats).saturating_sub(before.map_or(0, count)) as f64
        };
        let (fast, slow) = (lane(|stats| stats.fast_lane), lane(|stats| stats.slow_lane));
        let cache_before = before.and_then(|stats| stats.map_cache).unwrap_or_default();
        Self {
            status: later.status.clone(),
            interval_seconds: seconds,
            ops,
            fast_lane_share: share(fast, slow),
            map_cache: later
                .stats
                .map_cache
                .map(|cache| CacheRates::between(cache_before, cache, seconds)),
        }
    }
}

fn share(these: f64, others: f64) -> Option<f64> {
    let all = these + others;
    (all > 0.0).then(|| these / all)
}

impl OpRates {
    fn between(earlier: Option<&OpStats>, later: &OpStats, seconds: f64) -> Self {
        let grown =
            |count: fn(&OpStats) -> u64| count(later).saturating_sub(earlier.map_or(0, count));
        let requests = grown(|op| op.ops);
        let no_buckets = &[][..];
        let buckets = added(earlier.map_or(no_buckets, |op| op.latency.as_slice()), &later.latency);
        let micros =
            |share| quantile(&buckets, share).map_or(0.0, |took| took.as_nanos() as f64 / 1e3);
        Self {
            kind: later.kind,
            requests_per_second: requests as f64 / seconds,
            bytes_per_second: grown(|op| op.bytes) as f64 / seconds,
            errors: grown(|op| op.errors),
            mean_microseconds: match requests {
                0 => 0.0,
                n => grown(|op| op.total_nanoseconds) as f64 / 1e3 / n as f64,
            },
            p50_microseconds: micros(0.5),
            p99_microseconds: micros(0.99),
        }
    }
}

/// Entries added to a histogram.
fn added(earlier: &[LatencyBucket], later: &[LatencyBucket]) -> Vec<LatencyBucket> {
    let before = |bucket: &LatencyBucket| {
        let same = earlier.iter().find(|old| old.below_nanoseconds == bucket.below_nanoseconds);
        same.map_or(0, |old| old.requests)
    };
    let grown = later.iter().map(|bucket| LatencyBucket {
        requests: bucket.requests.saturating_sub(before(bucket)),
        ..*bucket
    });
    grown.filter(|bucket| bucket.requests > 0).collect()
}

impl CacheRates {
    fn between(earlier: MapCacheStats, later: MapCacheStats, seconds: f64) -> Self {
        // The counters went back: another image has taken the first one's place.
        let anew = later.hits < earlier.hits || later.misses < earlier.misses;
        let earlier = if anew { MapCacheStats::default() } else { earlier };
        let hits = (later.hits - earlier.hits) as f64;
        let misses = (later.misses - earlier.misses) as f64;
        Self {
            lookups_per_second: (hits + misses) / seconds,
            hit_share: share(hits, misses),
            used_bytes: later.used_bytes,
            capacity_bytes: later.capacity_bytes,
            map_bytes: later.map_bytes,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::time::Duration;

    fn bucket(below_nanoseconds: u64, requests: u64) -> LatencyBucket {
        LatencyBucket { below_nanoseconds, requests }
    }

    fn op(kind: OpKind, ops: u64, latency: &[LatencyBucket]) -> OpStats {
        OpStats {
            kind,
            ops,
            bytes: ops * 4096,
            errors: ops / 100,
            total_nanoseconds: ops * 30_000,
            p50_microseconds: 0.0,
            p99_microseconds: 0.0,
            p999_microseconds: 0.0,
            latency: latency.to_vec(),
        }
    }

    /// A sample of a service that has answered this many reads.
    pub fn sample(at: Instant, uptime: f64, reads: u64, latency: &[LatencyBucket]) -> Sample {
        Sample {
            at,
            status: Status {
                filename: "disk.qcow2".to_owned(),
                virtual_size: 64 << 30,
                read_only: false,
                paused: false,
                parked: Parked::default(),
                uptime_seconds: uptime,
            },
            stats: Stats {
                ops: vec![op(OpKind::Read, reads, latency), op(OpKind::Write, 0, &[])],
                fast_lane: reads * 3 / 4,
                slow_lane: reads / 4,
                map_cache: Some(MapCacheStats {
                    hits: reads,
                    misses: reads / 9,
                    used_bytes: 1 << 20,
                    capacity_bytes: 32 << 20,
                    map_bytes: 8 << 20,
                }),
            },
        }
    }

    #[test]
    fn only_what_came_counts() {
        let now = Instant::now();
        // A hundred fast requests before the interval, then 900 of which 20 are slow.
        let earlier = sample(now, 10.0, 100, &[bucket(1000, 100)]);
        let later = sample(
            now + Duration::from_secs(2),
            12.0,
            1000,
            &[bucket(1000, 100), bucket(20_000, 880), bucket(5_000_000, 20)],
        );
        let rates = Rates::between(&earlier, &later);
        assert_eq!(rates.interval_seconds, 2.0);
        let read = &rates.ops[0];
        assert_eq!((read.requests_per_second, read.errors), (450.0, 9));
        assert_eq!(read.bytes_per_second, 450.0 * 4096.0);
        assert_eq!(read.mean_microseconds, 30.0);
        assert_eq!((read.p50_microseconds, read.p99_microseconds), (20.0, 5000.0));
        let write = &rates.ops[1];
        assert_eq!((write.requests_per_second, write.mean_microseconds), (0.0, 0.0));
        assert_eq!((write.p50_microseconds, write.p99_microseconds), (0.0, 0.0));
        assert_eq!(rates.fast_lane_share, Some(0.75));
        let cache = rates.map_cache.unwrap();
        assert_eq!(cache.lookups_per_second, 500.0);
        assert_eq!(cache.hit_share, Some(0.9));
    }

    #[test]
    fn nothing_happened() {
        let now = Instant::now();
        let same = sample(now, 10.0, 100, &[bucket(1000, 100)]);
        let rates = Rates::between(&same, &Sample { at: now, ..same.clone() });
        assert!(rates.ops.iter().all(|op| op.requests_per_second == 0.0));
        assert_eq!(rates.fast_lane_share, None);
        assert_eq!(rates.map_cache.unwrap().hit_share, None);
    }

    #[test]
    fn a_service_that_was_started_anew_began_at_zero() {
        let now = Instant::now();
        let earlier = sample(now, 100.0, 1_000_000, &[bucket(1000, 1_000_000)]);
        let later = sample(now + Duration::from_secs(1), 0.5, 10, &[bucket(1000, 10)]);
        let rates = Rates::between(&earlier, &later);
        assert_eq!(rates.ops[0].requests_per_second, 10.0);
        assert_eq!(rates.ops[0].p50_microseconds, 1.0);
        // Only the disk was replaced, so its cache counts from zero.
        let mut other = sample(now + Duration::from_secs(1), 101.0, 1_000_000, &[]);
        other.stats.map_cache = Some(MapCacheStats { hits: 3, ..MapCacheStats::default() });
        let rates = Rates::between(&earlier, &other);
        assert_eq!(rates.map_cache.unwrap().lookups_per_second, 3.0);
    }
}
