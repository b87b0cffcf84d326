use proptest::prelude::*;
use vdkit_testkit::Rng;

use super::*;
use crate::model::Better;

/// Two cells of one load, with a single comparison.
fn gain(own: &[f64], base: &[f64], better: Better) -> Option<Gain> {
    let rounds = |values: &[f64]| -> Rounds { (0u32..).zip(values.iter().copied()).collect() };
    let cells = [(0, rounds(own)), (0, rounds(base))];
    let (one, two) = ([0], [1]);
    let side = |i: usize| Side { rounds: &cells[i].1, cells: if i == 0 { &one } else { &two } };
    Comparator::new(&cells, 1, 1).gain(side(0), side(1), better)
}

fn numbers(n: usize) -> Vec<f64> {
    (1..=n).map(|i| i as f64).collect()
}

#[test]
fn medians() {
    assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    assert_eq!(median(&[]), None);
    assert_eq!(median(&[1.0, f64::NAN]), None);
    assert_eq!(summary(&[f64::INFINITY]), None);
}

/// Ranks and coverage from the table of Le Boudec's book (appendix A, confidence of the median).
#[test]
fn intervals_of_the_median_are_those_of_the_table() {
    for (n, low, high, coverage) in [
        (3, 1, 3, 0.750),
        (5, 1, 5, 0.938),
        (6, 1, 6, 0.969),
        (7, 1, 7, 0.984),
        (8, 1, 8, 0.992),
        (9, 2, 8, 0.961),
        (10, 2, 9, 0.979),
        (15, 4, 12, 0.965),
        (20, 6, 15, 0.959),
        (30, 10, 21, 0.957),
    ] {
        let interval = summary(&numbers(n)).unwrap().interval;
        assert_eq!((interval.low, interval.high), (f64::from(low), f64::from(high)), "{n}");
        assert!((interval.coverage - coverage).abs() < 5e-4, "{n}: {}", interval.coverage);
    }
    let one = summary(&[5.0]).unwrap();
    assert_eq!((one.interval.low, one.interval.high, one.interval.coverage), (5.0, 5.0, 0.0));
    assert_eq!(one.variation, None);
    let two = summary(&numbers(2)).unwrap();
    assert_eq!((two.interval.low, two.interval.high, two.interval.coverage), (1.0, 2.0, 0.5));
    // So many that 2^-n underflows.
    let many = summary(&numbers(3000)).unwrap().interval;
    assert!(many.holds(1500.5) && many.coverage > 0.9, "{many:?}");
}

#[test]
fn variation_is_of_the_sample() {
    assert_eq!(variation(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).map(round), Some(0.4276));
    assert_eq!(variation(&[5.0, 5.0]), Some(0.0));
    assert_eq!(variation(&[1.0, -1.0]), None);
}

fn round(number: f64) -> f64 {
    (number * 1e4).round() / 1e4
}

/// The masses of the example of Grubbs' test in the handbook of engineering statistics
/// (NIST/SEMATECH, 1.3.5.17.1), of which the last is an outlier.
#[test]
fn outliers_are_found_and_others_are_not() {
    let calm = [199.31, 199.53, 200.19, 200.82, 201.92, 201.95, 202.18];
    assert_eq!(outliers(&calm), [0usize; 0]);
    let mut wild = calm.to_vec();
    wild.push(245.57);
    assert_eq!(outliers(&wild), [7]);
    // All but one are equal.
    assert_eq!(outliers(&[5.0, 5.0, 5.0, 5.0, 9.0]), [4]);
    assert_eq!(outliers(&[5.0, 5.0, 5.0, 5.0, 5.05]), [0usize; 0]);
    assert_eq!(outliers(&[1.0, 100.0]), [0usize; 0]);
    assert_eq!(outliers(&[0.0, 0.0, 0.0]), [0usize; 0]);
}

#[test]
fn means_of_ratios() {
    assert_eq!(geometric_mean(&[2.0, 8.0]).map(round), Some(4.0));
    assert_eq!(geometric_mean(&[1.0, 0.0]), None);
    assert_eq!(geometric_mean(&[]), None);
}

/// A number from an exponential distribution, which is skewed, as durations are. Its median is ln
/// 2.
fn skewed(rng: &mut Rng) -> f64 {
    let even = (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
    -(1.0 - even).ln()
}

/// Intervals keep their coverage for a distribution that is far from normal.
#[test]
fn intervals_hold_what_they_promise() {
    let mut rng = Rng::from_env(11);
    for n in [3, 5, 8, 12] {
        let (mut medians, mut ratios, mut promised) = (0, 0, 0.0);
        let trials = 4000;
        for _ in 0..trials {
            let own: Vec<f64> = (0..n).map(|_| skewed(&mut rng)).collect();
            let other: Vec<f64> = (0..n).map(|_| skewed(&mut rng) / 3.0).collect();
            let interval = summary(&own).unwrap().interval;
            medians += u32::from(interval.holds(std::f64::consts::LN_2));
            let gain = gain(&own, &other, Better::Higher).unwrap();
            ratios += u32::from(gain.interval.holds(3.0));
            promised = interval.coverage;
        }
        let held = |count: u32| f64::from(count) / f64::from(trials);
        assert!((held(medians) - promised).abs() < 0.025, "{n}: {} {promised}", held(medians));
        // Student's distribution is an approximation here, so allow a small deficit.
        assert!(held(ratios) > COVERAGE - 0.02, "{n}: {}", held(ratios));
    }
}

proptest! {
    #[test]
    fn summaries_are_within_their_samples(samples in prop::collection::vec(1e-3f64..1e12, 1..60)) {
        let found = summary(&samples).unwrap();
        prop_assert!(found.interval.holds(found.median));
        prop_assert!(samples.contains(&found.interval.low) && samples.contains(&found.interval.high));
        prop_assert!((0.0..=1.0).contains(&found.interval.coverage));
        prop_assert!(found.interval.coverage >= COVERAGE || samples.len() < 6);
        let mut turned = samples.clone();
        turned.reverse();
        prop_assert_eq!(summary(&turned).unwrap().median, found.median);
    }

    #[test]
    fn a_gain_and_its_reverse_agree(
        own in prop::collection::vec(1e-3f64..1e6, 1..20),
        other in prop::collection::vec(1e-3f64..1e6, 1..20),
    ) {
        let there = gain(&own, &other, Better::Higher).unwrap();
        let back = gain(&other, &own, Better::Higher).unwrap();
        let lower = gain(&own, &other, Better::Lower).unwrap();
        prop_assert!((there.ratio * back.ratio - 1.0).abs() < 1e-9);
        prop_assert!((back.ratio - lower.ratio).abs() <= 1e-9 * lower.ratio);
        prop_assert!(there.interval.low <= there.ratio && there.ratio <= there.interval.high);
        let turned = match there.decision {
            Decision::Better => Decision::Worse,
            Decision::Tie => Decision::Tie,
            Decision::Worse => Decision::Better,
        };
        prop_assert_eq!(back.decision, turned);
    }

    #[test]
    fn equal_samples_are_a_tie(samples in prop::collection::vec(1e-3f64..1e6, 1..20)) {
        let found = gain(&samples, &samples, Better::Lower).unwrap();
        prop_assert_eq!(found.decision, Decision::Tie);
    }

    #[test]
    fn percentiles_never_fall(buckets in prop::collection::vec((1u64..1 << 40, 0u64..5000), 0..50)) {
        let all: std::collections::BTreeMap<u64, u64> = buckets.into_iter().collect();
        let histogram = crate::model::Histogram { buckets: all.into_iter().collect() };
        let found = percentiles(&histogram);
        prop_assert!(found.is_sorted_by(|a, b| a.ns <= b.ns && a.fraction < b.fraction));
        prop_assert_eq!(merged([&histogram]).count(), histogram.count());
    }

    #[test]
    fn windows_are_of_the_load(values in prop::collection::vec(0.0f64..1e6, 5..200)) {
        let seconds: Vec<f64> = (1..=values.len()).map(|i| i as f64 * 0.5).collect();
        let steady = steady_window("iops", &seconds, &values).unwrap();
        prop_assert!(steady.from_seconds >= 0.0 && steady.from_seconds < steady.to_seconds);
        prop_assert!(steady.to_seconds <= *seconds.last().unwrap());
        prop_assert!(steady.excursion >= 0.0);
        prop_assert!(!steady.reached || steady.excursion <= EXCURSION_MAX);
    }
}
