//! Charts of the loads: queue depth, latencies, values over time.

use maud::{Markup, html};

use super::charts::{
    Caption, LINES_MAX, Line, Point, Timeline, curves, distribution, state, timeline,
};
use super::theme::LINE_COLORS;
use crate::lists::grouped;
use crate::matrix::{Matrix, OWN_TOOL, Role, role};
use crate::model::{Axes, Cell, Series, Steady, metric, with_value};
use crate::stats::{Percentile, median, merged, percentiles};
use crate::verdict::{Verdict, steadiness};
use crate::words::{counted, digits, label, percent, plural, time, title, value};

/// Number of charts of one kind that are open; further ones are collapsed.
const OPEN_MAX: usize = 3;
/// Largest number of charts of one kind.
const CHARTS_MAX: usize = 24;

/// Charts one below the other, the later ones collapsed.
fn stacked(charts: Vec<(String, Markup)>) -> Option<Markup> {
    (!charts.is_empty()).then(|| {
        html! {
            @for (i, (name, chart)) in charts.iter().take(CHARTS_MAX).enumerate() {
                @if i < OPEN_MAX {
                    figure { figcaption { (name) } (chart) }
                } @else {
                    details class="more" { summary { (name) } figure { (chart) } }
                }
            }
            @if charts.len() > CHARTS_MAX {
                p class="note" { "The run's file has the data of " (plural(charts.len() - CHARTS_MAX, "more chart")) "." }
            }
        }
    })
}

/// The axes of a cell without its load.
fn way(matrix: &Matrix<'_>, cell: &Cell) -> Axes {
    let short = matrix.short(&cell.axes);
    let load = matrix.load(cell);
    let way: Axes = short.into_iter().filter(|entry| !load.contains(entry)).collect();
    if way.is_empty() { cell.axes.clone() } else { way }
}

/// The ways that are drawn. Each has one color in all charts of a page.
pub(super) struct Colors {
    ways: Vec<(Axes, usize)>,
}

impl Colors {
    /// Assigns colors. The first is for the advised way and the second for the default, and neither
    /// is used for another way. The others go to the best ways of each load in turn.
    pub(super) fn of(matrix: &Matrix<'_>, verdict: &Verdict) -> Self {
        let groups = by_load(matrix, verdict);
        let mut ways: Vec<(Axes, usize)> = Vec::new();
        let mut add = |axes: Axes, color: usize| {
            let known = ways.iter().any(|(known, _)| *known == axes);
            if !known {
                ways.push((axes, color));
            }
            !known
        };
        let cells = &matrix.run.cells;
        if let Some(first) = verdict.cells.first() {
            add(way(matrix, &cells[*first]), 0);
        }
        let default = cells.iter().find(|cell| {
            let best = verdict.leading.as_ref();
            let beside = best.is_none_or(|best| near(cell, best, matrix));
            beside && matrix.is_default(cell)
        });
        if let Some(default) = default {
            add(way(matrix, default), 1);
        }
        let mut color = 2;
        let most = groups.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0);
        for place in 0..most {
            for (_, cells) in &groups {
                let Some(cell) = cells.get(place) else { continue };
                if color < LINE_COLORS && add(way(matrix, cell), color) {
                    color += 1;
                }
            }
        }
        Self { ways }
    }

    /// Selects the ways that have a color. Returns for each the color's number, its name in this
    /// chart, and the value given.
    fn drawn<'x, T>(&self, all: &'x [(Axes, T)], most: usize) -> Vec<(usize, String, &'x T)> {
        let color = |way: &Axes| Some(self.ways.iter().find(|(known, _)| known == way)?.1);
        let mut found: Vec<(usize, &Axes, &T)> =
            all.iter().filter_map(|(way, thing)| Some((color(way)?, way, thing))).collect();
        found.sort_by_key(|(color, ..)| *color);
        found.truncate(most);
        let ways: Vec<Axes> = found.iter().map(|(_, way, _)| (*way).clone()).collect();
        let named = told_apart(&ways).into_iter().zip(found);
        named.map(|(name, (color, _, thing))| (color, name, thing)).collect()
    }

    /// The lines of a chart, and those of the table below it, which has all ways.
    fn lines<P: Clone>(&self, all: &[(Axes, Vec<P>)]) -> (Vec<Line<P>>, Vec<Line<P>>) {
        let line = |color, name, points: &Vec<P>| Line { color, name, points: points.clone() };
        let drawn = self.drawn(all, LINES_MAX).into_iter();
        let drawn = drawn.map(|(color, name, points)| line(color, name, points));
        let numbers = all.iter().map(|(way, points)| line(0, label(way), points));
        (drawn.collect(), numbers.collect())
    }
}

/// Whether a cell equals the leading way except for the plan's baseline values.
fn near(cell: &Cell, leading: &Axes, matrix: &Matrix<'_>) -> bool {
    let baseline = matrix.run.plan.baseline.iter().flatten();
    let named: Vec<&str> = baseline.map(|(axis, _)| axis.as_str()).collect();
    let others = leading.iter().filter(|(axis, _)| !named.contains(&axis.as_str()));
    others.into_iter().all(|entry| cell.axes.contains(entry)) && matrix.counts(cell)
}

/// Names of a chart's lines, without axes that are the same for all of them, and without the tool
/// if it is vdkit.
fn told_apart(ways: &[Axes]) -> Vec<String> {
    let same = |entry: &(String, String)| ways.iter().all(|way| way.contains(entry));
    let own = |entry: &(String, String)| role(&entry.0) == Role::Tool && entry.1 == OWN_TOOL;
    ways.iter()
        .map(|way| {
            let told = way.iter().filter(|entry| !own(entry) && (ways.len() == 1 || !same(entry)));
            let told: Axes = told.cloned().collect();
            if told.is_empty() { label(way) } else { label(&told) }
        })
        .collect()
}

/// The queue depth of a cell, from `q32` in the load's name, and the axes without it.
fn depth_of(cell: &Cell) -> Option<(u32, Axes)> {
    let (depth, stem) = without_depth(cell.axis("profile")?)?;
    Some((depth, with_value(&cell.axes, "profile", &stem)))
}

/// Splits `rnd4k-q32-write` into 32 and `rnd4k-write`.
fn without_depth(profile: &str) -> Option<(u32, String)> {
    let parts: Vec<&str> = profile.split(['-', '_', ' ']).collect();
    let at = parts
        .iter()
        .position(|part| part.strip_prefix(['q', 'Q']).is_some_and(|n| n.parse::<u32>().is_ok()))?;
    let depth = parts[at][1..].parse().ok()?;
    let stem: Vec<&str> =
        parts.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, part)| *part).collect();
    Some((depth, stem.join("-")))
}

/// A way that was measured at several queue depths.
struct Depths {
    way: Axes,
    /// Sort key: the advised way first, then the default, then others.
    place: (bool, bool),
    points: Vec<Point>,
}

/// The ways of each load, by the load's name without the depth.
fn by_depth(matrix: &Matrix<'_>, verdict: &Verdict) -> Vec<(String, Vec<Depths>)> {
    let mut charts: Vec<(String, Vec<Depths>)> = Vec::new();
    for (i, cell) in matrix.run.cells.iter().enumerate() {
        let Some((depth, rest)) = depth_of(cell) else { continue };
        let value = |key: &str| median(&cell.values(key));
        let latency = value("latency_p50_ns").or_else(|| value("latency_mean_ns"));
        let (Some(iops), Some(latency)) = (value("iops"), latency) else { continue };
        if iops <= 0.0 || latency <= 0.0 {
            continue;
        }
        let part = |wanted: Role| -> Axes {
            let own = matrix.part(&rest, wanted);
            own.into_iter().filter(|(axis, _)| matrix.varying.contains(&axis.as_str())).collect()
        };
        let (load, mut way) = (label(&part(Role::Condition)), part(Role::Choice));
        way.extend(part(Role::Tool));
        let point = Point { depth, iops, latency: latency * 1e-9 };
        let at = charts.iter().position(|(name, _)| *name == load).unwrap_or_else(|| {
            charts.push((load, Vec::new()));
            charts.len() - 1
        });
        let ways = &mut charts[at].1;
        match ways.iter_mut().find(|known| known.way == way) {
            Some(known) => known.points.push(point),
            None => {
                let place = (!verdict.cells.contains(&i), !matrix.is_default(cell));
                ways.push(Depths { way, place, points: vec![point] });
            }
        }
    }
    for (_, ways) in &mut charts {
        ways.retain(|way| way.points.len() > 1);
        for way in ways.iter_mut() {
            way.points.sort_by_key(|point| point.depth);
        }
        let most = |way: &Depths| way.points.iter().map(|point| point.iops).fold(0.0, f64::max);
        ways.sort_by(|a, b| a.place.cmp(&b.place).then(most(b).total_cmp(&most(a))));
    }
    charts
}

/// Charts of requests per second against latency, for loads measured at several queue depths.
pub(super) fn depth(matrix: &Matrix<'_>, verdict: &Verdict, colors: &Colors) -> Option<Markup> {
    let charts =
        by_depth(matrix, verdict).into_iter().enumerate().filter_map(|(i, (load, ways))| {
            let all: Vec<(Axes, Vec<Point>)> =
                ways.into_iter().map(|way| (way.way, way.points)).collect();
            let (lines, numbers) = colors.lines(&all);
            let most =
                |line: &Line<Point>| line.points.iter().map(|point| point.iops).fold(0.0, f64::max);
            let first = lines.iter().max_by(|a, b| most(a).total_cmp(&most(b)))?.name.clone();
            let name = if load.is_empty() { "By queue depth".to_owned() } else { load };
            let caption = Caption {
                id: format!("depth-{i}"),
                title: format!("Requests per second against latency, {name}"),
                description: format!(
                    "Of these lines, {first} reaches the most requests per second. Numbers below."
                ),
            };
            Some((name, html! { (curves(&caption, &lines)) (depth_table(&numbers)) }))
        });
    stacked(charts.collect())
}

fn depth_table(ways: &[Line<Point>]) -> Markup {
    html! {
        details class="numbers" {
            summary { "Numbers" }
            div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart" {
                table {
                    thead { tr { th scope="col" { "Configuration" } th scope="col" class="num" { "Queue depth" }
                        th scope="col" class="num" { "Requests per second" } th scope="col" class="num" { "Median latency" } } }
                    tbody { @for way in ways { @for point in &way.points { tr {
                        th scope="row" { (way.name) }
                        td class="num" { (point.depth) }
                        td class="num" { (counted(point.iops)) }
                        td class="num" { (time(point.latency)) }
                    } } } }
                }
            }
        }
        (drawn_note(ways.len()))
    }
}

/// Says which lines a chart has, if the table has more.
fn drawn_note(ways: usize) -> Markup {
    html! {
        @if ways > LINES_MAX {
            p class="note" {
                "The chart shows the advised configuration and the default, if there are any, and some of the best others; the table has all "
                (ways) ". A configuration has the same color in all charts."
            }
        }
    }
}

/// Cells by load. The advised way comes first, then the default, then the best of the others.
fn by_load<'a>(matrix: &Matrix<'a>, verdict: &Verdict) -> Vec<(Axes, Vec<&'a Cell>)> {
    let cells = matrix.run.cells.iter().enumerate();
    grouped(cells.map(|(i, cell)| (matrix.load(cell), (i, cell))))
        .into_iter()
        .map(|(load, mut cells)| {
            // If all cells can be drawn, they keep their order, and so their colors, in every
            // chart.
            let few = cells.len() <= LINES_MAX;
            cells.sort_by(|(i, a), (j, b)| {
                let place =
                    |i: &usize, cell: &Cell| (!verdict.cells.contains(i), !matrix.is_default(cell));
                let of = |cell: &Cell| matrix.summary(cell).map_or(0.0, |summary| summary.median);
                let order = if few { i.cmp(j) } else { matrix.metric.best_first(of(a), of(b)) };
                place(i, a).cmp(&place(j, b)).then(order)
            });
            (load, cells.into_iter().map(|(_, cell)| cell).collect())
        })
        .collect()
}

/// Charts of latency distributions, one per load.
pub(super) fn latency(matrix: &Matrix<'_>, verdict: &Verdict, colors: &Colors) -> Option<Markup> {
    let charts =
        by_load(matrix, verdict).into_iter().enumerate().filter_map(|(i, (load, cells))| {
            let found: Vec<(Axes, Vec<Percentile>)> = cells
                .into_iter()
                .filter_map(|cell| {
                    let all = merged(cell.samples.iter().filter_map(|s| s.latencies.as_ref()));
                    let points = percentiles(&all);
                    (points.len() > 1).then(|| (way(matrix, cell), points))
                })
                .collect();
            let (lines, numbers) = colors.lines(&found);
            if lines.is_empty() {
                return None;
            }
            let name = if load.is_empty() { "All requests".to_owned() } else { label(&load) };
            let caption = Caption {
                id: format!("latency-{i}"),
                title: format!("Latency distribution, {name}"),
                description: said(&lines),
            };
            Some((name, html! { (distribution(&caption, &lines)) (latency_table(&numbers)) }))
        });
    stacked(charts.collect())
}

fn said(lines: &[Line<Percentile>]) -> String {
    let of = |line: &Line<Percentile>| {
        let (first, last) = (line.points.first()?, line.points.last()?);
        let ns = |point: &Percentile| time(point.ns as f64 * 1e-9);
        Some(format!(
            "{}: median {}, {} within {}",
            line.name,
            ns(first),
            percent_of(last),
            ns(last)
        ))
    };
    lines.iter().filter_map(of).collect::<Vec<_>>().join("; ")
}

/// Formats a percentile: `99.99 %`.
fn percent_of(point: &Percentile) -> String {
    let text = format!("{:.2}", point.fraction * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

fn latency_table(lines: &[Line<Percentile>]) -> Markup {
    let most = lines.iter().max_by_key(|line| line.points.len());
    let heads = most.map(|line| line.points.as_slice()).unwrap_or_default();
    html! {
        details class="numbers" {
            summary { "Numbers" }
            div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart" {
                table {
                    thead { tr { th scope="col" { "Configuration" }
                        @for head in heads { th scope="col" class="num" { (percent_of(head)) } } } }
                    tbody { @for line in lines { tr {
                        th scope="row" { (line.name) }
                        @for head in heads { td class="num" {
                            @match line.points.iter().find(|point| point.fraction == head.fraction) {
                                Some(point) => (time(point.ns as f64 * 1e-9)), None => "–" }
                        } }
                    } } }
                }
            }
        }
        (drawn_note(lines.len()))
    }
}

/// The first time series of a cell.
fn first_series(cell: &Cell) -> Option<&Series> {
    cell.samples.iter().find_map(|sample| sample.series.first())
}

/// Charts of loads over time, one per load, with two ways each.
pub(super) fn time_of(matrix: &Matrix<'_>, verdict: &Verdict, colors: &Colors) -> Option<Markup> {
    let charts =
        by_load(matrix, verdict).into_iter().enumerate().filter_map(|(i, (load, cells))| {
            Some((load_name(&load), time_chart(matrix, &cells, colors, i, &load_name(&load))?))
        });
    let stacked = stacked(charts.collect())?;
    Some(html! {
        p class="note" {
            "The time of a load is divided into ten parts. The marked window is the first five parts in a row that meet SNIA's rule for a "
            "steady state: the largest minus the smallest value is at most 20 % of their mean, and the fitted line rises or falls by at most "
            "10 %. If there is no such window, the last five parts are marked. A window of five minutes or more is called steady or not steady, "
            "a shorter one even or uneven."
        }
        (stacked)
    })
}

fn load_name(load: &Axes) -> String {
    if load.is_empty() { "First round".to_owned() } else { label(load) }
}

fn time_chart(
    matrix: &Matrix<'_>,
    cells: &[&Cell],
    colors: &Colors,
    number: usize,
    name: &str,
) -> Option<Markup> {
    const SHOWN: usize = 2;
    let found: Vec<(Axes, (&Cell, &Series))> = cells
        .iter()
        .filter_map(|cell| Some((way(matrix, cell), (*cell, first_series(cell)?))))
        .filter(|(_, (_, series))| series.seconds.len() > 2)
        .collect();
    let metric = metric(&found.first()?.1.1.metric)?;
    let same: Vec<(Axes, (&Cell, &Series))> =
        found.iter().filter(|(_, (_, series))| series.metric == metric.key).cloned().collect();
    let shown = colors.drawn(&same, SHOWN);
    let (_, first, (cell, _)) = shown.first()?;
    let window = steadiness(cell).into_iter().next();
    let lines = shown
        .iter()
        .map(|(color, name, (_, series))| {
            let points = series.seconds.iter().copied().zip(series.values.iter().copied());
            Line { color: *color, name: name.clone(), points: points.collect() }
        })
        .collect();
    let caption = Caption {
        id: format!("time-{number}"),
        title: format!("{} over time, {name}", title(metric.title)),
        description: window.as_ref().map_or_else(String::new, |window| {
            let (from, to) = (digits(window.from_seconds), digits(window.to_seconds));
            format!("{first} is {} from {from} to {to} seconds", state(window))
        }),
    };
    Some(html! {
        (timeline(&caption, &Timeline { metric, lines, window }))
        (steady_table(matrix, &found.iter().map(|(_, (cell, _))| *cell).collect::<Vec<_>>()))
    })
}

fn steady_table(matrix: &Matrix<'_>, cells: &[&Cell]) -> Markup {
    let rows: Vec<(&Cell, Vec<Steady>)> = cells
        .iter()
        .map(|cell| (*cell, steadiness(cell)))
        .filter(|(_, all)| !all.is_empty())
        .collect();
    html! {
        @if !rows.is_empty() {
            details class="numbers" {
                summary { "Numbers" }
                div class="scroll" tabindex="0" role="region" aria-label="Steadiness" {
                    table {
                        thead { tr { th scope="col" { "Configuration" } th scope="col" class="num" { "Even samples" }
                            th scope="col" class="num" { "Mean in the window" }
                            th scope="col" class="num" { "Range / mean" } th scope="col" class="num" { "Slope / mean" } } }
                        tbody { @for (cell, all) in &rows { tr {
                            th scope="row" { (label(&way(matrix, cell))) }
                            td class="num" { (all.iter().filter(|s| s.reached).count()) " of " (all.len()) }
                            td class="num" { @match metric(&all[0].metric) {
                                Some(metric) => (value(metric, all[0].mean)), None => (digits(all[0].mean)) } }
                            td class="num" { (percent(all[0].excursion)) }
                            td class="num" { (percent(all[0].slope)) }
                        } } }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_found_in_names() {
        assert_eq!(without_depth("rnd4k-q32-write"), Some((32, "rnd4k-write".to_owned())));
        assert_eq!(without_depth("SEQ1M_Q8"), Some((8, "SEQ1M".to_owned())));
        assert_eq!(without_depth("qcow2-8k"), None);
        let point = |fraction| percent_of(&Percentile { fraction, ns: 1 });
        assert_eq!(
            (point(0.5), point(0.999), point(0.9999)),
            ("50 %".into(), "99.9 %".into(), "99.99 %".into())
        );
    }
}
