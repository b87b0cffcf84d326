//! Other tools and published numbers, next to this run's measurements.

use maud::{Markup, html};

use super::charts::{Bar, bar};
use super::results::{HINT, against};
use crate::lists::grouped;
use crate::matrix::Matrix;
use crate::model::{Axes, Published};
use crate::verdict::{Verdict, all_measured_for, measured_for, others_for};
use crate::words::{digits, heading, label, plural, times, value, value_of};

/// Tools side by side: the same task done by each tool in this run.
pub(super) fn peers(matrix: &Matrix<'_>, verdict: &Verdict) -> Option<Markup> {
    let first = verdict.peers.first()?;
    let tools: Vec<&String> = first.tools.iter().map(|(tool, _)| tool).collect();
    // Survival has no ratio.
    let gains = verdict.peers.iter().any(|row| !row.gains.is_empty());
    let others: Vec<&String> =
        tools.iter().copied().filter(|tool| gains && *tool != crate::matrix::OWN_TOOL).collect();
    Some(html! {
        p class="note" {
            "The same task, done by each program in the same run."
            @if gains {
                " The last columns give how many times as good vdkit is; below 1, the other program is better."
            }
            @if verdict.peers.iter().flat_map(|row| &row.gains).any(|(_, gain)| gain.is_hint()) {
                " " (HINT)
            }
            @if tools.iter().any(|tool| *tool == "library") {
                " The library is vdkit's own, called by the lab without a command."
            }
        }
        div class="scroll" tabindex="0" role="region" aria-label="Tools side by side" {
            table class="plain stack" {
                thead { tr {
                    th scope="col" { (heading(matrix.metric.key)) }
                    @for tool in &tools { th scope="col" class="num" { (tool) } }
                    @for other in &others { th scope="col" class="num" { "vdkit / " (other) } }
                } }
                tbody { @for row in &verdict.peers { tr {
                    th scope="row" { (label(&row.axes)) }
                    @for (tool, summary) in &row.tools { td class="num" data-name=(tool) {
                        @match summary { Some(summary) => (value(matrix.metric, summary.median)), None => "–" }
                    } }
                    @for other in &others { td class="num" data-name={"vdkit / " (other)} {
                        (against(row.gains.iter().find(|(tool, _)| tool == *other).map(|(_, gain)| gain), false))
                    } }
                } } }
            }
        }
    })
}

/// Published numbers, grouped by metric.
pub(super) fn published(matrix: &Matrix<'_>) -> Option<Markup> {
    let numbers = matrix.run.published.iter();
    let groups = grouped(numbers.map(|number| (number.metric.as_str(), number)));
    (!groups.is_empty()).then(|| {
        html! {
            p class="note" {
                "The published numbers are from other machines and other years: compare order and proportions, not the numbers themselves. "
                "If there are several rows, each side has its own scale. The column Here has the median of this run's cells. If vdkit and other programs did the same task, it has vdkit's result, and the others are below it."
            }
            @if !matrix.run.plan.differs.is_empty() {
                p class="note" { b { "What differs. " } (matrix.run.plan.differs) }
            }
            @for (key, numbers) in &groups { (group(matrix, key, numbers)) }
        }
    })
}

/// One published number with this run's measurement.
struct Row<'a> {
    number: &'a Published,
    here: Option<f64>,
    others: Vec<(String, f64)>,
    /// Number of cells that the published number covers, and the range of their values, if there
    /// are several.
    span: Option<(usize, f64, f64)>,
}

/// A largest number this many times the second largest does not set the scale.
const FAR: f64 = 20.0;

/// The end of a scale on which more than one number is visible.
fn scale(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = numbers.collect();
    all.sort_by(|a, b| b.total_cmp(a));
    match all.as_slice() {
        [] => 0.0,
        [first, second, ..] if *second > 0.0 && *first > FAR * second => *second,
        [first, ..] => *first,
    }
}

/// Formats a ratio: `1.84×`, `1/192`.
fn proportion(here: f64, published: f64) -> String {
    let ratio = here / published;
    match ratio {
        ratio if ratio > 0.0 && ratio < 0.1 => format!("1/{}", digits(1.0 / ratio)),
        ratio => format!("{}×", times(ratio)),
    }
}

/// The axes of a published number that vary in this run.
fn told(matrix: &Matrix<'_>, number: &Published) -> Axes {
    let varies = |axis: &str| axis == "backend" || matrix.varying.contains(&axis);
    let told: Axes = number.axes.iter().filter(|(axis, _)| varies(axis)).cloned().collect();
    if told.is_empty() { number.axes.clone() } else { told }
}

fn group(matrix: &Matrix<'_>, key: &str, numbers: &[&Published]) -> Markup {
    // What all numbers have in common is printed once.
    let first = numbers[0].source.as_str();
    let common = numbers.iter().all(|number| number.source == first);
    let (mut here, mut elsewhere) = (Vec::new(), Vec::new());
    for &number in numbers {
        let (own, others) = (measured_for(matrix, number), others_for(matrix, number));
        let side = if own.is_some() { &mut here } else { &mut elsewhere };
        let span = match all_measured_for(matrix, number).as_slice() {
            all @ [low, .., high] => Some((all.len(), *low, *high)),
            _ => None,
        };
        side.push(Row { number, here: own, others, span });
    }
    let count = elsewhere.len();
    html! {
        div class="results" {
            @if here.is_empty() {
                p class="note" { (heading(key)) ": no published number has a counterpart in this run." }
            } @else {
                (pairs(matrix, key, &here, common))
            }
            @if count > 0 {
                details class="rest" {
                    summary { (plural(count, "published number")) " without a counterpart in this run" }
                    (pairs(matrix, key, &elsewhere, common))
                }
            }
        }
        @if common { p class="source" { "Source: " (first) } }
    }
}

fn pairs(matrix: &Matrix<'_>, key: &str, rows: &[Row<'_>], common: bool) -> Markup {
    let said = |number: f64| value_of(key, number);
    let mut most_published = scale(rows.iter().map(|row| row.number.value));
    let mut most_here = scale(rows.iter().filter_map(|row| row.here));
    if rows.len() == 1 {
        // Two bars of one number each only make sense on a common scale.
        most_published = most_published.max(most_here);
        most_here = most_published;
    }
    let drawn = |number: f64, most: f64, kind, name: &str| {
        let label = format!("{name}: {}", said(number));
        let bar = bar(&Bar { value: number, low: number, high: number, most, kind, label });
        html! { (bar) @if number > most { span class="said" { "longer than the scale" } } }
    };
    html! {
        table class="bars pairs" {
            caption { (heading(key)) }
            thead { tr {
                th scope="col" { "What" }
                th scope="col" class="wide-bar" { "Published" }
                th scope="col" class="num" { span class="sr" { "Published number" } }
                th scope="col" class="wide-bar" { "Here" }
                th scope="col" class="num" { span class="sr" { "Measured number" } }
                th scope="col" class="num" { "Here / published" }
            } }
            tbody { @for row in rows { tr {
                th scope="row" {
                    (label(&told(matrix, row.number)))
                    @if !common { span class="said" { (row.number.source) } }
                }
                td class="wide-bar" data-name="Published" {
                    (drawn(row.number.value, most_published, "other", "published"))
                }
                td class="num" { (said(row.number.value)) }
                @match row.here {
                    Some(here) => {
                        td class="wide-bar" data-name="Here" {
                            (drawn(here, most_here, "here", "here"))
                            @if let Some((count, low, high)) = row.span {
                                span class="said" {
                                    "median of " (count) " cells: " (said(low)) " to " (said(high))
                                }
                            }
                            @for (name, other) in &row.others {
                                span class="said" { (name) " " (said(*other)) }
                            }
                        }
                        td class="num strong" { (said(here)) }
                        td class="num" data-name="Here / published" {
                            @if row.number.value > 0.0 { (proportion(here, row.number.value)) } @else { "–" }
                        }
                    }
                    None => {
                        td class="wide-bar" data-name="Here" { span class="none-here" { "not measured" } }
                        td class="num" { "–" }
                        td class="num" data-name="Here / published" { "–" }
                    }
                }
            } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_far_number_does_not_hide_the_rest() {
        assert_eq!(scale([0.4, 600.0, 1.6].into_iter()), 1.6);
        assert_eq!(scale([0.4, 3.5].into_iter()), 3.5);
        assert_eq!((scale([5.0, 0.0].into_iter()), scale(std::iter::empty())), (5.0, 0.0));
    }

    #[test]
    fn small_proportions_are_parts() {
        assert_eq!(proportion(3.0, 1935.0), "1/645");
        assert_eq!((proportion(0.5, 1.0), proportion(2.65, 1.0)), ("0.50×".into(), "2.65×".into()));
        assert_eq!(proportion(0.0, 1.0), "0.00×");
    }
}
