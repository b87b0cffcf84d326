//! The table of metrics, one row each.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::stats::median;

/// Whether higher or lower values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Metric {
    /// Its name in results.
    pub key: &'static str,
    /// Its name for people.
    pub title: &'static str,
    /// The unit: `1/s`, `B/s`, `ns`, `s`, `B`, or nothing for a count.
    pub unit: &'static str,
    /// Whether higher or lower values are better.
    pub better: Better,
}

impl Metric {
    /// The order of two values, the better one first.
    pub fn best_first(&self, one: f64, two: f64) -> Ordering {
        let order = one.total_cmp(&two);
        if self.better == Better::Higher { order.reverse() } else { order }
    }

    /// One number for the values of several rounds: the median. For survival the share of rounds,
    /// because the median would pass over a disk that was lost once. None without values.
    pub fn of_rounds(&self, values: &[f64]) -> Option<f64> {
        match self.key {
            SURVIVED if !values.is_empty() => {
                Some(values.iter().sum::<f64>() / values.len() as f64)
            }
            _ => median(values),
        }
    }
}

const fn more(key: &'static str, title: &'static str, unit: &'static str) -> Metric {
    Metric { key, title, unit, better: Better::Higher }
}

const fn less(key: &'static str, title: &'static str, unit: &'static str) -> Metric {
    Metric { key, title, unit, better: Better::Lower }
}

/// Key of survival: 1 if a load completed without an error, otherwise 0.
pub const SURVIVED: &str = "survived";

/// Every metric. A key without a direction covers reads and writes together.
pub static METRICS: &[Metric] = &[
    more("iops", "requests per second", "1/s"),
    more("bytes_per_second", "throughput", "B/s"),
    more("read_iops", "reads per second", "1/s"),
    more("write_iops", "writes per second", "1/s"),
    more("read_bytes_per_second", "read throughput", "B/s"),
    more("write_bytes_per_second", "write throughput", "B/s"),
    less("latency_mean_ns", "mean latency", "ns"),
    less("latency_p50_ns", "median latency", "ns"),
    less("latency_p90_ns", "90th percentile latency", "ns"),
    less("latency_p99_ns", "99th percentile latency", "ns"),
    less("latency_p999_ns", "99.9th percentile latency", "ns"),
    less("latency_p9999_ns", "99.99th percentile latency", "ns"),
    less("sync_mean_ns", "mean sync latency", "ns"),
    less("elapsed_seconds", "time", "s"),
    less("second_pass_seconds", "time of the second pass", "s"),
    less("open_seconds", "time to open", "s"),
    less("final_fsync_seconds", "time of the final fsync", "s"),
    less("server_cpu_seconds", "processor time of the server", "s"),
    more("requests_per_cpu_second", "requests per second of the server's processor time", "1/s"),
    less("reads", "reads", ""),
    less("device_reads", "reads of the device", ""),
    less("read_bytes", "bytes read", "B"),
    more("flushes", "flushes completed by the device", ""),
    less("host_bytes", "space on the host", "B"),
    less("io_errors", "errors that the client saw", ""),
    less("daemons", "programs that serve the disk besides the guest", ""),
    less("machine_stops", "times that QEMU stopped the whole guest", ""),
    less("stalled_seconds", "time without progress", "s"),
    more(SURVIVED, "survived", ""),
    more("score", "score", ""),
];

/// The metric with this key.
pub fn metric(key: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.key == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_did_not_survive_is_not_passed_over() {
        let survived = metric(SURVIVED).unwrap();
        assert_eq!(survived.of_rounds(&[1.0, 0.0, 1.0, 1.0]), Some(0.75));
        assert_eq!(survived.of_rounds(&[]), None);
        assert_eq!(metric("iops").unwrap().of_rounds(&[1.0, 0.0, 1.0]), Some(1.0));
    }

    #[test]
    fn each_metric_is_in_the_table_once() {
        for known in METRICS {
            assert_eq!(METRICS.iter().filter(|m| m.key == known.key).count(), 1, "{}", known.key);
            assert_eq!(metric(known.key), Some(known));
        }
        assert_eq!(metric("speed"), None);
    }
}
