//! How sure a verdict is, in words.

use crate::matrix::{Matrix, Pick};
use crate::model::{Cell, Steady};
use crate::stats::steady;
use crate::words::percent;

/// From a guess to as sure as one machine can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Less than three rounds: it may well be otherwise.
    Hint,
    /// It varies a lot, or something disturbed it.
    Low,
    /// Three rounds or more that agree well.
    Fair,
    /// Five rounds or more that agree closely, all of them steady.
    High,
}

impl Level {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Hint => "a first hint",
            Self::Low => "low",
            Self::Fair => "fair",
            Self::High => "high",
        }
    }
}

/// How sure, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Confidence {
    /// How sure.
    pub level: Level,
    /// Why, in a sentence.
    pub words: String,
}

/// Rounds and variations from which on confidence is fair or high.
const FAIR: (usize, f64) = (3, 0.15);
const HIGH: (usize, f64) = (5, 0.05);

impl Confidence {
    pub(super) fn none() -> Self {
        Self { level: Level::Hint, words: "Nothing was measured.".to_owned() }
    }

    /// Of the two that the verdict holds against one another. `disturbed`: there are cautions.
    pub(super) fn of(
        matrix: &Matrix<'_>,
        best: &Pick,
        base: Option<&Pick>,
        disturbed: bool,
    ) -> Self {
        let both = || std::iter::once(best).chain(base);
        let rounds = both().map(|pick| pick.summary.count).min().unwrap_or(0);
        let variation = both().filter_map(|pick| pick.summary.variation).fold(0.0, f64::max);
        let outliers: usize = both().map(|pick| pick.summary.outliers.len()).sum();
        let cells = both().flat_map(|pick| &pick.cells).map(|i| &matrix.run.cells[*i]);
        let states: Vec<bool> = cells.flat_map(steadiness).map(|state| state.reached).collect();
        let steady = states.iter().filter(|reached| **reached).count();
        let all_steady = steady == states.len();
        let level = if rounds < FAIR.0 {
            Level::Hint
        } else if variation > FAIR.1 {
            Level::Low
        } else if rounds >= HIGH.0 && variation <= HIGH.1 && all_steady && !disturbed {
            Level::High
        } else {
            Level::Fair
        };
        let mut words = match rounds {
            1 => "one round, so nobody knows how much it varies".to_owned(),
            rounds => format!("{rounds} rounds, which vary by {}", percent(variation)),
        };
        if !states.is_empty() {
            let said = match states.len() {
                all if all == steady => "; all loads were steady".to_owned(),
                _ if steady == 0 => "; not steady by SNIA's rule".to_owned(),
                all => format!("; {steady} of {all} loads were steady by SNIA's rule"),
            };
            words.push_str(&said);
        }
        if outliers > 0 {
            words.push_str(&format!("; {outliers} of the samples lie far off"));
        }
        Self { level, words }
    }
}

/// What the samples of a cell say of being steady, by what was noted or by their series.
pub fn steadiness(cell: &Cell) -> Vec<Steady> {
    let of =
        |sample: &crate::model::Sample| sample.steady.clone().or_else(|| steady(&sample.series));
    cell.samples.iter().filter_map(of).collect()
}
