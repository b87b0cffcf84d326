//! Every measured cell: one table per load, with bars.

use maud::{Markup, html};

use super::charts::{Bar, bar};
use crate::axes::about_value;
use crate::lists::grouped;
use crate::matrix::{Matrix, Role, is_own_tool, role};
use crate::model::{Axes, Better, Cell, SURVIVED};
use crate::stats::{Decision, Gain, Summary};
use crate::verdict::{Ranking, TOP, UNSAFE, Verdict, rankings};
use crate::words::{alone, label, percent, plural, sentence, span, times, title, value};

struct Row<'a> {
    cell: &'a Cell,
    /// The axes that distinguish the row from others of the same load.
    name: Axes,
    summary: Summary,
    gain: Option<Gain>,
    advised: bool,
    default: bool,
}

/// Cells grouped by load, best first.
fn groups<'a>(matrix: &Matrix<'a>, verdict: &Verdict) -> Vec<(Axes, Vec<Row<'a>>)> {
    let row = |(i, cell): (usize, &'a Cell)| {
        let summary = matrix.summary(cell)?;
        // The tool is left out if it is vdkit; rows of other tools name theirs.
        let name = matrix.way(cell).into_iter().filter(|entry| !is_own_tool(entry));
        let name: Axes = name.collect();
        let row = Row {
            cell,
            name: if name.is_empty() { cell.axes.clone() } else { name },
            summary,
            gain: matrix.gain(cell),
            advised: verdict.cells.contains(&i),
            default: matrix.is_default(cell),
        };
        Some((matrix.load(cell), row))
    };
    let mut groups = grouped(matrix.run.cells.iter().enumerate().filter_map(row));
    for (_, rows) in &mut groups {
        let median = |row: &Row<'_>| row.summary.median;
        rows.sort_by(|a, b| matrix.metric.best_first(median(a), median(b)));
    }
    groups
}

/// All tables, with filters above.
pub(super) fn results(matrix: &Matrix<'_>, verdict: &Verdict) -> Option<Markup> {
    let groups = groups(matrix, verdict);
    if groups.is_empty() {
        return None;
    }
    let metric = matrix.metric;
    let note = match metric.better {
        _ if metric.key == SURVIVED => NOTE_SURVIVED,
        Better::Higher => "longer bars are better. ",
        Better::Lower => "shorter bars are better. ",
    };
    Some(html! {
        p class="note" {
            (title(metric.title)) ": " (note)
            @if metric.key != SURVIVED { (NOTE_BARS) }
            @if matrix.varying.iter().any(|axis| role(axis) == Role::Tool) {
                " A row without a program is vdkit's."
            }
            @if hints(&groups) { " " (HINT) }
            (what_unsafe_loses(matrix))
        }
        (filters(matrix))
        @for (load, rows) in &groups { (table(matrix, load, rows)) }
        p class="js none" hidden role="status" { "No cell matches the filters." }
    })
}

const NOTE_BARS: &str = "A bar is the median of the rounds; the line on it is the interval of the \
    median, or the whole range with fewer than six rounds. The advised configuration is blue.";
const NOTE_SURVIVED: &str = "the client saw no error while there was no space, and continued when \
    there was space again.";

/// What rows that are marked as unsafe lose, if there are any.
fn what_unsafe_loses(matrix: &Matrix<'_>) -> Markup {
    html! { @if matrix.values("cache").contains(&"unsafe") { " " (sentence(UNSAFE)) } }
}

pub(super) const HINT: &str =
    "≈: one or two rounds, which do not show how much of the difference is noise.";

fn hints(groups: &[(Axes, Vec<Row<'_>>)]) -> bool {
    let gains = groups.iter().flat_map(|(_, rows)| rows).filter_map(|row| row.gain.as_ref());
    gains.into_iter().any(Gain::is_hint)
}

/// The default's name in a column header: its values.
fn default_name(matrix: &Matrix<'_>) -> String {
    // As in the names of the rows, without axes that have one value in this run.
    let varies = |axis: &str| role(axis) != Role::Tool && matrix.varying.contains(&axis);
    let named = matrix.run.plan.baseline.iter().flatten();
    let mut named: Axes = named.filter(|(axis, _)| varies(axis)).cloned().collect();
    // In the order of the names of the rows.
    named.sort_by_key(|(axis, _)| matrix.run.plan.axes.iter().position(|known| known == axis));
    if named.is_empty() { "the default".to_owned() } else { label(&named) }
}

fn filters(matrix: &Matrix<'_>) -> Markup {
    html! {
        form class="filters js" aria-label="Filters of the results" {
            @for axis in &matrix.varying {
                @let values = matrix.values(axis);
                fieldset {
                    legend { (title(axis)) }
                    @for value in values {
                        label class="chip" {
                            input type="checkbox" checked data-axis=(axis) value=(value);
                            span { (alone(axis, value)) }
                        }
                    }
                }
            }
            button type="reset" class="plain" { "Show all" }
        }
    }
}

/// Number of rows that are open. Others are collapsed, except for the advised way and the default.
const ROWS_OPEN: usize = 10;

fn table(matrix: &Matrix<'_>, load: &Axes, rows: &[Row<'_>]) -> Markup {
    let most = |row: &Row<'_>| row.summary.median.max(row.summary.interval.high);
    let most = rows.iter().map(most).fold(0.0, f64::max);
    let bases = rows.iter().any(|row| row.gain.is_some());
    let name = if load.is_empty() { title(matrix.metric.title) } else { label(load) };
    let survival = matrix.metric.key == SURVIVED;
    let matters = |row: &Row<'_>| row.advised || row.default;
    let (mut open, mut folded) = (Vec::new(), Vec::new());
    for (i, row) in rows.iter().enumerate() {
        let first = i < ROWS_OPEN || rows.len() <= ROWS_OPEN + 2;
        if first || matters(row) { open.push(row) } else { folded.push(row) }
    }
    let against_what = format!("Against {}", default_name(matrix));
    let part = |rows: &[&Row<'_>], caption: Markup| {
        html! {
            table class="bars" {
                (caption)
                thead { tr {
                    th scope="col" { "Configuration" }
                    @if survival {
                        th scope="col" class="num" { "Rounds" }
                        th scope="col" class="num" { "Survived" }
                        th scope="col" { "What happened" }
                    } @else {
                        th scope="col" class="wide-bar" { span class="sr" { "Bar" } }
                        th scope="col" class="num" { "Median" }
                        th scope="col" class="num" { "Interval" }
                        @if bases { th scope="col" class="num" { (against_what) } }
                        th scope="col" class="num" { "Varies by" }
                    }
                } }
                tbody { @for row in rows {
                    @if survival { (survivor(matrix, row)) } @else { (line(matrix, row, most, bases.then_some(&against_what))) }
                } }
            }
        }
    };
    html! {
        div class="results" data-filtered="table" {
            (part(&open, html! { caption { (name) (meaning(load)) } }))
            @if !folded.is_empty() {
                details class="rest" data-filtered="rest" {
                    summary { (folded.len()) " more" }
                    (part(&folded, html! { caption class="sr" { (name) ", continued" } }))
                }
            }
        }
    }
}

/// The meaning of a load's names.
pub(super) fn meaning(load: &Axes) -> Markup {
    let about = load.iter().filter_map(|(axis, name)| about_value(axis, name));
    let about: Vec<&str> = about.collect();
    html! { @if !about.is_empty() { span class="said" { (about.join("; ")) } } }
}

fn axes_of(row: &Row<'_>) -> String {
    serde_json::to_string(&row.cell.axes).unwrap_or_default()
}

/// The name of a way, with its marks.
fn name_of(row: &Row<'_>) -> Markup {
    let outliers = row.summary.outliers.len();
    html! {
        th scope="row" {
            @for (i, (axis, part)) in row.name.iter().enumerate() {
                @if i > 0 { span class="dotsep" { " · " } }
                (alone(axis, part))
            }
            @if row.advised { span class="tag" { "advised" } }
            @if row.default { span class="tag quiet" { "default" } }
            @if outliers > 0 { span class="tag warn" { (plural(outliers, "outlier")) } }
        }
    }
}

/// A row for survival, which has no bar.
fn survivor(matrix: &Matrix<'_>, row: &Row<'_>) -> Markup {
    let rounds = row.cell.values(SURVIVED);
    let part = rounds.iter().sum::<f64>() / rounds.len().max(1) as f64;
    let through = value(matrix.metric, part);
    html! {
        tr class=(if row.advised { "best" } else { "other" }) data-axes=(axes_of(row)) {
            (name_of(row))
            td class="num" data-name="Rounds" { (row.summary.count) }
            td class="num strong" data-name="Survived" { (through) }
            td class="why" data-name="What happened" {
                @for note in &row.cell.notes { span class="said" { (sentence(note)) } }
            }
        }
    }
}

fn line(matrix: &Matrix<'_>, row: &Row<'_>, most: f64, base: Option<&String>) -> Markup {
    let said = |number: f64| value(matrix.metric, number);
    let summary = &row.summary;
    let kind = match (row.advised, row.default) {
        (true, _) => "best",
        (false, true) => "default",
        _ => "other",
    };
    let text = format!(
        "{}: {}, {} to {}",
        label(&row.name),
        said(summary.median),
        said(summary.interval.low),
        said(summary.interval.high)
    );
    html! {
        tr class=(kind) data-axes=(axes_of(row)) {
            (name_of(row))
            td class="wide-bar" {
                (bar(&Bar {
                    value: summary.median,
                    low: summary.interval.low,
                    high: summary.interval.high,
                    most,
                    kind,
                    label: text,
                }))
            }
            td class="num strong" data-name="Median" { (said(summary.median)) }
            td class="num" data-name="Interval" {
                @if summary.count > 1 { (said(summary.interval.low)) " – " (said(summary.interval.high)) }
                @else { "one round" }
            }
            @if let Some(name) = base { td class="num" data-name=(name) { (against(row.gain.as_ref(), row.default)) } }
            td class="num" data-name="Varies by" {
                @match summary.variation { Some(part) => (percent(part)), None => "–" }
            }
        }
    }
}

/// A gain, or that it is undecided. Only a decided gain has a color.
pub(super) fn against(gain: Option<&Gain>, default: bool) -> Markup {
    let Some(gain) = gain else { return html! { @if default { "1" } @else { "–" } } };
    let interval = span(gain.interval.low, gain.interval.high);
    let ratio = times(gain.ratio);
    html! {
        @match gain.decision {
            _ if gain.is_hint() => span class="hinted" title="too few rounds to decide" {
                span aria-hidden="true" { "≈ " } span class="sr" { "about " } (ratio) "×"
            },
            Decision::Tie => span class="tie" title={(ratio) "×, " (interval)} { "not significant" },
            Decision::Better => span class="up" title=(interval) { (ratio) "×" },
            Decision::Worse => span class="down" title=(interval) { (ratio) "×" },
        }
    }
}

/// The weighted scores of a plan that has them: one ranking per score, the best five open.
pub(super) fn scores(matrix: &Matrix<'_>, verdict: &Verdict) -> Option<Markup> {
    let rankings = rankings(matrix);
    (!rankings.is_empty()).then(|| {
        html! {
            p class="note" {
                "The mean throughput of sequential 1 MiB and random 4 KiB, 64 KiB and 1 MiB requests. The 4 KiB throughput is first multiplied "
                "by the bare place's ratio of sequential to 4 KiB throughput; otherwise it would hardly count. Longer bars are better."
                (what_unsafe_loses(matrix))
            }
            @for ranking in &rankings { (ranked(ranking, verdict)) }
        }
    })
}

fn ranked(ranking: &Ranking, verdict: &Verdict) -> Markup {
    let most = ranking.rows.first().map_or(0.0, |(.., score)| *score);
    let said = |score: f64| value(ranking.metric, score);
    let row = |place: usize, (cell, axes, score): &(usize, Axes, f64)| {
        let kind = if verdict.cells.contains(cell) { "best" } else { "other" };
        html! {
            tr class=(kind) {
                td class="num place" { (place + 1) }
                th scope="row" {
                    (label(axes))
                    @if kind == "best" { span class="tag" { "advised" } }
                }
                td class="wide-bar" { (bar(&Bar {
                    value: *score, low: *score, high: *score, most, kind,
                    label: format!("{}: {}", label(axes), said(*score)),
                })) }
                td class="num strong" { (said(*score)) }
            }
        }
    };
    let count = ranking.rows.len();
    let place = ranking.seen.map_or_else(String::new, |seen| format!(", {seen}"));
    let name = format!("{}{place}", title(ranking.title));
    let part = |caption: Markup, from: usize, to: usize| {
        html! {
            table class="bars ranking" {
                (caption)
                thead { tr {
                    th scope="col" class="num" { "Rank" }
                    th scope="col" { "Configuration" }
                    th scope="col" class="wide-bar" { span class="sr" { "Bar" } }
                    th scope="col" class="num" { (title(ranking.title)) }
                } }
                tbody { @for (place, entry) in ranking.rows.iter().enumerate().take(to).skip(from) {
                    (row(place, entry))
                } }
            }
        }
    };
    html! {
        div class="results" {
            @if count > TOP {
                (part(html! { caption { (name) ": the best five of " (count) } }, 0, TOP))
                details class="rest" {
                    summary { (count - TOP) " more" }
                    (part(html! { caption class="sr" { (name) ", continued" } }, TOP, count))
                }
            } @else {
                (part(html! { caption { (name) } }, 0, TOP))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::fixture;

    /// The tables once compared with "qcow2 · inherited", and the verdict with "qcow2".
    #[test]
    fn a_default_has_one_name() {
        let mut run = fixture::run();
        let baseline = run.plan.baseline.as_mut().unwrap();
        baseline.push(("record".to_owned(), "inherited".to_owned()));
        run.plan.axes.push("record".to_owned());
        for cell in &mut run.cells {
            cell.axes.push(("record".to_owned(), "inherited".to_owned()));
        }
        assert_eq!(default_name(&Matrix::new(&run).unwrap()), "qcow2 · none");
    }
}
