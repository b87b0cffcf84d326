//! Weighted scores: rankings by reads, by writes, and by the mean of both.

use super::answers::{Answer, median_of};
use crate::matrix::{Matrix, in_guest, seen};
use crate::model::{Axes, Metric, metric};
use crate::words::{label, plural, value};

/// Ways ranked by one score, best first.
#[derive(Clone, Debug)]
pub struct Ranking {
    /// Name of the score: `weighted read`.
    pub title: &'static str,
    /// Where the loads ran, if guests are compared separately.
    pub seen: Option<&'static str>,
    /// The score.
    pub metric: &'static Metric,
    /// Index of the cell, its varying axes, and its score.
    pub rows: Vec<(usize, Axes, f64)>,
}

/// Titles and metrics of the scores.
const SCORES: [(&str, &str); 3] = [
    ("weighted read", "read_bytes_per_second"),
    ("weighted write", "write_bytes_per_second"),
    ("weighted mean of both", "score"),
];

/// Number of ways of each ranking that a sentence names and that are open on the page.
pub const TOP: usize = 5;

/// The rankings of a run that has scores.
pub fn rankings(matrix: &Matrix<'_>) -> Vec<Ranking> {
    let cells = &matrix.run.cells;
    let scored = |i: &usize| median_of(&cells[*i], "score").is_some();
    let all: Vec<usize> = (0..cells.len()).filter(scored).collect();
    let places: &[Option<bool>] = if matrix.apart { &[Some(false), Some(true)] } else { &[None] };
    let mut found = Vec::new();
    for guest in places {
        for (title, key) in SCORES {
            let Some(metric) = metric(key) else { continue };
            let mut rows: Vec<(usize, Axes, f64)> = all
                .iter()
                .filter(|i| guest.is_none_or(|guest| in_guest(&cells[**i].axes) == guest))
                .filter_map(|i| {
                    let axes = matrix.short(&cells[*i].axes);
                    Some((*i, axes, median_of(&cells[*i], key)?))
                })
                .collect();
            rows.sort_by(|a, b| b.2.total_cmp(&a.2));
            let Some((first, ..)) = rows.first() else { continue };
            let seen = guest.map(|_| seen(&cells[*first].axes));
            found.push(Ranking { title, seen, metric, rows });
        }
    }
    found
}

/// The best five of each ranking.
pub(super) fn of_scores(matrix: &Matrix<'_>) -> Vec<Answer> {
    let of = |ranking: &Ranking| {
        let place = ranking.seen.map_or_else(String::new, |seen| format!(", {seen}"));
        let named: Vec<String> = ranking
            .rows
            .iter()
            .take(TOP)
            .map(|(_, axes, score)| {
                format!("{} with {}", value(ranking.metric, *score), label(axes))
            })
            .collect();
        let (best, rest) = match ranking.rows.len().saturating_sub(TOP) {
            0 => ("best", String::new()),
            rest => ("best five", format!("; {} below", plural(rest, "configuration"))),
        };
        Answer {
            question: format!("Which are the {best} by {}{place}?", ranking.title),
            sentence: format!("{}{rest}.", named.join("; ")),
        }
    };
    rankings(matrix).iter().map(of).collect()
}
