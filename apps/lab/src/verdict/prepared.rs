//! Compares sparse with preallocated images: does preallocated space make first writes faster, and
//! later writes?

use super::answers::Answer;
use super::sentence::figure;
use crate::axes::ALLOCATED;
use crate::lists::{distinct, grouped};
use crate::matrix::{Matrix, Role};
use crate::model::{Axes, Cell, with_value};
use crate::words::{label, listed};

/// One answer for disks that were empty and one for disks that were full.
pub(super) fn of_allocation(matrix: &Matrix<'_>) -> Vec<Answer> {
    let mut all = Vec::new();
    for (axis, prepared, sparse) in ALLOCATED {
        for ((when, own), pairs) in by_state(matrix, axis, prepared, sparse) {
            all.extend(said(matrix, &own, sparse, &pairs).map(|said| (when, said)));
        }
    }
    grouped(all)
        .into_iter()
        .map(|(when, said)| Answer {
            question: format!("Does preallocation pay{when}?"),
            sentence: format!("{}.", said.join("; ")),
        })
        .collect()
}

/// Pairs of a cell of a preallocated layout and the otherwise equal cell of the sparse one.
type Pairs<'a> = Vec<(usize, usize, &'a Cell)>;

/// A state of the disk and the preallocated value, and the pairs of cells.
type Group<'a> = ((&'static str, Axes), Pairs<'a>);

/// Groups the pairs by whether the load writes the disk for the first time, and by format.
fn by_state<'a>(matrix: &Matrix<'a>, axis: &str, prepared: &str, sparse: &str) -> Vec<Group<'a>> {
    let cells = &matrix.run.cells;
    let fits = |cell: &Cell| {
        let preallocated = cell.axis(axis) == Some(prepared) && matrix.counts(cell);
        preallocated && matrix.summary(cell).is_some()
    };
    let pair = |(i, cell): (usize, &'a Cell)| {
        let wanted = with_value(&cell.axes, axis, sparse);
        let base = cells.iter().position(|other| other.axes == wanted)?;
        matrix.summary(&cells[base])?;
        let named = |(name, _): &&(String, String)| name == "layout" || name == axis;
        let own: Axes = cell.axes.iter().filter(named).cloned().collect();
        Some(((state(cell), own), (i, base, cell)))
    };
    grouped(cells.iter().enumerate().filter(|(_, cell)| fits(cell)).filter_map(pair))
}

/// Whether a load writes for the first time or again.
fn state(cell: &Cell) -> &'static str {
    let profile = cell.axis("profile").unwrap_or_default();
    let first = profile.contains("first");
    let again = profile.contains("again") || profile.contains("rewrite");
    match cell.axis("content") {
        // Scores are measured on disks that were filled before.
        _ if again || profile == "scores" => " for later writes",
        _ if first => " for the first write",
        Some("full") => " for later writes",
        Some("none") => " for the first write",
        _ => "",
    }
}

fn said(matrix: &Matrix<'_>, own: &Axes, sparse: &str, pairs: &Pairs<'_>) -> Option<String> {
    let name = label(own);
    let cells = |of: fn(&(usize, usize, &Cell)) -> usize| pairs.iter().map(of).collect();
    let prepared = matrix.pick(Vec::new(), cells(|pair| pair.0))?;
    let base = matrix.pick(Vec::new(), cells(|pair| pair.1))?;
    let gain = matrix.against(&prepared, &base)?;
    let load = |cell: &Cell| label(&matrix.part(&matrix.load(cell), Role::Condition));
    let loads = pairs.iter().map(|(.., cell)| load(cell));
    let loads = distinct(loads.filter(|load| !load.is_empty()));
    let under = match loads.len() {
        1..=3 => format!(" ({})", listed(&loads)),
        _ => String::new(),
    };
    Some(format!("{}: {name} against {sparse}{under}", figure(&gain)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::axes_of;

    #[test]
    fn disks_that_were_filled_are_written_again() {
        let of = |axes: &[(&str, &str)]| state(&Cell { axes: axes_of(axes), ..Cell::default() });
        assert_eq!(of(&[("profile", "scores")]), " for later writes");
        assert_eq!(of(&[("profile", "first-write")]), " for the first write");
        assert_eq!(of(&[("profile", "randwrite"), ("content", "full")]), " for later writes");
        assert_eq!(of(&[("profile", "randwrite")]), "");
    }
}
