//! The confidence of a verdict, in words.

use serde::{Serialize, Serializer};

use crate::matrix::{Matrix, Pick};
use crate::model::{Cell, SNIA_SECONDS, Steady};
use crate::stats::ROUNDS_MIN;
use crate::words::{percent, plural, time};

/// Levels of confidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Fewer than three rounds: a guess.
    Hint,
    /// The values vary widely, or something disturbed the run.
    Low,
    /// Three rounds or more that agree well, or of survival.
    Fair,
    /// Five rounds or more that agree closely, with all loads steady.
    High,
}

impl Level {
    /// The level as one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Hint => "a first hint",
            Self::Low => "low",
            Self::Fair => "fair",
            Self::High => "high",
        }
    }
}

impl Serialize for Level {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.word())
    }
}

/// A level with its reasons.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Confidence {
    /// How sure.
    pub level: Level,
    /// The reasons, without a capital letter and a full stop.
    #[serde(rename = "reason")]
    pub words: String,
}

impl Default for Confidence {
    fn default() -> Self {
        Self { level: Level::Hint, words: "nothing was measured".to_owned() }
    }
}

/// Smallest number of rounds and largest variation for fair and for high confidence.
const FAIR: (usize, f64) = (ROUNDS_MIN, 0.15);
const HIGH: (usize, f64) = (5, 0.05);

impl Confidence {
    /// Confidence in the comparison of two ways. `disturbed` says that there are cautions.
    pub(super) fn of(
        matrix: &Matrix<'_>,
        best: &Pick,
        base: Option<&Pick>,
        disturbed: bool,
    ) -> Self {
        let both = || std::iter::once(best).chain(base);
        let rounds = both().map(|pick| pick.summary.count).min().unwrap_or(0);
        if matrix.is_survival() {
            return Self::of_survival(rounds);
        }
        // Values with a mean of 0 have no coefficient of variation.
        let variation = both().map(|pick| match pick.summary.count {
            0 | 1 => 0.0,
            _ => pick.summary.variation.unwrap_or(f64::INFINITY),
        });
        let variation = variation.fold(0.0, f64::max);
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
            1 => "one round, which does not show how much results vary".to_owned(),
            rounds if variation.is_infinite() => format!("{rounds} rounds with a mean of 0"),
            rounds => {
                format!(
                    "{rounds} rounds that vary by {} (coefficient of variation)",
                    percent(variation)
                )
            }
        };
        if !states.is_empty() {
            words.push_str(&format!("; {}", of_states(&states)));
        }
        if outliers > 0 {
            words.push_str(&format!("; {}", plural(outliers, "outlier")));
        }
        Self { level, words }
    }

    /// Survival does not vary like a speed, and a rare failure needs many rounds to be seen.
    fn of_survival(rounds: usize) -> Self {
        let level = if rounds < FAIR.0 { Level::Hint } else { Level::Fair };
        let words = format!("{}, too few to exclude a rare failure", plural(rounds, "round"));
        Self { level, words }
    }
}

/// How many samples had an even rate. Uses SNIA's term only for windows as long as SNIA's.
fn of_states(states: &[Steady]) -> String {
    let level = states.iter().filter(|state| state.reached).count();
    let longest = states.iter().map(Steady::seconds).fold(0.0, f64::max);
    let all = states.len();
    match states.iter().all(Steady::is_long_enough) {
        true => format!("{level} of {} were steady by SNIA's rule", plural(all, "sample")),
        false => format!(
            "{level} of {} had an even rate, in windows of at most {} (SNIA's steady state needs {})",
            plural(all, "sample"),
            time(longest),
            time(SNIA_SECONDS)
        ),
    }
}

/// The steadiness of a cell's samples.
pub fn steadiness(cell: &Cell) -> Vec<Steady> {
    cell.samples.iter().filter_map(|sample| sample.steady.clone()).collect()
}
