//! An export's counters in Prometheus' text format (version 0.0.4).

use std::fmt::{Display, Write};

use vdkit_block::MapCacheStats;

use crate::counters::OpStats;
use crate::export::Export;

/// Builder of the text.
struct Text {
    /// The label `export="NAME"` of every sample.
    label: String,
    out: String,
}

impl Text {
    /// Begins a family: `kind` is `counter`, `gauge` or `histogram`.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.out, "# HELP vdkit_{name} {help}\n# TYPE vdkit_{name} {kind}\n");
    }

    /// `labels` is empty or begins with a comma.
    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = writeln!(self.out, "vdkit_{name}{{{}{labels}}} {value}", self.label);
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter_by_op(
        &mut self,
        name: &str,
        help: &str,
        ops: &[OpStats],
        value: fn(&OpStats) -> u64,
    ) {
        self.family(name, "counter", help);
        for op in ops {
            self.sample(name, &format!(",op=\"{}\"", op.kind.name()), value(op));
        }
    }
}

/// All counters of an export.
pub fn text(export: &Export) -> String {
    let stats = export.stats();
    let parked = export.parked();
    let name = export.name().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let mut text = Text { label: format!("export=\"{name}\""), out: String::new() };
    text.counter_by_op("requests_total", "Requests that were answered.", &stats.ops, |op| op.ops);
    text.counter_by_op("bytes_total", "Bytes of requests that went well.", &stats.ops, |op| {
        op.bytes
    });
    text.counter_by_op("errors_total", "Requests that failed.", &stats.ops, |op| op.errors);
    text.family("lane_requests_total", "counter", "Requests by lane.");
    text.sample("lane_requests_total", ",lane=\"fast\"", stats.fast_lane);
    text.sample("lane_requests_total", ",lane=\"slow\"", stats.slow_lane);
    text.gauge("parked_requests", "Changes that wait for space.", parked.requests);
    text.gauge("parked_bytes", "Bytes of changes that wait for space.", parked.bytes);
    text.gauge("paused", "1 while all requests are kept waiting.", export.paused().into());
    text.gauge("size_bytes", "Bytes of the disk.", export.look().guest_bytes);
    if let Some(cache) = &stats.map_cache {
        map_cache(&mut text, cache);
    }
    latencies(&mut text, &stats.ops);
    text.out
}

fn map_cache(text: &mut Text, cache: &MapCacheStats) {
    text.family("map_cache_lookups_total", "counter", "Look-ups of the image's map (L2 tables).");
    text.sample("map_cache_lookups_total", ",found=\"cached\"", cache.hits);
    text.sample("map_cache_lookups_total", ",found=\"read\"", cache.misses);
    text.gauge("map_cache_used_bytes", "Bytes of the map that are cached.", cache.used_bytes);
    text.gauge("map_cache_capacity_bytes", "Bytes that may be cached.", cache.capacity_bytes);
    text.gauge("map_bytes", "Bytes of the map of a disk all allocated.", cache.map_bytes);
}

/// Buckets in the text: one per doubling from 2 µs to over a minute, including empty ones, since a
/// rate needs each of them from the beginning.
const DOUBLINGS: u32 = 26;

fn latencies(text: &mut Text, ops: &[OpStats]) {
    const NAME: &str = "request_seconds";
    text.family(NAME, "histogram", "How long requests took.");
    for op in ops {
        let label = format!(",op=\"{}\"", op.kind.name());
        let within = |bound| {
            let buckets = op.latency.iter().filter(|bucket| bucket.below_nanoseconds <= bound);
            buckets.map(|bucket| bucket.requests).sum::<u64>()
        };
        for doubling in 0..DOUBLINGS {
            let bound = 2000u64 << doubling;
            let labels = format!("{label},le=\"{}\"", bound as f64 / 1e9);
            text.sample("request_seconds_bucket", &labels, within(bound));
        }
        let all = within(u64::MAX);
        text.sample("request_seconds_bucket", &format!("{label},le=\"+Inf\""), all);
        text.sample("request_seconds_sum", &label, op.total_nanoseconds as f64 / 1e9);
        text.sample("request_seconds_count", &label, all);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::counters::{Counters, OpKind};

    #[test]
    fn a_histogram_has_all_its_buckets_and_never_falls() {
        let counters = Counters::default();
        for micros in [0, 1, 3, 3, 500, 1_000_000, 3_600_000_000] {
            counters.done(OpKind::Read, 4096, Duration::from_micros(micros), true);
        }
        let mut text = Text { label: "export=\"x\"".to_owned(), out: String::new() };
        latencies(&mut text, &counters.stats().ops);
        let read: Vec<(f64, u64)> = text
            .out
            .lines()
            .filter_map(|line| line.split_once("_bucket{export=\"x\",op=\"read\",le=\""))
            .filter_map(|(_, rest)| rest.split_once("\"} "))
            .map(|(bound, count)| (bound.parse().unwrap(), count.parse().unwrap()))
            .collect();
        assert_eq!(read.len(), DOUBLINGS as usize + 1);
        assert!(read.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{read:?}");
        let below = |bound: f64| read.iter().find(|(found, _)| *found >= bound).unwrap().1;
        assert_eq!((below(2e-6), below(4e-6), below(1e-3), below(2.0)), (2, 4, 5, 6));
        // Durations above the last bound are only in the last bucket.
        assert_eq!((read[DOUBLINGS as usize - 1].1, read[DOUBLINGS as usize].1), (6, 7));
        assert_eq!(text.out.matches("op=\"flush\",le=").count(), DOUBLINGS as usize + 1);
    }
}
