//! Compares published numbers with those of this host.

use super::answers::{Answer, median_of};
use crate::lists::grouped;
use crate::matrix::{Matrix, Role, program};
use crate::model::{Cell, Published, Run, metric};
use crate::stats::{Decision, MATTERS, ROUNDS_MIN, median};
use crate::words::sentence;

/// The cells that a published number covers, with their indices: vdkit's, or those of others.
fn spoken_of<'a>(matrix: &Matrix<'a>, number: &Published, own: bool) -> Vec<(usize, &'a Cell)> {
    let fits = |cell: &Cell| {
        let named = number.axes.iter().all(|(axis, value)| cell.axis(axis) == Some(value));
        named && matrix.counts(cell) == own
    };
    matrix.run.cells.iter().enumerate().filter(|(_, cell)| fits(cell)).collect()
}

/// This run's counterpart of a published number: the median of the cells that the number covers.
/// With several programs, only vdkit's cells count.
pub(crate) fn measured_for(matrix: &Matrix<'_>, number: &Published) -> Option<f64> {
    median(&all_measured_for(matrix, number))
}

/// The median of each of those cells, in rising order.
pub(crate) fn all_measured_for(matrix: &Matrix<'_>, number: &Published) -> Vec<f64> {
    let own = spoken_of(matrix, number, true).into_iter();
    let mut all: Vec<f64> = own.filter_map(|(_, cell)| median_of(cell, &number.metric)).collect();
    all.sort_by(f64::total_cmp);
    all
}

/// The counterparts from other programs, by name.
pub(crate) fn others_for(matrix: &Matrix<'_>, number: &Published) -> Vec<(String, f64)> {
    let others = spoken_of(matrix, number, false).into_iter();
    let found =
        grouped(others.filter_map(|(_, cell)| {
            Some((program(&cell.axes).1?, median_of(cell, &number.metric)?))
        }));
    found.into_iter().filter_map(|(name, values)| Some((name, median(&values)?))).collect()
}

/// Whether two numbers differ by at most this part of the larger one.
fn near(one: f64, two: f64, part: f64) -> bool {
    (one - two).abs() <= part * one.abs().max(two.abs())
}

/// Whether published numbers have the same order on this host.
pub(super) fn of_published(matrix: &Matrix<'_>) -> Option<Answer> {
    let both: Vec<(&Published, f64)> = matrix
        .run
        .published
        .iter()
        .filter_map(|number| Some((number, measured_for(matrix, number)?)))
        .collect();
    let rounds = matrix.run.cells.iter().map(|cell| cell.samples.len()).max().unwrap_or(0);
    let mut found = Pairs::default();
    let mut apart = Apart { run: matrix.run, known: Vec::new() };
    for (i, (one, own)) in both.iter().enumerate() {
        for (two, other) in &both[i + 1..] {
            // Numbers under different loads have no order.
            let loads = [one, two].map(|number| matrix.part(&number.axes, Role::Condition));
            if one.metric != two.metric || loads[0] != loads[1] {
                continue;
            }
            match (near(one.value, two.value, MATTERS), !apart.tells(one, two)) {
                (true, tie) => {
                    found.equal += 1;
                    found.equal_here += u32::from(tie);
                }
                (false, true) => found.ties += 1,
                (false, false) => {
                    found.ordered += 1;
                    found.agree += u32::from((one.value > two.value) == (own > other));
                }
            }
        }
    }
    let mut text = found.said()?;
    if rounds < ROUNDS_MIN {
        text.push_str(" Fewer than three rounds decide nothing.");
    }
    let question = "Does the published order hold here?".to_owned();
    Some(Answer { question, sentence: text })
}

/// Decides which cells of published numbers this run can tell apart.
struct Apart<'a> {
    run: &'a Run,
    known: Vec<Matrix<'a>>,
}

impl Apart<'_> {
    fn tells(&mut self, one: &Published, two: &Published) -> bool {
        let at = self.known.iter().position(|matrix| matrix.metric.key == one.metric);
        let at = at.or_else(|| {
            self.known.push(Matrix::of(self.run, metric(&one.metric)?)?);
            Some(self.known.len() - 1)
        });
        let Some(matrix) = at.map(|at| &self.known[at]) else { return false };
        let pick = |number: &Published| {
            let cells = spoken_of(matrix, number, true).into_iter().map(|(i, _)| i);
            matrix.pick(Vec::new(), cells.collect())
        };
        let (Some(one), Some(two)) = (pick(one), pick(two)) else { return false };
        matrix.against(&one, &two).is_some_and(|gain| gain.decision != Decision::Tie)
    }
}

/// Counts of pairs of published numbers, by the result on this host.
#[derive(Clone, Copy, Debug, Default)]
struct Pairs {
    /// Different when published and different here.
    ordered: u32,
    /// The pairs among them with the same order.
    agree: u32,
    /// Different when published, and indistinguishable here.
    ties: u32,
    /// Equal when published.
    equal: u32,
    /// The pairs among them that are indistinguishable here too.
    equal_here: u32,
}

impl Pairs {
    fn said(&self) -> Option<String> {
        let Self { ordered, agree, ties, equal, equal_here } = *self;
        let alike = "do not differ significantly here";
        let parts = [
            (agree, ordered, "that differ in both have the published order".to_owned()),
            (
                ties,
                if ties > 0 { ordered + ties } else { 0 },
                format!("that differed there {alike}"),
            ),
            (equal_here, equal, format!("that were equal there {alike}")),
        ];
        let parts = parts.into_iter().filter(|(_, all, _)| *all > 0);
        let parts = parts.map(|(part, all, what)| format!("{part} of {all} pairs {what}"));
        let parts: Vec<String> = parts.collect();
        (!parts.is_empty()).then(|| sentence(&parts.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_told_in_sentences() {
        let words = |agree, ordered, ties, equal_here, equal| {
            Pairs { ordered, agree, ties, equal, equal_here }.said().unwrap_or_default()
        };
        assert_eq!(words(0, 0, 0, 0, 0), "");
        assert_eq!(
            words(0, 0, 2, 0, 0),
            "2 of 2 pairs that differed there do not differ significantly here."
        );
        assert_eq!(
            words(2, 3, 1, 0, 2),
            "2 of 3 pairs that differ in both have the published order; 1 of 4 pairs that differed \
             there do not differ significantly here; 0 of 2 pairs that were equal there do not differ \
             significantly here."
        );
    }

    #[test]
    fn nearness_is_a_part_of_the_larger() {
        assert!(near(100.0, 98.0, 0.02) && !near(100.0, 97.0, 0.02) && near(0.0, 0.0, 0.02));
    }
}
