//! Other tools and published numbers, beside what was measured here.

use maud::{Markup, html};

use super::charts::{Bar, bar};
use super::results::against;
use crate::matrix::Matrix;
use crate::model::{Published, metric};
use crate::verdict::{Verdict, heading, measured_for};
use crate::words::{label, times, value};

/// Tools side by side: the same thing done by each, in the same run.
pub(super) fn peers(matrix: &Matrix<'_>, verdict: &Verdict) -> Option<Markup> {
    let first = verdict.peers.first()?;
    let tools: Vec<&String> = first.tools.iter().map(|(tool, _)| tool).collect();
    let others: Vec<&String> =
        tools.iter().copied().filter(|tool| *tool != crate::matrix::OWN_TOOL).collect();
    Some(html! {
        p class="note" {
            "The same thing done by each program in the same run. The last columns say how many times as good vdkit is as the other; "
            "below 1 the other is better."
        }
        div class="scroll" tabindex="0" role="region" aria-label="Tools side by side" {
            table class="plain" {
                thead { tr {
                    th scope="col" { (heading(matrix.metric.key)) }
                    @for tool in &tools { th scope="col" class="num" { (tool) } }
                    @for other in &others { th scope="col" class="num" { "vdkit / " (other) } }
                } }
                tbody { @for row in &verdict.peers { tr {
                    th scope="row" { (label(&row.axes)) }
                    @for (_, summary) in &row.tools { td class="num" {
                        @match summary { Some(summary) => (value(matrix.metric, summary.median)), None => "–" }
                    } }
                    @for other in &others { td class="num" {
                        (against(row.gains.iter().find(|(tool, _)| tool == *other).map(|(_, gain)| gain), false))
                    } }
                } } }
            }
        }
    })
}

/// Published numbers, those of one metric under one heading.
pub(super) fn published(matrix: &Matrix<'_>) -> Option<Markup> {
    let mut groups: Vec<(&str, Vec<&Published>)> = Vec::new();
    for number in &matrix.run.published {
        match groups.iter_mut().find(|(metric, _)| *metric == number.metric) {
            Some((_, numbers)) => numbers.push(number),
            None => groups.push((&number.metric, vec![number])),
        }
    }
    (!groups.is_empty()).then(|| {
        html! {
            p class="note" {
                "Other machines, other years: compare the order and the proportions, not the numbers themselves. "
                "Each side has its own scale."
            }
            @for (key, numbers) in &groups { (group(matrix, key, numbers)) }
        }
    })
}

fn group(matrix: &Matrix<'_>, key: &str, numbers: &[&Published]) -> Markup {
    // What all have in common is said once.
    let first = numbers[0].source.as_str();
    let common = numbers.iter().all(|number| number.source == first);
    let said = |number: f64| match metric(key) {
        Some(metric) => value(metric, number),
        None => number.to_string(),
    };
    let rows: Vec<(&Published, Option<f64>)> =
        numbers.iter().map(|number| (*number, measured_for(matrix, number))).collect();
    let most_published = numbers.iter().map(|number| number.value).fold(0.0, f64::max);
    let most_here = rows.iter().filter_map(|(_, here)| *here).fold(0.0, f64::max);
    let drawn = |number: f64, most: f64, kind, name: &str| {
        bar(&Bar {
            value: number,
            low: number,
            high: number,
            most,
            kind,
            label: format!("{name}: {}", said(number)),
        })
    };
    html! {
        div class="results" {
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
                tbody { @for (number, here) in &rows { tr {
                    th scope="row" {
                        (label(&number.axes))
                        @if !common { span class="said" { (number.source) } }
                    }
                    td class="wide-bar" data-name="Published" { (drawn(number.value, most_published, "other", "published")) }
                    td class="num" { (said(number.value)) }
                    @match here {
                        Some(here) => {
                            td class="wide-bar" data-name="Here" { (drawn(*here, most_here, "best", "here")) }
                            td class="num strong" { (said(*here)) }
                            td class="num" data-name="Here / published" { @if number.value > 0.0 { (times(here / number.value)) "×" } @else { "–" } }
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
        @if common { p class="source" { "Source: " (first) } }
    }
}
