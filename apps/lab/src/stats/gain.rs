//! How many times as good one thing is as another, and whether that is more than noise.
//!
//! A page that makes fifty comparisons at 95 % each finds two or three differences where there are
//! none. So the chance of error is that of *all comparisons of a verdict together*: each has its share
//! of it (Bonferroni), and the shares become smaller each time that a run looks at its own results to
//! see whether it may stop.

use super::noise::{Noise, Rounds};
use super::special::student;
use super::{Interval, sorted};
use crate::model::Better;

/// A difference that matters: below it nobody would choose by it, however sure it is.
pub const MATTERS: f64 = 0.02;

/// Rounds below which nothing is decided: they do not show how much they vary.
pub const ROUNDS_MIN: usize = 3;

/// The chance that a verdict calls anything better or worse that is not.
pub const ERROR: f64 = 0.05;

/// The part of [`ERROR`] that is shared out. The rest is for what Student's distribution does not know of:
/// storage has heavier tails, and few cells do not tell how much they differ in that.
const SHARED: f64 = 0.4;

/// An interval whose ends are no farther apart than this (12 % either way) tells enough: what lies
/// in it is no reason to choose.
pub const NARROW: f64 = 1.25;

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

impl Decision {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Tie => "tie",
            Self::Worse => "worse",
        }
    }

    /// Seen from the other side.
    pub fn reversed(self) -> Self {
        match self {
            Self::Better => Self::Worse,
            Self::Tie => Self::Tie,
            Self::Worse => Self::Better,
        }
    }
}

/// One against another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    /// How many times as good: 2 is twice the throughput, or half the time. Round by round, the
    /// geometric mean of the ratios.
    pub ratio: f64,
    /// Where the ratio lies. With less than [`ROUNDS_MIN`] rounds it is the range of what was
    /// measured, and covers nothing.
    pub interval: Interval,
    /// What it comes to.
    pub decision: Decision,
    /// Rounds of the side that has fewer.
    pub rounds: usize,
}

impl Gain {
    /// Whether there are too few rounds to see how much they vary, so that nothing is decided.
    pub fn is_hint(&self) -> bool {
        self.rounds < ROUNDS_MIN
    }

    /// Whether more rounds would tell nothing that matters: it is decided, or the two are as good as
    /// equal.
    pub fn is_settled(&self) -> bool {
        let narrow = self.interval.high <= self.interval.low * NARROW;
        !self.is_hint() && (self.decision != Decision::Tie || narrow)
    }

    /// Of too few rounds, from the middle as a logarithm.
    pub(super) fn hint(middle: f64, rounds: usize) -> Self {
        let ratio = middle.exp();
        let interval = Interval { low: ratio, high: ratio, coverage: 0.0 };
        Self { ratio, interval, decision: Decision::Tie, rounds: rounds.min(ROUNDS_MIN - 1) }
    }

    /// From a middle and half a width of its interval, both logarithms.
    pub(super) fn around(middle: f64, half: f64, rounds: usize) -> Self {
        let ratio = middle.exp();
        // (Beyond that no number is left to print.)
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
    /// What it measured, by round: of several cells their geometric mean.
    pub rounds: &'a Rounds,
    /// The cells that stand behind it, as indices.
    pub cells: &'a [usize],
}

/// What decides all comparisons of a run.
#[derive(Clone, Debug, Default)]
pub struct Judge {
    noise: Noise,
    /// The chance of error of one comparison.
    share: f64,
}

impl Judge {
    /// Of a run's cells, each with the number of its load. `comparisons` is how many a verdict makes
    /// of them, `looks` how often the run has looked whether it may stop, 1 where its rounds were
    /// fixed beforehand.
    pub fn new(cells: &[(usize, Rounds)], comparisons: usize, looks: usize) -> Self {
        let (comparisons, looks) = (comparisons.max(1) as f64, looks.max(1) as f64);
        Self { noise: Noise::of(cells), share: SHARED * ERROR / comparisons / looks.powi(2) }
    }

    /// Holds one side against the other. Nothing where one of them has no value, or one that is not
    /// above 0.
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

/// Logarithms of ratios: of the rounds that both have, else of each with each.
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

/// The mean, whose spread is what [`Noise`] tells of; that of a median is another.
pub(super) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(values: &[f64]) -> Rounds {
        (0u32..).zip(values.iter().copied()).collect()
    }

    /// Two cells of one load, the only comparison.
    fn gain(own: &[f64], base: &[f64], better: Better) -> Option<Gain> {
        let cells = [(0, rounds(own)), (0, rounds(base))];
        let side = |i: usize| Side { rounds: &cells[i].1, cells: if i == 0 { &[0] } else { &[1] } };
        Judge::new(&cells, 1, 1).gain(side(0), side(1), better)
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
        // Sure, and too little to matter.
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
    fn more_comparisons_and_more_looks_want_more() {
        let cells = [(0, rounds(&[10.0, 11.0, 10.5])), (0, rounds(&[12.0, 12.4, 12.7]))];
        let width = |comparisons, looks| {
            let judge = Judge::new(&cells, comparisons, looks);
            let side = |i: usize| Side { rounds: &cells[i].1, cells: [&[0], &[1]][i] };
            let found = judge.gain(side(0), side(1), Better::Higher).unwrap();
            found.interval.high / found.interval.low
        };
        assert!(width(1, 1) < width(10, 1) && width(10, 1) < width(10, 3));
    }

    #[test]
    fn what_cannot_be_compared_is_not() {
        for bad in [&[][..], &[0.0], &[-1.0], &[f64::NAN], &[f64::INFINITY]] {
            assert_eq!(gain(bad, &[1.0], Better::Higher), None, "{bad:?}");
            assert_eq!(gain(&[1.0], bad, Better::Lower), None, "{bad:?}");
        }
    }
}
