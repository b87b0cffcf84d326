//! The matrix as a map of two axes, and the numbers that let a reader choose which two.

use maud::{Markup, PreEscaped, html};
use serde_json::json;

use crate::matrix::{Matrix, Role};
use crate::model::{Axes, Better};
use crate::stats::geometric_mean;
use crate::words::{percent, title, value};

/// A cell's number as a part of the best one under the same load: 1 is the best.
fn parts(matrix: &Matrix<'_>) -> Vec<(usize, f64, String)> {
    let load = |axes: &Axes| matrix.part(axes, Role::Condition);
    let higher = matrix.metric.better == Better::Higher;
    let medians: Vec<(usize, f64)> = matrix
        .run
        .cells
        .iter()
        .enumerate()
        .filter_map(|(i, cell)| Some((i, matrix.summary(cell)?.median)))
        .filter(|(_, median)| *median > 0.0)
        .collect();
    medians
        .iter()
        .map(|(i, median)| {
            let own = load(&matrix.run.cells[*i].axes);
            let same = medians.iter().filter(|(j, _)| load(&matrix.run.cells[*j].axes) == own);
            let best = same.map(|(_, median)| *median).fold(None, |best: Option<f64>, median| {
                Some(best.map_or(
                    median,
                    |best| if higher { best.max(median) } else { best.min(median) },
                ))
            });
            let best = best.unwrap_or(*median);
            let part = if higher { median / best } else { best / median };
            (*i, part, value(matrix.metric, *median))
        })
        .collect()
}

/// The two axes that are shown first: the choice with the most values, and the load, or another choice.
fn first_axes<'a>(matrix: &Matrix<'a>) -> Option<(&'a str, &'a str)> {
    let count = |axis: &&str| matrix.values(axis).len();
    let choices =
        || matrix.varying.iter().copied().filter(|axis| matrix.role(axis) == Role::Choice);
    let rows = choices().max_by_key(count)?;
    let loads = matrix.varying.iter().copied().filter(|axis| matrix.role(axis) == Role::Condition);
    let columns = loads.max_by_key(count);
    let columns = columns.or_else(|| choices().filter(|axis| *axis != rows).max_by_key(count));
    let columns = columns.or_else(|| matrix.varying.iter().copied().find(|axis| *axis != rows))?;
    Some((rows, columns))
}

/// The map, with what a script needs to make it anew for other axes.
pub(super) fn map(matrix: &Matrix<'_>) -> Option<Markup> {
    let (rows, columns) = first_axes(matrix)?;
    let parts = parts(matrix);
    if parts.is_empty() {
        return None;
    }
    Some(html! {
        p class="note" {
            "Each field is a part of the best value under the same load: 100 % is the best. "
            "Where several cells fall into one field it is their geometric mean."
        }
        form class="axes js" {
            @for (id, name, chosen) in [("rows", "Rows", rows), ("columns", "Columns", columns)] {
                label { (name) " "
                    select data-map=(id) {
                        @for axis in &matrix.varying {
                            option value=(axis) selected[*axis == chosen] { (title(axis)) }
                        }
                    }
                }
            }
        }
        div class="scroll" tabindex="0" role="region" aria-label="Map of the matrix" {
            (table(matrix, &parts, rows, columns))
        }
        script type="application/json" id="cells" { (PreEscaped(embedded(matrix, &parts))) }
    })
}

fn table(matrix: &Matrix<'_>, parts: &[(usize, f64, String)], rows: &str, columns: &str) -> Markup {
    let (down, across) = (matrix.values(rows), matrix.values(columns));
    let field = |row: &str, column: &str| {
        let fits = |i: usize| {
            let cell = &matrix.run.cells[i];
            cell.axis(rows) == Some(row) && cell.axis(columns) == Some(column)
        };
        let found: Vec<&(usize, f64, String)> = parts.iter().filter(|(i, ..)| fits(*i)).collect();
        let part = geometric_mean(&found.iter().map(|(_, part, _)| *part).collect::<Vec<_>>())?;
        let text = match found.as_slice() {
            [(_, _, text)] => Some(text.clone()),
            _ => None,
        };
        Some((part, text))
    };
    html! {
        table class="heat" id="heat" {
            caption class="sr" { (title(rows)) " against " (title(columns)) }
            thead { tr {
                td {}
                @for column in &across { th scope="col" { (column) } }
            } }
            tbody { @for row in &down { tr {
                th scope="row" { (row) }
                @for column in &across {
                    @match field(row, column) {
                        Some((part, text)) => td style=(format!("--v:{:.3}", part.clamp(0.0, 1.0))) {
                            b { (percent(part)) }
                            @if let Some(text) = text { small { (text) } }
                        },
                        None => td class="empty" { span aria-label="not measured" { "–" } },
                    }
                }
            } } }
        }
    }
}

/// As JSON within a script element, in which no text may end it. Source: HTML, "Restrictions for
/// contents of script elements".
fn embedded(matrix: &Matrix<'_>, parts: &[(usize, f64, String)]) -> String {
    let axes: Vec<_> = matrix
        .varying
        .iter()
        .map(|axis| json!({"name": axis, "title": title(axis), "values": matrix.values(axis)}))
        .collect();
    let cells: Vec<_> = parts
        .iter()
        .map(|(i, part, text)| {
            let cell = &matrix.run.cells[*i];
            let values: Vec<_> = matrix.varying.iter().map(|axis| cell.axis(axis)).collect();
            json!({"v": values, "p": (part * 1e4).round() / 1e4, "t": text})
        })
        .collect();
    let text = json!({"axes": axes, "cells": cells}).to_string();
    text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::fixture;

    #[test]
    fn embedded_data_cannot_end_its_element() {
        let mut run = fixture::run();
        for cell in &mut run.cells {
            cell.axes[0].1 = "</script><b>&".to_owned();
        }
        let matrix = Matrix::new(&run).unwrap();
        let text = embedded(&matrix, &parts(&matrix));
        assert!(!text.contains(['<', '>', '&']), "{text}");
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["cells"].as_array().unwrap().len(), parts(&matrix).len());
    }

    #[test]
    fn the_best_of_each_load_is_all() {
        let run = fixture::run();
        let matrix = Matrix::new(&run).unwrap();
        let parts = parts(&matrix);
        assert!(parts.iter().all(|(_, part, _)| *part > 0.0 && *part <= 1.0));
        let loads = matrix.values("profile").len();
        assert!(parts.iter().filter(|(_, part, _)| *part == 1.0).count() >= loads);
    }
}
