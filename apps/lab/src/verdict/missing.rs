//! Finds the parts of the plan that this run did not measure.

use serde::Serialize;

use super::output::names;
use crate::axes::BACKEND;
use crate::fit::{Unfit, fit};
use crate::lists::distinct;
use crate::matrix::{Matrix, Role, seen};
use crate::model::{Axes, Cell, Outcome, Run};
use crate::words::{label, plural};

/// Something that was not measured, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// What the cells have in common: one value (such as `raw`), two values, or all values of a
    /// cell. Empty if nothing at all was measured.
    #[serde(serialize_with = "names")]
    pub what: Axes,
    /// `failed`, `skipped`, or `pending` if the run has not reached it.
    pub state: &'static str,
    /// Number of cells.
    pub cells: usize,
    /// Number of rounds that were measured before the failure.
    #[serde(skip)]
    pub rounds: usize,
    /// The first reason.
    pub reason: String,
    /// Whether the run gives no advice without it: it is a value of a choice, and has no result.
    #[serde(rename = "blocks-advice")]
    pub blocks: bool,
}

impl Missing {
    /// What and why, such as `raw: 4 cells failed (mount … is not ready after 60 s)`.
    pub fn described(&self) -> String {
        let what = match self.what.as_slice() {
            [] => "the whole plan".to_owned(),
            _ => label(&self.what),
        };
        let (cells, reason) = (plural(self.cells, "cell"), &self.reason);
        match self.state {
            _ if self.rounds > 0 => {
                format!("{what}: failed after {} ({reason})", plural(self.rounds, "round"))
            }
            "pending" => format!("{what}: {cells} not reached yet"),
            state => format!("{what}: {cells} {state} ({reason})"),
        }
    }
}

/// The parts without which nothing is advised.
pub(crate) fn blocking(missing: &[Missing]) -> Vec<String> {
    missing.iter().filter(|missing| missing.blocks).map(|missing| label(&missing.what)).collect()
}

/// Why a cell has no result, or lacks some of its rounds.
fn state(cell: &Cell, metric: &str) -> Option<(&'static str, String)> {
    let first = |text: &str| text.lines().next().unwrap_or_default().to_owned();
    match &cell.outcome {
        Outcome::Failed(text) => Some(("failed", first(text))),
        Outcome::Skipped(text) if cell.values(metric).is_empty() => Some(("skipped", first(text))),
        Outcome::Pending | Outcome::Measured if cell.values(metric).is_empty() => {
            Some(("pending", String::new()))
        }
        _ => None,
    }
}

/// Everything that was not measured, summarized: first values without any result, then pairs of
/// values, then single cells.
pub(super) fn missing(run: &Run, matrix: Option<&Matrix<'_>>) -> Vec<Missing> {
    let metric = run.plan.metric.as_str();
    let lacking: Vec<usize> =
        (0..run.cells.len()).filter(|i| state(&run.cells[*i], metric).is_some()).collect();
    if lacking.is_empty() {
        return Vec::new();
    }
    let none = |cells: &[usize]| cells.iter().all(|i| run.cells[*i].values(metric).is_empty());
    if lacking.len() == run.cells.len() && none(&lacking) {
        return vec![entry(run, Axes::new(), &lacking, true)];
    }
    let mut found = Vec::new();
    let mut left = lacking;
    for size in [1, 2] {
        for what in parts(run, &left, size) {
            let fits = |i: &usize| what.iter().all(|entry| run.cells[*i].axes.contains(entry));
            let cells: Vec<usize> = (0..run.cells.len()).filter(fits).collect();
            if !none(&cells) || !left.iter().any(|i| cells.contains(i)) {
                continue;
            }
            let blocks =
                size == 1 && matrix.is_some_and(|matrix| blocks(matrix, &what[0].0, &cells));
            left.retain(|i| !cells.contains(i));
            found.push(entry(run, what, &cells, blocks));
        }
    }
    for i in left {
        let axes = &run.cells[i].axes;
        let what = matrix.map_or_else(|| axes.clone(), |matrix| matrix.short(axes));
        found.push(entry(run, what, &[i], false));
    }
    found
}

/// Every value, or every pair of values, of these cells on axes that vary.
fn parts(run: &Run, cells: &[usize], size: usize) -> Vec<Axes> {
    let varies = |axis: &str| crate::matrix::values(run, axis).len() > 1;
    let mut all: Vec<Axes> = Vec::new();
    for i in cells {
        let own = run.cells[*i].axes.iter().filter(|(axis, _)| varies(axis));
        let own: Axes = own.cloned().collect();
        for (at, first) in own.iter().enumerate() {
            match size {
                1 => all.push(vec![first.clone()]),
                _ => all.extend(own[at + 1..].iter().map(|two| vec![first.clone(), two.clone()])),
            }
        }
    }
    distinct(all)
}

fn entry(run: &Run, what: Axes, cells: &[usize], blocks: bool) -> Missing {
    let states: Vec<(&str, String)> =
        cells.iter().filter_map(|i| state(&run.cells[*i], &run.plan.metric)).collect();
    let worst = ["failed", "skipped", "pending"];
    let state = worst.into_iter().find(|state| states.iter().any(|(own, _)| own == state));
    let state = state.unwrap_or("pending");
    let reason = states.into_iter().find(|(own, _)| *own == state).map(|(_, reason)| reason);
    let rounds = cells.iter().map(|i| run.cells[*i].values(&run.plan.metric).len()).max();
    let (cells, reason) = (cells.len(), reason.unwrap_or_default());
    Missing { what, state, cells, rounds: rounds.unwrap_or(0), reason, blocks }
}

/// Whether the advice could have chosen these cells: they are choices of vdkit's own, measured in
/// the same position (host or guest) as the others, and possible on this place.
fn blocks(matrix: &Matrix<'_>, axis: &str, cells: &[usize]) -> bool {
    let places: Vec<&str> =
        matrix.picks().iter().filter(|_| matrix.apart).map(|pick| seen(&pick.axes)).collect();
    let compared = |cell: &Cell| places.is_empty() || places.contains(&seen(&cell.axes));
    let cells = cells.iter().map(|i| &matrix.run.cells[*i]);
    matrix.role(axis) == Role::Choice
        && cells
            .filter(|cell| !has_no_meaning(matrix.run, cell))
            .any(|cell| matrix.advises(cell) && compared(cell))
}

/// Whether a cell is impossible on its place with any programs installed, such as a preallocated
/// file on a device.
fn has_no_meaning(run: &Run, cell: &Cell) -> bool {
    let place = run.environment.places.iter().find(|place| cell.axis(BACKEND) == Some(&place.name));
    let known = run.plan.effort.as_ref().zip(place);
    known.is_some_and(|(effort, place)| {
        matches!(fit(&cell.axes, effort, place), Err(Unfit::Kind(_)))
    })
}
