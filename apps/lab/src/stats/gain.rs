//! Computes how many times as good one thing is as another, and whether the difference is larger
//! than noise.
//!
//! Fifty comparisons at 95 % each report two or three differences that do not exist. So the error
//! probability applies to *all comparisons of a verdict together*: each comparison gets a share of
//! it (Bonferroni), and the shares shrink with each time that a run tests its own results to see
//! whether it may stop.

use serde::Serialize;

use super::noise::{Noise, Rounds};
use super::special::student;
use super::{Interval, sorted};
use crate::model::Better;

/// Smallest difference that matters. Nobody would choose by a smaller one, however certain it is.
pub const MATTERS: f64 = 0.02;

/// Smallest number of rounds for a decision. Fewer do not show their variation.
pub const ROUNDS_MIN: usize = 3;

/// Probability that a verdict wrongly calls anything better or worse.
pub const ERROR: f64 = 0.05;

/// The part of [`ERROR`] that the comparisons share. The rest is a reserve for what Student's
/// distribution does not cover: storage has heavier tails, and few cells do not show how much their
/// variances differ.
const SHARED: f64 = 0.4;

/// A comparison whose interval has a smaller ratio of its ends (12 % either way) needs no more
/// rounds: a difference within the interval is no reason to choose.
pub const NARROW: f64 = 1.25;

/// The result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Decision {
    /// Better than the other.
    Better,
    /// The two are indistinguishable, or their difference is too small to matter.
    Tie,
    /// Worse than the other.
    Worse,
}

impl Decision {
    /// The result as one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Tie => "tie",
            Self::Worse => "worse",
        }
    }
}

/// Comparison of one way with another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// How many times as good: 2 is twice the throughput, or half the time. Geometric mean of the
    /// ratios, round by round.
    pub ratio: f64,
    /// Interval of the ratio. With fewer than [`ROUNDS_MIN`] rounds it is the range of the measured
    /// ratios, with no coverage.
    #[serde(flatten)]
    pub interval: Interval,
    /// Number of rounds of the side that has fewer.
    pub rounds: usize,
    /// The result.
    #[serde(rename = "verdict")]
    pub decision: Decision,
}

impl Gain {
    /// Whether there are too few rounds for a decision.
    pub fn is_hint(&self) -> bool {
        self.rounds < ROUNDS_MIN
    }

    /// Whether more rounds would not change the result: it is decided, or the two are practically
    /// equal.
    pub fn is_settled(&self) -> bool {
        let narrow = self.interval.high <= self.interval.low * NARROW;
        !self.is_hint() && (self.decision != Decision::Tie || narrow)
    }

    /// A gain from too few rounds. `middle` is a logarithm.
    pub(super) fn hint(middle: f64, rounds: usize) -> Self {
        let ratio = middle.exp();
        let interval = Interval { low: ratio, high: ratio, coverage: 0.0 };
        Self { ratio, interval, decision: Decision::Tie, rounds: rounds.min(ROUNDS_MIN - 1) }
    }

    /// A gain from the middle and half the width of its interval, both as logarithms.
    pub(super) fn around(middle: f64, half: f64, rounds: usize) -> Self {
        let ratio = middle.exp();
        // A larger width would overflow.
        let half = half.min(50.0);
        let (low, high) = ((middle - half).exp(), (middle + half).exp());
        let interval = Interval { low, high, coverage: 1.0 - ERROR };
        let near = (1.0 / (1.0 + MATTERS)..=1.0 + MATTERS).contains(&ratio);
        let decision = match interval.holds(1.0) || near {
            true => Decision::Tie,
            false if ratio > 1.0 => Decision::Better,
            false => Decision::Worse,
        };
        Self { ratio, interval, decision, rounds }
    }
}

/// One side of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Its values by round; the geometric mean of several cells.
    pub rounds: &'a Rounds,
    /// Indices of its cells.
    pub cells: &'a [usize],
}

/// Makes all comparisons of a run.
#[derive(Clone, Debug, Default)]
pub struct Comparator {
    noise: Noise,
    /// Error probability of one comparison.
    share: f64,
}

impl Comparator {
    /// Creates the comparator of a run's cells, each with the number of its load. `comparisons` is the
    /// number of comparisons that a verdict makes. `interim_tests` is how many times the run tested
    /// whether it may stop; 1 if its number of rounds was fixed.
    pub fn new(cells: &[(usize, Rounds)], comparisons: usize, interim_tests: usize) -> Self {
        let (comparisons, tests) = (comparisons.max(1) as f64, interim_tests.max(1) as f64);
        Self { noise: Noise::of(cells), share: SHARED * ERROR / comparisons / tests.powi(2) }
    }

    /// Compares one side with another. None if a side has no value, or one that is not above 0.
    pub fn gain(&self, own: Side<'_>, base: Side<'_>, better: Better) -> Option<Gain> {
        let usable = |side: &Side<'_>| {
            !side.rounds.is_empty()
                && side.rounds.iter().all(|(_, value)| *value > 0.0 && value.is_finite())
        };
        if !usable(&own) || !usable(&base) {
            return None;
        }
        let ratios = ratios(own.rounds, base.rounds, better);
        let rounds = own.rounds.len().min(base.rounds.len());
        let (middle, range) = (mean(&ratios), sorted(&ratios)?);
        let spread = self.noise.between(own.cells, base.cells);
        let Some(spread) = spread.filter(|_| rounds >= ROUNDS_MIN) else {
            let (low, high) = (range[0].exp(), range[range.len() - 1].exp());
            let interval = Interval { low, high, coverage: 0.0 };
            return Some(Gain { interval, ..Gain::hint(middle, rounds) });
        };
        let half = student(self.share, spread.freedom) * spread.variance.sqrt();
        Some(Gain::around(middle, half, rounds))
    }
}

/// Logarithms of the ratios, of the rounds that both sides have, or else of every pair of rounds.
fn ratios(own: &Rounds, base: &Rounds, better: Better) -> Vec<f64> {
    let sign = if better == Better::Higher { 1.0 } else { -1.0 };
    let ratio = |one: f64, two: f64| sign * (one / two).ln();
    let paired: Vec<f64> = own
        .iter()
        .filter_map(|(round, one)| {
            let (_, two) = base.iter().find(|(other, _)| other == round)?;
            Some(ratio(*one, *two))
        })
        .collect();
    if !paired.is_empty() {
        return paired;
    }
    let each = own.iter().flat_map(|(_, one)| base.iter().map(move |(_, two)| (*one, *two)));
    each.map(|(one, two)| ratio(one, two)).collect()
}

/// The mean, because [`Noise`] describes the spread of a mean and not of a median.
pub(super) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(values: &[f64]) -> Rounds {
        (0u32..).zip(values.iter().copied()).collect()
    }

    /// Two cells of one load, with a single comparison.
    fn gain(own: &[f64], base: &[f64], better: Better) -> Option<Gain> {
        let cells = [(0, rounds(own)), (0, rounds(base))];
        let side = |i: usize| Side { rounds: &cells[i].1, cells: if i == 0 { &[0] } else { &[1] } };
        Comparator::new(&cells, 1, 1).gain(side(0), side(1), better)
    }

    #[test]
    fn better_is_up_or_down() {
        let (slow, fast) = ([10.0, 11.0, 10.5], [20.0, 22.0, 21.0]);
        let up = gain(&fast, &slow, Better::Higher).unwrap();
        assert_eq!(up.decision, Decision::Better);
        assert!((up.ratio - 2.0).abs() < 1e-9 && up.interval.holds(2.0), "{up:?}");
        let down = gain(&fast, &slow, Better::Lower).unwrap();
        assert_eq!(down.decision, Decision::Worse);
        assert!((down.ratio - 0.5).abs() < 1e-9);
    }

    #[test]
    fn noise_is_a_tie() {
        let decide = |a: &[f64], b: &[f64]| gain(a, b, Better::Higher).unwrap().decision;
        assert_eq!(decide(&[10.0, 12.0, 11.0], &[10.5, 11.5, 10.8]), Decision::Tie);
        // Certain, but too small to matter.
        assert_eq!(decide(&[101.0; 5], &[100.0; 5]), Decision::Tie);
        assert_eq!(decide(&[105.0; 5], &[100.0; 5]), Decision::Better);
    }

    #[test]
    fn one_or_two_rounds_decide_nothing() {
        let found = gain(&[500.0], &[100.0], Better::Higher).unwrap();
        assert!(found.is_hint() && !found.is_settled(), "{found:?}");
        assert_eq!((found.decision, found.interval.coverage), (Decision::Tie, 0.0));
        let found = gain(&[500.0, 501.0], &[100.0, 101.0], Better::Higher).unwrap();
        assert!(found.is_hint() && found.decision == Decision::Tie, "{found:?}");
    }

    #[test]
    fn more_comparisons_and_more_interim_tests_need_more() {
        let cells = [(0, rounds(&[10.0, 11.0, 10.5])), (0, rounds(&[12.0, 12.4, 12.7]))];
        let width = |comparisons, interim_tests| {
            let comparator = Comparator::new(&cells, comparisons, interim_tests);
            let side = |i: usize| Side { rounds: &cells[i].1, cells: [&[0], &[1]][i] };
            let found = comparator.gain(side(0), side(1), Better::Higher).unwrap();
            found.interval.high / found.interval.low
        };
        assert!(width(1, 1) < width(10, 1) && width(10, 1) < width(10, 3));
    }

    /// Interim tests share the error as comparisons do, by the square of their number.
    #[test]
    fn the_error_is_shared() {
        let share = |comparisons, tests| Comparator::new(&[], comparisons, tests).share;
        let near = |one: f64, two: f64| (one / two - 1.0).abs() < 1e-9;
        assert!(near(share(1, 1), 0.02) && near(share(0, 0), 0.02));
        assert!(near(share(10, 1), 0.002) && near(share(10, 2), 0.0005));
    }

    #[test]
    fn the_borders_of_decisions() {
        let around = |ratio: f64, half: f64| Gain::around(ratio.ln(), half.ln(), 5);
        // 12 % either way is narrow enough, and 13 % is not.
        assert!(around(1.0, 1.11).is_settled() && !around(1.0, 1.13).is_settled());
        assert!(!Gain { rounds: 2, ..around(1.0, 1.01) }.is_settled());
        // Certain, but nobody would choose by it.
        assert_eq!(around(1.019, 1.001).decision, Decision::Tie);
        assert_eq!(around(1.021, 1.001).decision, Decision::Better);
        assert_eq!(around(1.0 / 1.021, 1.001).decision, Decision::Worse);
    }

    /// In two rounds, of which the second was twice as fast for both, the ratio is the same.
    #[test]
    fn rounds_are_compared_with_the_same_rounds() {
        let found = gain(&[100.0, 200.0], &[50.0, 100.0], Better::Higher).unwrap();
        assert!((found.interval.low - 2.0).abs() < 1e-9, "{found:?}");
        assert!((found.interval.high - 2.0).abs() < 1e-9, "{found:?}");
    }

    #[test]
    fn what_cannot_be_compared_is_not() {
        for bad in [&[][..], &[0.0], &[-1.0], &[f64::NAN], &[f64::INFINITY]] {
            assert_eq!(gain(bad, &[1.0], Better::Higher), None, "{bad:?}");
            assert_eq!(gain(&[1.0], bad, Better::Lower), None, "{bad:?}");
        }
    }
}
