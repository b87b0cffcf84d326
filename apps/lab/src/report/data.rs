//! The map of two axes, and the data that lets a reader choose the axes.

use maud::{Markup, PreEscaped, html};
use serde_json::json;

use crate::matrix::{Matrix, Role, role};
use crate::model::{Axes, Better};
use crate::stats::geometric_mean;
use crate::words::{alone, percent, title, value};

/// A cell's value as a fraction of the best one under the same load: 1 is the best.
#[derive(Clone, Debug)]
struct Part {
    cell: usize,
    /// Compared with the cells of all programs.
    of_all: f64,
    /// Compared with vdkit's cells; none for cells of other programs.
    of_own: Option<f64>,
    /// The value itself.
    text: String,
}

impl Part {
    /// The value that a map shows. `programs` says whether the map's axes distinguish programs.
    fn shown(&self, programs: bool) -> Option<f64> {
        if programs { Some(self.of_all) } else { self.of_own }
    }
}

/// Whether the values of an axis are programs or contain program names.
fn tells_programs(axis: &str) -> bool {
    axis == "front" || role(axis) == Role::Tool
}

fn parts(matrix: &Matrix<'_>) -> Vec<Part> {
    let loads: Vec<Axes> = matrix.run.cells.iter().map(|cell| matrix.condition(cell)).collect();
    let ours: Vec<bool> = matrix.run.cells.iter().map(|cell| matrix.counts(cell)).collect();
    let higher = matrix.metric.better == Better::Higher;
    let medians: Vec<(usize, f64)> = matrix
        .run
        .cells
        .iter()
        .enumerate()
        .filter_map(|(i, cell)| Some((i, matrix.summary(cell)?.median)))
        .filter(|(_, median)| *median > 0.0)
        .collect();
    let better = |a: f64, b: f64| if higher { a.max(b) } else { a.min(b) };
    medians
        .iter()
        .map(|(i, median)| {
            let like = |j: &usize| loads[*j] == loads[*i];
            let part = |best: Option<f64>| {
                let best = best.unwrap_or(*median);
                if higher { median / best } else { best / median }
            };
            let all = medians.iter().filter(|(j, _)| like(j));
            let own = medians.iter().filter(|(j, _)| ours[*j] && like(j));
            let of_own = part(own.map(|(_, median)| *median).reduce(better));
            Part {
                cell: *i,
                of_all: part(all.map(|(_, median)| *median).reduce(better)),
                of_own: ours[*i].then_some(of_own),
                text: value(matrix.metric, *median),
            }
        })
        .collect()
}

/// The two axes that are shown first: the choice with the most values, and the load or another
/// choice.
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

/// The map, with the data that a script needs to redraw it for other axes.
pub(super) fn map(matrix: &Matrix<'_>) -> Option<Markup> {
    let (rows, columns) = first_axes(matrix)?;
    let parts = parts(matrix);
    if parts.is_empty() {
        return None;
    }
    Some(html! {
        p class="note" {
            "Each field is a fraction of the best value under the same load: 100 % is the best. "
            "A field with several cells is their geometric mean. "
            "Other programs are included if one of the two axes distinguishes them. The fields compare medians; the tables of All results show which differences are significant."
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

fn table(matrix: &Matrix<'_>, parts: &[Part], rows: &str, columns: &str) -> Markup {
    let (down, across) = (matrix.values(rows), matrix.values(columns));
    let programs = tells_programs(rows) || tells_programs(columns);
    let field = |row: &str, column: &str| {
        let fits = |i: usize| {
            let cell = &matrix.run.cells[i];
            cell.axis(rows) == Some(row) && cell.axis(columns) == Some(column)
        };
        let found = parts.iter().filter(|part| fits(part.cell));
        let found: Vec<(f64, &Part)> =
            found.filter_map(|part| Some((part.shown(programs)?, part))).collect();
        let part = geometric_mean(&found.iter().map(|(part, _)| *part).collect::<Vec<_>>())?;
        let text = match found.as_slice() {
            [(_, only)] => Some(only.text.clone()),
            _ => None,
        };
        Some((part, text))
    };
    html! {
        table class="heat" id="heat" {
            caption class="sr" { (title(rows)) " against " (title(columns)) }
            thead { tr {
                td {}
                @for column in &across { th scope="col" { (alone(columns, column)) } }
            } }
            tbody { @for row in &down { tr {
                th scope="row" { (alone(rows, row)) }
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

/// The data as JSON within a script element. The text must not end the element. Source: HTML,
/// "Restrictions for contents of script elements".
fn embedded(matrix: &Matrix<'_>, parts: &[Part]) -> String {
    let axes: Vec<_> = matrix
        .varying
        .iter()
        .map(|axis| {
            let values = matrix.values(axis).into_iter().map(|value| alone(axis, value));
            let values: Vec<String> = values.collect();
            json!({"name": axis, "title": title(axis), "values": values, "p": tells_programs(axis)})
        })
        .collect();
    let cells: Vec<_> = parts
        .iter()
        .map(|part| {
            let cell = &matrix.run.cells[part.cell];
            let named = |axis: &&str| cell.axis(axis).map(|value| alone(axis, value));
            let values: Vec<_> = matrix.varying.iter().map(named).collect();
            let short = |part: f64| (part * 1e4).round() / 1e4;
            let own = part.of_own.map(short);
            json!({"v": values, "p": short(part.of_all), "o": own, "t": part.text})
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
        assert!(parts.iter().all(|part| part.of_all > 0.0 && part.of_all <= 1.0));
        let loads = matrix.values("profile").len();
        assert!(parts.iter().filter(|part| part.of_all == 1.0).count() >= loads);
        assert!(parts.iter().filter(|part| part.of_own == Some(1.0)).count() >= loads);
        // Other programs are next to vdkit and never in the same field.
        let others = parts.iter().filter(|part| part.of_own.is_none()).count();
        assert_eq!(others, 9);
        assert!(parts.iter().all(|part| part.of_own.is_none_or(|own| own <= 1.0)));
    }
}
