//! How many times as good one set of samples is as another, and whether that is more than noise.

use super::{COVERAGE, Interval, sorted};
use crate::model::Better;

/// A difference that matters: below it nobody would choose by it, however sure it is.
pub const MATTERS: f64 = 0.02;

/// What one round is taken to be off by, either way, where there are too few to see it. On shared
/// machines a load of some seconds repeats within 5 to 15 %.
pub const SINGLE_ROUND_NOISE: f64 = 0.15;

/// What the ratio of two such rounds is taken to be off by, either way: both may be.
const RATIO_NOISE: f64 = (1.0 + SINGLE_ROUND_NOISE) * (1.0 + SINGLE_ROUND_NOISE);

/// Coverage below which the samples cannot speak for themselves: less than three of each.
const TOO_FEW: f64 = 0.8;

/// Samples of a side up to which chances are counted exactly.
const EXACT_MAX: usize = 30;

/// What a comparison comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Better than the other.
    Better,
    /// They cannot be told apart, or not by so much that it matters.
    Tie,
    /// Worse than the other.
    Worse,
}

/// One against another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// How many times as good: 2 is twice the throughput, or half the time. The median of the ratios
    /// of each sample with each of the other.
    pub ratio: f64,
    /// Where the ratio lies.
    pub interval: Interval,
    /// What it comes to.
    pub decision: Decision,
}

impl Gain {
    /// Whether there are too few samples to see how much they vary, so that
    /// [`SINGLE_ROUND_NOISE`] is allowed for.
    pub fn is_guessed(&self) -> bool {
        self.interval.coverage < TOO_FEW
    }
}

/// Holds samples against a base. Nothing where one side has none, or one that is not above 0.
///
/// It is a tie where the interval holds 1, and where the ratio is within [`MATTERS`] of 1. With less
/// than three samples of each [`SINGLE_ROUND_NOISE`] of each side is allowed for.
pub fn gain(samples: &[f64], base: &[f64], better: Better) -> Option<Gain> {
    let usable = |side: &[f64]| side.iter().all(|sample| *sample > 0.0);
    if !usable(samples) || !usable(base) {
        return None;
    }
    let (own, other) = (sorted(samples)?, sorted(base)?);
    let ratio = |one: f64, two: f64| match better {
        Better::Higher => one / two,
        Better::Lower => two / one,
    };
    let pairs: Vec<f64> =
        own.iter().flat_map(|one| other.iter().map(move |two| ratio(*one, *two))).collect();
    let pairs = sorted(&pairs)?;
    let (skip, coverage) = skipped(own.len(), other.len());
    let mut interval = Interval { low: pairs[skip], high: pairs[pairs.len() - 1 - skip], coverage };
    // In logarithms, so that twice and half weigh the same.
    let half = pairs.len() / 2;
    let middle =
        if pairs.len() % 2 == 1 { pairs[half] } else { (pairs[half - 1] * pairs[half]).sqrt() };
    if coverage < TOO_FEW {
        interval.low = interval.low.min(middle / RATIO_NOISE);
        interval.high = interval.high.max(middle * RATIO_NOISE);
    }
    Some(Gain { ratio: middle, interval, decision: decide(middle, &interval) })
}

fn decide(ratio: f64, interval: &Interval) -> Decision {
    if interval.holds(1.0) || (1.0 / (1.0 + MATTERS)..=1.0 + MATTERS).contains(&ratio) {
        Decision::Tie
    } else if ratio > 1.0 {
        Decision::Better
    } else {
        Decision::Worse
    }
}

/// How many of the ordered pairs at each end lie outside of the interval, and its coverage.
///
/// The interval from pair `k` to pair `k` from the end holds the true ratio unless the
/// Mann–Whitney statistic is below `k` or as far up: its chances, where both sides are of one
/// distribution, are a matter of counting.
fn skipped(m: usize, n: usize) -> (usize, f64) {
    if m > EXACT_MAX || n > EXACT_MAX {
        return skipped_of_many(m, n);
    }
    let ways = ways(m, n);
    let all: f64 = ways.iter().map(|ways| *ways as f64).sum();
    let mut below = ways[0] as f64 / all;
    let mut skip = 0;
    while let Some(next) = ways.get(skip + 1) {
        let wider = below + *next as f64 / all;
        if 1.0 - 2.0 * wider < COVERAGE {
            break;
        }
        below = wider;
        skip += 1;
    }
    (skip, (1.0 - 2.0 * below).max(0.0))
}

/// For many samples the statistic is as good as normally distributed.
fn skipped_of_many(m: usize, n: usize) -> (usize, f64) {
    let (m, n) = (m as f64, n as f64);
    let spread = (m * n * (m + n + 1.0) / 12.0).sqrt();
    let skip = (m * n / 2.0 - 1.96 * spread).floor().max(0.0) as usize;
    (skip.min(((m * n - 1.0) / 2.0) as usize), COVERAGE)
}

/// In how many of all orders of `m` and `n` samples the statistic is 0, 1, 2, … up to `m n`: the
/// coefficients of a Gaussian binomial, which is the product of (1 − qⁿ⁺ⁱ) / (1 − qⁱ) for i from 1
/// to m.
fn ways(m: usize, n: usize) -> Vec<u128> {
    let mut ways = vec![0u128; m * n + 1];
    ways[0] = 1;
    for i in 1..=m {
        // Dividing by 1 − qⁱ adds what stands i before; from the front.
        for at in i..ways.len() {
            ways[at] = ways[at].wrapping_add(ways[at - i]);
        }
        // Multiplying with 1 − qⁿ⁺ⁱ takes what stood n + i before; from the back.
        for at in (n + i..ways.len()).rev() {
            ways[at] = ways[at].wrapping_sub(ways[at - n - i]);
        }
    }
    ways
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_counted() {
        assert_eq!(ways(1, 1), [1, 1]);
        assert_eq!(ways(2, 2), [1, 1, 2, 1, 1]);
        assert_eq!(ways(3, 3), [1, 1, 2, 3, 3, 3, 3, 2, 1, 1]);
        // 30 of 60.
        assert_eq!(ways(30, 30).iter().sum::<u128>(), 118_264_581_564_861_424);
    }

    /// Critical values at 5 %, two-sided, as tables of the Mann–Whitney test have them.
    #[test]
    fn intervals_are_those_of_the_tables() {
        for (m, n, critical) in [(5, 5, 2), (6, 4, 2), (8, 8, 13), (10, 10, 23), (20, 20, 127)] {
            assert_eq!(skipped(m, n).0, critical, "{m} and {n}");
        }
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        near(skipped(3, 3).1, 0.9);
        near(skipped(2, 2).1, 1.0 - 2.0 / 6.0);
        near(skipped(1, 1).1, 0.0);
        near(skipped(5, 5).1, 1.0 - 2.0 * 4.0 / 252.0);
        // The approximation goes on where counting ends.
        let (exact, about) = (skipped(30, 30).0, skipped_of_many(30, 30).0);
        assert!(exact.abs_diff(about) <= 2, "{exact} {about}");
        assert_eq!(skipped(31, 1).0, 0);
    }

    #[test]
    fn better_is_up_or_down() {
        let (slow, fast) = ([10.0, 11.0, 10.5], [20.0, 21.0, 22.0]);
        let up = gain(&fast, &slow, Better::Higher).unwrap();
        assert_eq!(up.decision, Decision::Better);
        assert_eq!(up.ratio, 2.0);
        assert_eq!((up.interval.low, up.interval.high), (20.0 / 11.0, 2.2));
        let down = gain(&fast, &slow, Better::Lower).unwrap();
        assert_eq!(down.decision, Decision::Worse);
        assert_eq!(down.ratio, 0.5);
    }

    #[test]
    fn noise_is_a_tie() {
        let decide = |a: &[f64], b: &[f64]| gain(a, b, Better::Higher).unwrap().decision;
        assert_eq!(decide(&[10.0, 12.0, 11.0], &[10.5, 11.5, 10.8]), Decision::Tie);
        // Sure, and too little to matter.
        assert_eq!(decide(&[101.0, 101.1, 101.2], &[100.0, 100.1, 100.2]), Decision::Tie);
        assert_eq!(decide(&[104.0, 104.1, 104.2], &[100.0, 100.1, 100.2]), Decision::Better);
        // One round: what it may be off by is allowed for.
        assert_eq!(decide(&[110.0], &[100.0]), Decision::Tie);
        assert_eq!(decide(&[130.0], &[100.0]), Decision::Tie);
        assert_eq!(decide(&[135.0], &[100.0]), Decision::Better);
        assert_eq!(decide(&[110.0, 111.0], &[100.0, 101.0]), Decision::Tie);
    }

    #[test]
    fn what_cannot_be_compared_is_not() {
        for bad in [&[][..], &[0.0], &[-1.0], &[f64::NAN], &[f64::INFINITY]] {
            assert_eq!(gain(bad, &[1.0], Better::Higher), None, "{bad:?}");
            assert_eq!(gain(&[1.0], bad, Better::Lower), None, "{bad:?}");
        }
    }
}
