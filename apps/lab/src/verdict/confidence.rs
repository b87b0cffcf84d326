//! How sure a verdict is, in words.

use crate::matrix::{Matrix, Pick};
use crate::model::{Cell, SNIA_SECONDS, Steady};
use crate::stats::{ROUNDS_MIN, steady};
use crate::words::{percent, time};

/// From a guess to as sure as one machine can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Less than three rounds: it may well be otherwise.
    Hint,
    /// It varies a lot, or something disturbed it.
    Low,
    /// Three rounds or more that agree well.
    Fair,
    /// Five rounds or more that agree closely, all loads level.
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
const FAIR: (usize, f64) = (ROUNDS_MIN, 0.15);
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
        let states: Vec<Steady> = cells.flat_map(steadiness).collect();
        let all_level = states.iter().all(|state| state.reached);
        let level = if rounds < FAIR.0 {
            Level::Hint
        } else if variation > FAIR.1 {
            Level::Low
        } else if rounds >= HIGH.0 && variation <= HIGH.1 && all_level && !disturbed {
            Level::High
        } else {
            Level::Fair
        };
        let mut words = match rounds {
            1 => "one round, so nobody knows how much it varies".to_owned(),
            rounds => format!("{rounds} rounds, which vary by {}", percent(variation)),
        };
        if !states.is_empty() {
            words.push_str(&format!("; {}", of_states(&states)));
        }
        if outliers > 0 {
            let lie = if outliers == 1 { "lies" } else { "lie" };
            words.push_str(&format!("; {outliers} of the samples {lie} far off"));
        }
        Self { level, words }
    }
}

/// Whether loads kept their rate; SNIA's word for it only where they ran as long as SNIA's.
fn of_states(states: &[Steady]) -> String {
    let level = states.iter().filter(|state| state.reached).count();
    let longest = states.iter().map(Steady::seconds).fold(0.0, f64::max);
    let all = states.len();
    match states.iter().all(Steady::is_long_enough) {
        true => format!("{level} of {all} loads were steady by SNIA's rule"),
        false => format!(
            "{level} of {all} loads kept their rate, seen for {} at most (SNIA's steady state takes \
             {})",
            time(longest),
            time(SNIA_SECONDS)
        ),
    }
}

/// What the samples of a cell say of being steady, by what was noted or by their series.
pub fn steadiness(cell: &Cell) -> Vec<Steady> {
    let of =
        |sample: &crate::model::Sample| sample.steady.clone().or_else(|| steady(&sample.series));
    cell.samples.iter().filter_map(of).collect()
}
