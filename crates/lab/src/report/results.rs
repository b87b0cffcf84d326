//! Every cell that was measured: a table a load, with bars.

use maud::{Markup, html};

use super::charts::{Bar, bar};
use crate::axes::about_value;
use crate::matrix::{Matrix, OWN_TOOL, Role, in_guest, role, seen};
use crate::model::{Axes, Better, Cell, SURVIVED, metric};
use crate::stats::{Decision, Gain, Summary, median};
use crate::verdict::Verdict;
use crate::words::{label, percent, sentence, span, times, title, value};

/// A row of a table.
struct Row<'a> {
    cell: &'a Cell,
    /// The axes that tell it from others of the same load.
    name: Axes,
    summary: Summary,
    gain: Option<Gain>,
    advised: bool,
    default: bool,
}

/// Cells by load: those of one load under one heading, the best first.
fn groups<'a>(matrix: &Matrix<'a>, verdict: &Verdict) -> Vec<(Axes, Vec<Row<'a>>)> {
    let mut groups: Vec<(Axes, Vec<Row<'a>>)> = Vec::new();
    for (i, cell) in matrix.run.cells.iter().enumerate() {
        let Some(summary) = matrix.summary(cell) else { continue };
        let varying = |axes: Axes| -> Axes {
            axes.into_iter().filter(|(axis, _)| matrix.varying.contains(&axis.as_str())).collect()
        };
        let load = matrix.load(cell);
        // (Our own tool is not said: what is of another one says so.)
        let own = |entry: &(String, String)| role(&entry.0) == Role::Tool && entry.1 == OWN_TOOL;
        let rest = varying(cell.axes.clone()).into_iter();
        let name: Axes = rest.filter(|entry| !load.contains(entry) && !own(entry)).collect();
        let base = matrix.base_of(cell);
        let row = Row {
            cell,
            name: if name.is_empty() { cell.axes.clone() } else { name },
            summary,
            gain: matrix.gain(cell),
            advised: verdict.cells.contains(&i),
            default: base.is_some_and(|base| base.key == cell.key),
        };
        match groups.iter_mut().find(|(known, _)| *known == load) {
            Some((_, rows)) => rows.push(row),
            None => groups.push((load, vec![row])),
        }
    }
    for (_, rows) in &mut groups {
        rows.sort_by(|a, b| {
            let order = a.summary.median.total_cmp(&b.summary.median);
            if matrix.metric.better == Better::Higher { order.reverse() } else { order }
        });
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
            (title(metric.title)) ", " (note)
            @if metric.key != SURVIVED { (NOTE_BARS) }
            @if guessed(&groups) { " " (GUESSED) }
        }
        (filters(matrix))
        @for (load, rows) in &groups { (table(matrix, load, rows)) }
        p class="js none" hidden role="status" { "No cell fits the filters." }
    })
}

const NOTE_BARS: &str = "A bar is the median of the rounds, the line on it the interval in which \
    the median lies; where two intervals overlap widely the difference may be noise.";
const NOTE_SURVIVED: &str = "or not: whether whoever writes saw no error while there was no space, \
    and went on when there was room again.";

/// What `≈` means.
pub(super) const GUESSED: &str = "≈: one or two rounds, so nobody knows how much of the difference \
    is noise; 15 % of each of the two are allowed for.";

fn guessed(groups: &[(Axes, Vec<Row<'_>>)]) -> bool {
    let gains = groups.iter().flat_map(|(_, rows)| rows).filter_map(|row| row.gain.as_ref());
    gains.into_iter().any(|gain| gain.is_guessed())
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
                            span { (value) }
                        }
                    }
                }
            }
            button type="reset" class="plain" { "Show all" }
        }
    }
}

/// Rows that are shown at once; others are folded away, but for what is advised and the default.
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
    let part = |rows: &[&Row<'_>], caption: Markup| {
        html! {
            table class="bars" {
                (caption)
                thead { tr {
                    th scope="col" { "Way" }
                    @if survival {
                        th scope="col" class="num" { "Rounds" }
                        th scope="col" class="num" { "Came through" }
                        th scope="col" { "What happened" }
                    } @else {
                        th scope="col" class="wide-bar" { span class="sr" { "Bar" } }
                        th scope="col" class="num" { "Median" }
                        th scope="col" class="num" { "Interval" }
                        @if bases { th scope="col" class="num" { "Against default" } }
                        th scope="col" class="num" { "Varies by" }
                    }
                } }
                tbody { @for row in rows {
                    @if survival { (survivor(matrix, row)) } @else { (line(matrix, row, most, bases)) }
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

/// What the names in a load stand for.
pub(super) fn meaning(load: &Axes) -> Markup {
    let about = load.iter().filter_map(|(axis, name)| about_value(axis, name));
    let about: Vec<&str> = about.collect();
    html! { @if !about.is_empty() { span class="said" { (about.join("; ")) } } }
}

fn axes_of(row: &Row<'_>) -> String {
    serde_json::to_string(&row.cell.axes).unwrap_or_default()
}

/// The way, with its marks.
fn name_of(row: &Row<'_>) -> Markup {
    let outliers = row.summary.outliers.len();
    html! {
        th scope="row" {
            @for (i, (_, part)) in row.name.iter().enumerate() {
                @if i > 0 { span class="dotsep" { " · " } }
                (part)
            }
            @if row.advised { span class="tag" { "advised" } }
            @if row.default { span class="tag quiet" { "default" } }
            @if outliers > 0 { span class="tag warn" { (outliers) " far off" } }
        }
    }
}

/// A row of what came through or did not: there is nothing to draw.
fn survivor(matrix: &Matrix<'_>, row: &Row<'_>) -> Markup {
    let rounds = row.cell.values(SURVIVED);
    let part = rounds.iter().sum::<f64>() / rounds.len().max(1) as f64;
    let through = value(matrix.metric, part);
    html! {
        tr class=(if row.advised { "best" } else { "other" }) data-axes=(axes_of(row)) {
            (name_of(row))
            td class="num" data-name="Rounds" { (row.summary.count) }
            td class="num strong" data-name="Came through" { (through) }
            td class="why" data-name="What happened" {
                @for note in &row.cell.notes { span class="said" { (sentence(note)) } }
            }
        }
    }
}

fn line(matrix: &Matrix<'_>, row: &Row<'_>, most: f64, bases: bool) -> Markup {
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
            @if bases { td class="num" data-name="Against default" { (against(row.gain.as_ref(), row.default)) } }
            td class="num" data-name="Varies by" {
                @match summary.variation { Some(part) => (percent(part)), None => "–" }
            }
        }
    }
}

/// A gain, or that it is a tie.
pub(super) fn against(gain: Option<&Gain>, default: bool) -> Markup {
    html! {
        @match gain {
            Some(gain) if gain.decision == Decision::Tie => {
                span class="tie" title=(span(gain.interval.low, gain.interval.high)) { "tie" }
            }
            Some(gain) if gain.is_guessed() => {
                span class="guess" title=(span(gain.interval.low, gain.interval.high)) {
                    span aria-hidden="true" { "≈ " } span class="sr" { "about " }
                    (times(gain.ratio)) "×"
                }
            }
            Some(gain) => {
                span class=(if gain.decision == Decision::Better { "up" } else { "down" })
                    title=(span(gain.interval.low, gain.interval.high)) { (times(gain.ratio)) "×" }
            }
            None if default => "1",
            None => "–",
        }
    }
}

/// A row of weighted scores.
struct Scored<'a> {
    axes: Axes,
    /// With those that are the same everywhere.
    all: &'a Axes,
    score: f64,
    read: Option<f64>,
    write: Option<f64>,
    kind: &'static str,
}

/// The weighted scores of a plan that has them.
pub(super) fn scores(matrix: &Matrix<'_>, verdict: &Verdict) -> Option<Markup> {
    let of = |cell: &Cell, key: &str| median(&cell.values(key));
    let mut rows: Vec<Scored<'_>> = matrix
        .run
        .cells
        .iter()
        .enumerate()
        .filter_map(|(i, cell)| {
            Some(Scored {
                axes: matrix.short(&cell.axes),
                all: &cell.axes,
                score: of(cell, "score")?,
                read: of(cell, "read_bytes_per_second"),
                write: of(cell, "write_bytes_per_second"),
                kind: if verdict.cells.contains(&i) { "best" } else { "other" },
            })
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    rows.sort_by(|a, b| b.score.total_cmp(&a.score));
    let places: &[Option<bool>] =
        if matrix.guests_apart() { &[Some(false), Some(true)] } else { &[None] };
    let rate = |number: Option<f64>| match (number, metric("bytes_per_second")) {
        (Some(number), Some(metric)) => value(metric, number),
        _ => "–".to_owned(),
    };
    Some(html! {
        p class="note" {
            "Sequential throughput, averaged with 4 KiB random throughput scaled by what the bare place's sequential is "
            "of its random one: a way that loses nothing against the bare place scores as that does. Longer bars are better. "
            "Bold: what is advised."
        }
        @for guest in places {
            @let fits = |row: &&Scored<'_>| guest.is_none_or(|guest| in_guest(row.all) == guest);
            @let some: Vec<&Scored<'_>> = rows.iter().filter(fits).collect();
            div class="results" { (score_table(&some, &rate)) }
        }
    })
}

fn score_table(rows: &[&Scored<'_>], rate: &dyn Fn(Option<f64>) -> String) -> Markup {
    let most = rows.first().map_or(0.0, |row| row.score);
    let score = |score: f64| metric("score").map_or_else(String::new, |known| value(known, score));
    let caption = rows.first().map_or("", |row| seen(row.all));
    html! {
        table class="bars" {
            caption { "Scores " (caption) }
            thead { tr {
                th scope="col" { "Way" }
                th scope="col" class="wide-bar" { span class="sr" { "Bar" } }
                th scope="col" class="num" { "Score" }
                th scope="col" class="num" { "Weighted read" }
                th scope="col" class="num" { "Weighted write" }
            } }
            tbody { @for row in rows {
                tr class=(row.kind) {
                    th scope="row" { (label(&row.axes)) }
                    td class="wide-bar" { (bar(&Bar {
                        value: row.score, low: row.score, high: row.score, most, kind: row.kind,
                        label: format!("{}: {}", label(&row.axes), score(row.score)),
                    })) }
                    td class="num strong" data-name="Score" { (score(row.score)) }
                    td class="num" data-name="Weighted read" { (rate(row.read)) }
                    td class="num" data-name="Weighted write" { (rate(row.write)) }
                }
            } }
        }
    }
}
