//! Compares one state of a host with another, from one run or several runs of each.
//!
//! Two runs differ by more than the change between them. An hour later the host has other
//! neighbors, files are elsewhere, and caches hold other data. With nothing changed, two runs
//! differ by more than their rounds show, and *all cells of a run change together*. No round within
//! a run can show that. Only more runs can:
//!
//! - With two or more interleaved runs of both states, the variation between runs of one state is
//!   estimated from them: a part that all cells share, and a part of each cell.
//! - With one run of each state the variation is unknown. Runs are assumed to differ by up to
//!   [`RUNS_APART`], and a smaller difference is undecided. Every difference is undecided if other
//!   programs used the machine during a run.

use super::gain::{ERROR, Gain, ROUNDS_MIN, mean};
use super::noise::{Noise, Rounds};
use super::special::student;
use crate::model::Better;

/// Assumed largest ratio between two runs of the same thing on the same host, if it was not
/// measured.
pub const RUNS_APART: f64 = 3.0;

/// Number of runs beyond one per state from which the variation between runs is estimated.
const RUNS_FREE: usize = 2;

/// Runs of the two states. The cells are in the same order in all of them.
#[derive(Clone, Debug)]
pub struct Runs {
    before: Vec<Vec<Rounds>>,
    after: Vec<Vec<Rounds>>,
    /// Number of cells that all runs have.
    complete: usize,
    /// Half the width of the part that all cells share, as a logarithm.
    shared: f64,
    /// Noise of the part of each cell: first the cells before the change, then those after it.
    noise: Noise,
    learnt: bool,
    busy: bool,
}

impl Runs {
    /// Creates the comparison from runs. Each run has a load number and rounds for each cell (no
    /// rounds if the cell was not measured). `busy` says that other programs used the machine
    /// during a run.
    pub fn new(
        loads: &[usize],
        before: Vec<Vec<Rounds>>,
        after: Vec<Vec<Rounds>>,
        busy: bool,
    ) -> Self {
        let free = (before.len() + after.len()).saturating_sub(2);
        let learnt = free >= RUNS_FREE && !before.is_empty() && !after.is_empty();
        let all = || before.iter().chain(&after);
        let complete =
            (0..loads.len()).filter(|cell| all().all(|run| level(&run[*cell]).is_some())).count();
        let mut runs = Self {
            before,
            after,
            complete,
            shared: RUNS_APART.ln(),
            noise: Noise::default(),
            learnt,
            busy,
        };
        if learnt {
            runs.learn(free)
        } else {
            runs.suppose(loads)
        }
        runs
    }

    /// Whether the variation between runs was estimated from these runs.
    pub fn is_learnt(&self) -> bool {
        self.learnt
    }

    /// Estimates the variation from the scatter of runs of the same state.
    fn learn(&mut self, free: usize) {
        let cells = self.before[0].len();
        let rows: Vec<Option<Rounds>> = (0..cells).map(|cell| self.scatter(cell)).collect();
        let known: Vec<&Rounds> = rows.iter().flatten().collect();
        let shared = |run: usize| {
            known.iter().map(|row| row[run].1).sum::<f64>() / known.len().max(1) as f64
        };
        let squares: f64 = (0..self.runs()).map(|run| shared(run).powi(2)).sum();
        let deviation = (squares / free as f64).sqrt();
        self.shared = student(ERROR / 2.0, free as f64) * deviation * self.root();
        let rows: Vec<(usize, Option<Rounds>)> = rows.into_iter().map(|row| (0, row)).collect();
        self.noise = Noise::of_centred(&rows, 2);
    }

    /// Assumes the variation: single runs only have the scatter of their rounds.
    fn suppose(&mut self, loads: &[usize]) {
        let groups = loads.iter().max().map_or(1, |most| most + 1);
        let of = |runs: &[Vec<Rounds>], side: usize| -> Vec<(usize, Rounds)> {
            let first = runs.first().cloned().unwrap_or_default();
            loads.iter().map(|load| load + side * groups).zip(first).collect()
        };
        let both = [of(&self.before, 0), of(&self.after, 1)].concat();
        self.noise = Noise::of(&both);
    }

    fn runs(&self) -> usize {
        self.before.len() + self.after.len()
    }

    /// The factor from one run's deviation to that of the difference, from the two numbers of runs.
    fn root(&self) -> f64 {
        (1.0 / self.before.len() as f64 + 1.0 / self.after.len() as f64).sqrt()
    }

    /// A cell's logarithm in each run, minus the mean of its state.
    fn scatter(&self, cell: usize) -> Option<Rounds> {
        let mut row = Rounds::new();
        for side in [&self.before, &self.after] {
            let levels: Option<Vec<f64>> = side.iter().map(|run| level(&run[cell])).collect();
            let levels = levels?;
            let middle = mean(&levels);
            for level in levels {
                row.push((row.len() as u32, level - middle));
            }
        }
        Some(row)
    }

    /// How many times as good a cell is after the change, and whether that exceeds the variation
    /// between runs. None if a state has no value, or one that is not above 0.
    pub fn gain(&self, cell: usize, better: Better) -> Option<Gain> {
        let side = |runs: &[Vec<Rounds>]| -> Option<f64> {
            let measured: Vec<&Rounds> =
                runs.iter().map(|run| &run[cell]).filter(|rounds| !rounds.is_empty()).collect();
            let levels: Option<Vec<f64>> = measured.iter().map(|rounds| level(rounds)).collect();
            levels.filter(|levels| !levels.is_empty()).map(|levels| mean(&levels))
        };
        let (before, after) = (side(&self.before)?, side(&self.after)?);
        let middle = if better == Better::Higher { after - before } else { before - after };
        let all = self.before.iter().chain(&self.after).map(|run| run[cell].len());
        let rounds = all.min().unwrap_or(0);
        let known = rounds >= ROUNDS_MIN && (self.learnt || !self.busy);
        let own = self.own(cell).filter(|_| known);
        Some(match own {
            Some(own) => Gain::around(middle, self.shared + own, rounds),
            None => Gain::hint(middle, rounds),
        })
    }

    /// Half the width of a cell's own part.
    fn own(&self, cell: usize) -> Option<f64> {
        let share = ERROR / 2.0 / self.complete.max(1) as f64;
        if self.learnt {
            let spread = self.noise.of_one(cell)?;
            return Some(student(share, spread.freedom) * spread.variance.sqrt() * self.root());
        }
        let cells = self.before.first().map_or(0, Vec::len);
        let spread = self.noise.between(&[cell], &[cells + cell])?;
        Some(student(share, spread.freedom) * spread.variance.sqrt())
    }
}

/// The mean of a cell's rounds, as a logarithm.
fn level(rounds: &Rounds) -> Option<f64> {
    let usable = rounds.iter().all(|(_, value)| *value > 0.0 && value.is_finite());
    let logs: Vec<f64> = rounds.iter().map(|(_, value)| value.ln()).collect();
    (usable && !logs.is_empty()).then(|| mean(&logs))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Decision;

    /// A run of cells at these levels, with three rounds within 2 %.
    fn run(levels: &[f64]) -> Vec<Rounds> {
        let rounds = |level: &f64| [0.99, 1.0, 1.01].map(|part| part * level);
        let each = levels.iter().map(|level| (0u32..).zip(rounds(level)).collect());
        each.collect()
    }

    const SAME: [f64; 4] = [100.0, 50.0, 20.0, 10.0];

    fn times(by: [f64; 4]) -> Vec<Rounds> {
        run(&[0, 1, 2, 3].map(|i| SAME[i] * by[i]))
    }

    #[test]
    fn another_hour_is_no_change() {
        // Observed with `install` and nothing changed: half the speed, steady in both runs.
        let runs = Runs::new(&[0; 4], vec![run(&SAME)], vec![times([0.48, 0.6, 0.64, 1.0])], false);
        assert!(!runs.is_learnt());
        for cell in 0..4 {
            assert_eq!(runs.gain(cell, Better::Higher).unwrap().decision, Decision::Tie, "{cell}");
        }
        let far =
            |busy| Runs::new(&[0; 4], vec![run(&SAME)], vec![times([0.2, 1.0, 1.0, 5.0])], busy);
        let decided =
            |busy| [0, 3].map(|cell| far(busy).gain(cell, Better::Higher).unwrap().decision);
        assert_eq!(decided(false), [Decision::Worse, Decision::Better]);
        // Thirty programs on two processors slow a load down by a factor of fifteen.
        assert_eq!(decided(true), [Decision::Tie; 2]);
    }

    #[test]
    fn how_far_runs_lie_apart_is_learnt_from_runs() {
        let near = |by: f64, cell: f64| times([by, by, by, by * cell]);
        let before = vec![near(1.0, 1.0), near(1.02, 1.01), near(0.98, 1.0)];
        let after = vec![near(1.01, 0.5), near(0.99, 0.51), near(1.0, 0.5)];
        let runs = Runs::new(&[0; 4], before, after, true);
        assert!(runs.is_learnt());
        let decided = [0, 1, 2, 3].map(|cell| runs.gain(cell, Better::Higher).unwrap().decision);
        assert_eq!(decided, [Decision::Tie, Decision::Tie, Decision::Tie, Decision::Worse]);
        // The same, but runs of one state vary widely.
        let before = vec![near(1.0, 1.0), near(2.0, 1.0), near(0.7, 1.0)];
        let after = vec![near(1.1, 0.5), near(0.6, 0.51), near(1.8, 0.5)];
        let runs = Runs::new(&[0; 4], before, after, true);
        assert_eq!(runs.gain(3, Better::Higher).unwrap().decision, Decision::Tie);
    }

    /// Two runs of one state and one of the other show one difference between runs of a state.
    #[test]
    fn three_runs_are_too_few_to_learn_from() {
        let of = |before: usize, after: usize| {
            Runs::new(&[0; 4], vec![run(&SAME); before], vec![run(&SAME); after], false).is_learnt()
        };
        assert!(!of(1, 1) && !of(2, 1) && of(2, 2) && of(3, 1));
    }

    #[test]
    fn all_cells_share_the_error_and_each_state_has_a_mean() {
        let side = |by: [f64; 2]| vec![run(&[by[0]]), run(&[by[1]])];
        let mut runs = Runs::new(&[0], side([1.0, 1.03]), side([1.01, 0.99]), false);
        // Four runs less two means.
        assert!((runs.noise.of_one(0).unwrap().freedom - 2.0).abs() < 1e-9, "{runs:?}");
        let alone = runs.own(0).unwrap();
        runs.complete = 20;
        assert!(runs.own(0).unwrap() > alone);
    }

    #[test]
    fn few_rounds_and_missing_cells() {
        let one: Vec<Rounds> = vec![vec![(0, 1.0)], Rounds::new()];
        let far: Vec<Rounds> = vec![vec![(0, 100.0)], vec![(0, 1.0)]];
        let runs = Runs::new(&[0, 0], vec![one], vec![far], false);
        assert!(runs.gain(0, Better::Higher).unwrap().is_hint());
        assert_eq!(runs.gain(0, Better::Higher).unwrap().decision, Decision::Tie);
        assert_eq!(runs.gain(1, Better::Higher), None);
    }
}
