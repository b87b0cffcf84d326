//! Measures how often the method reports a difference between equal things. The input is runs of
//! one plan on one host with nothing changed between them. It compares them in every way in
//! which the lab compares runs, and counts each "better" or "worse" as an error.
//!
//! - **Verdicts.** The rounds of each way are distributed over two or three copies of it, as a run
//!   distributes rounds over ways. The copies get a verdict.
//! - **Comparisons.** Each run is compared with each other run, and two and three runs with the
//!   same number of runs interleaved with them.

use serde::Serialize;

use crate::cells::{Rng, shuffled};
use crate::compare::compare;
use crate::lists::grouped;
use crate::matrix::{Matrix, Role};
use crate::model::{Axes, Cell, Outcome, PlanSummary, Run, Sample};
use crate::stats::{Decision, Gain, Interval, ROUNDS_MIN};
use crate::verdict::{Advice, verdict};

/// The axis that distinguishes the copies of a way.
const COPY: &str = "copy";
/// Largest number of copies of one way.
const COPIES_MAX: usize = 3;

/// Number of tests of the method, and number of wrong results.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Tally {
    /// Number of verdicts, or of comparisons of runs.
    pub judged: usize,
    /// Number of them that reported a difference.
    pub wrong: usize,
    /// The first wrong results.
    pub examples: Vec<String>,
}

/// Largest number of examples kept.
const EXAMPLES_MAX: usize = 5;

impl Tally {
    fn add(&mut self, wrong: Option<String>) {
        self.judged += 1;
        self.wrong += usize::from(wrong.is_some());
        self.examples.extend(wrong.filter(|_| self.examples.len() < EXAMPLES_MAX));
    }

    /// Share of the tests with a wrong result.
    pub fn part(&self) -> f64 {
        self.wrong as f64 / self.judged.max(1) as f64
    }
}

/// The result of a calibration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Calibration {
    /// Number of runs.
    pub runs: usize,
    /// Verdicts on copies of the same way.
    pub verdicts: Tally,
    /// Comparisons of one run with another.
    pub pairs: Tally,
    /// Comparisons of two or three runs with as many interleaved runs.
    pub turns: Tally,
}

/// Tests the method on runs of one plan with nothing changed between them. The runs must be in the
/// order of time.
pub fn calibrate(runs: &[Run]) -> Calibration {
    let mut found = Calibration { runs: runs.len(), ..Calibration::default() };
    for run in runs {
        for copied in copies(run) {
            found.verdicts.add(wrong_verdict(&copied));
        }
    }
    for (i, before) in runs.iter().enumerate() {
        for after in &runs[i + 1..] {
            found
                .pairs
                .add(wrong_comparison(std::slice::from_ref(before), std::slice::from_ref(after)));
        }
    }
    for each in [2, 3] {
        for some in runs.chunks_exact(2 * each) {
            let every_other =
                |from: usize| -> Vec<Run> { some.iter().skip(from).step_by(2).cloned().collect() };
            found.turns.add(wrong_comparison(&every_other(0), &every_other(1)));
        }
    }
    found
}

/// The first difference that a comparison reports, if any.
fn wrong_comparison(before: &[Run], after: &[Run]) -> Option<String> {
    let found = compare(before, after)?;
    let wrong = found.cells.iter().find(|cell| cell.verdict != Decision::Tie.word())?;
    Some(format!(
        "{} {:.2}x ({:.2} to {:.2})  {}",
        wrong.verdict, wrong.ratio, wrong.low, wrong.high, wrong.key
    ))
}

/// The first difference that a verdict on equal ways reports, if any.
pub fn wrong_verdict(run: &Run) -> Option<String> {
    let matrix = Matrix::new(run)?;
    let found = verdict(run);
    let way = run.cells.first().map_or("", |cell| cell.key.as_str());
    let shown = |gain: &Gain| {
        let Interval { low, high, .. } = gain.interval;
        format!("{:.2}x ({low:.2} to {high:.2})  {way}", gain.ratio)
    };
    if let Some(exception) = found.exceptions.first() {
        return Some(shown(&exception.gain));
    }
    if found.advice == Advice::Use || !found.set_aside.is_empty() {
        return Some(found.sentence);
    }
    let picks = matrix.picks();
    let ways = picks.iter().flat_map(|one| picks.iter().map(move |two| (one, two)));
    let ways = ways.filter_map(|(one, two)| matrix.against(one, two));
    let cells = run.cells.iter().filter_map(|cell| matrix.gain(cell));
    let wrong = ways.chain(cells).find(|gain| gain.decision != Decision::Tie)?;
    Some(shown(&wrong))
}

/// Makes one run for each way. It holds copies of that way only, over which the rounds are
/// distributed.
fn copies(run: &Run) -> Vec<Run> {
    let Some(matrix) = Matrix::new(run) else { return Vec::new() };
    let way = |cell: &Cell| -> Axes {
        let conditions = matrix.part(&cell.axes, Role::Condition);
        cell.axes.iter().filter(|entry| !conditions.contains(entry)).cloned().collect()
    };
    let cells = run.cells.iter().filter(|cell| matrix.summary(cell).is_some());
    let ways = grouped(cells.map(|cell| (way(cell), cell)));
    ways.iter().filter_map(|(_, cells)| dealt(run, cells)).collect()
}

/// Distributes the rounds of some cells over copies of each cell. Returns nothing if there are too
/// few rounds.
fn dealt(run: &Run, cells: &[&Cell]) -> Option<Run> {
    let rounds = cells.iter().map(|cell| cell.samples.len()).min()?;
    let count = (rounds / ROUNDS_MIN).min(COPIES_MAX);
    if count < 2 {
        return None;
    }
    let mut rng = Rng::new(run.seed);
    let mut copied = Vec::new();
    for cell in cells {
        let mut hands: Vec<Vec<Sample>> = vec![Vec::new(); count];
        // In the order of a real run: each copy gets a round before any gets the next.
        for block in cell.samples.chunks_exact(count) {
            for (sample, hand) in block.iter().zip(shuffled(count, &mut rng)) {
                let round = hands[hand].len() as u32;
                hands[hand].push(Sample { round, raw: None, ..sample.clone() });
            }
        }
        for (number, samples) in hands.into_iter().enumerate() {
            let name = format!("{}", number + 1);
            let mut axes = cell.axes.clone();
            axes.push((COPY.to_owned(), name.clone()));
            copied.push(Cell {
                key: format!("{}/{COPY}={name}", cell.key),
                axes,
                samples,
                outcome: Outcome::Measured,
                ..Cell::default()
            });
        }
    }
    let plan = PlanSummary {
        axes: run.plan.axes.iter().cloned().chain([COPY.to_owned()]).collect(),
        baseline: Some(vec![(COPY.to_owned(), "1".to_owned())]),
        effort: None,
        ..run.plan.clone()
    };
    Some(Run {
        plan,
        cells: copied,
        ended: run.ended,
        environment: run.environment.clone(),
        seed: run.seed,
        ..Run::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{measured, run_of};

    /// Nine rounds of two layouts that differ widely; each layout varies within 10 %.
    fn run(seed: u64) -> Run {
        let mut rng = Rng::new(seed);
        let mut value = |level: f64| level * (0.95 + 0.1 * rng.below(1000) as f64 / 1000.0);
        let mut cell = |layout: &str, level: f64| {
            let values: Vec<f64> = (0..9).map(|_| value(level)).collect();
            measured(&[("layout", layout)], "iops", &values)
        };
        let cells = vec![cell("raw", 100.0), cell("qcow2", 300.0)];
        let run = run_of("iops", &["layout"], None, cells);
        Run { id: format!("{seed}"), seed, ..run }
    }

    #[test]
    fn equals_are_distributed_and_compared() {
        let runs: Vec<Run> = (0..6).map(run).collect();
        let found = calibrate(&runs);
        assert_eq!((found.runs, found.verdicts.judged, found.pairs.judged), (6, 12, 15));
        assert_eq!(found.turns.judged, 2);
        // Of so few tests, one may be wrong.
        assert!(found.verdicts.wrong <= 1, "{found:?}");
        assert_eq!((found.pairs.wrong, found.turns.wrong), (0, 0), "{found:?}");
        let copied = copies(&runs[0]);
        assert_eq!((copied.len(), copied[0].cells.len()), (2, 3));
        assert!(copied[0].cells.iter().all(|cell| cell.samples.len() == 3));
    }

    #[test]
    fn what_is_called_different_is_counted() {
        let mut changed = run(1);
        for sample in changed.cells.iter_mut().flat_map(|cell| &mut cell.samples) {
            sample.values.values_mut().for_each(|value| *value *= 10.0);
        }
        let found = calibrate(&[run(0), changed]);
        assert_eq!((found.pairs.judged, found.pairs.wrong), (1, 1));
        assert!(found.pairs.examples[0].starts_with("better 1"), "{found:?}");
        assert!(found.pairs.part() == 1.0 && Tally::default().part() == 0.0);
    }

    #[test]
    fn few_rounds_give_no_copies() {
        let mut few = run(0);
        few.cells.iter_mut().for_each(|cell| cell.samples.truncate(5));
        assert_eq!(copies(&few), []);
    }
}
