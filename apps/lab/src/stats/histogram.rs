//! Latency distributions: merging over rounds, and percentiles.

use std::collections::BTreeMap;

use crate::model::Histogram;

/// The percentiles that are shown, from the median to p99.99.
pub const FRACTIONS: &[f64] = &[0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9995, 0.9999];

/// A point of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Percentile {
    /// The fraction of all requests that took at most this time.
    pub fraction: f64,
    /// The time in nanoseconds.
    pub ns: u64,
}

/// Merges histograms. The buckets of the result are in rising order, and none is empty.
pub fn merged<'a>(histograms: impl IntoIterator<Item = &'a Histogram>) -> Histogram {
    let mut all: BTreeMap<u64, u64> = BTreeMap::new();
    for (ns, count) in histograms.into_iter().flat_map(|histogram| &histogram.buckets) {
        let sum = all.entry(*ns).or_default();
        *sum = sum.saturating_add(*count);
    }
    Histogram { buckets: all.into_iter().filter(|(_, count)| *count > 0).collect() }
}

/// The [`FRACTIONS`] of a distribution (nearest rank, so that each is the latency of a real
/// request). Leaves out fractions for which there are too few requests: a thousand requests have no
/// p99.99.
pub fn percentiles(histogram: &Histogram) -> Vec<Percentile> {
    let count = histogram.count() as f64;
    let reached = |fraction: &f64| (1.0 - fraction) * count >= 1.0 - 1e-6;
    let reached = FRACTIONS.iter().copied().filter(reached);
    reached
        .filter_map(|fraction| Some(Percentile { fraction, ns: histogram.quantile(fraction)? }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_become_one_distribution() {
        let one = Histogram { buckets: vec![(10, 1), (30, 2)] };
        let two = Histogram { buckets: vec![(20, 5), (30, u64::MAX), (40, 0)] };
        assert_eq!(merged([&one, &two]).buckets, [(10, 1), (20, 5), (30, u64::MAX)]);
        assert_eq!(merged([]), Histogram::default());
    }

    #[test]
    fn percentiles_go_as_far_as_there_are_requests() {
        // One request for each of 1 to 10,000 ns.
        let even = Histogram { buckets: (1..=10_000).map(|ns| (ns, 1)).collect() };
        let found = percentiles(&even);
        assert_eq!(found.len(), FRACTIONS.len());
        let ns: Vec<u64> = found.iter().map(|point| point.ns).collect();
        assert_eq!(ns, [5000, 7500, 9000, 9500, 9900, 9950, 9990, 9995, 9999]);
        let few = Histogram { buckets: vec![(7, 100)] };
        let fractions: Vec<f64> = percentiles(&few).iter().map(|point| point.fraction).collect();
        assert_eq!(fractions, [0.5, 0.75, 0.9, 0.95, 0.99]);
        assert_eq!(percentiles(&Histogram::default()), []);
        assert_eq!(percentiles(&Histogram { buckets: vec![(1, 1)] }), []);
    }
}
