//! Charts of the loads: queue depth, latencies, values over time.

use maud::{Markup, html};

use super::charts::{Axis, Chart, LINES_MAX, Line, Range, state};
use super::theme::LINE_COLORS;
use crate::lists::grouped;
use crate::matrix::{Matrix, Role, is_own_tool};
use crate::model::{Axes, Cell, Series, metric, with_value};
use crate::stats::{Percentile, median, merged, percentiles};
use crate::verdict::{Verdict, steadiness};
use crate::words::{counted, digits, label, percent, plural, time, title, value, value_of};

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
            add(matrix.way(&cells[*first]), 0);
        }
        let default = cells.iter().find(|cell| {
            let best = verdict.leading.as_ref();
            let beside = best.is_none_or(|best| near(cell, best, matrix));
            beside && matrix.is_default(cell)
        });
        if let Some(default) = default {
            add(matrix.way(default), 1);
        }
        let mut color = 2;
        let most = groups.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0);
        for place in 0..most {
            for (_, cells) in &groups {
                let Some(cell) = cells.get(place) else { continue };
                if color < LINE_COLORS && add(matrix.way(cell), color) {
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
}

/// The ways that a chart draws: color, name, points.
type Drawn<'x, P> = [(usize, String, &'x Vec<P>)];

fn lines<P>(drawn: &Drawn<'_, P>, place: impl Fn(&P) -> (f64, f64)) -> Vec<Line> {
    let line = |(color, name, points): &(usize, String, &Vec<P>)| Line {
        color: *color,
        name: name.clone(),
        points: points.iter().map(&place).collect(),
    };
    drawn.iter().map(line).collect()
}

/// All numbers of a chart, collapsed: rows of a configuration and its numbers. `ways` is the number
/// of configurations; the chart may draw fewer.
fn numbers(heads: &[String], rows: &[(String, Vec<String>)], ways: usize) -> Markup {
    html! {
        details class="numbers" {
            summary { "Numbers" }
            div class="scroll" tabindex="0" role="region" aria-label="Numbers of the chart" {
                table {
                    thead { tr {
                        th scope="col" { "Configuration" }
                        @for head in heads { th scope="col" class="num" { (head) } }
                    } }
                    tbody { @for (name, numbers) in rows { tr {
                        th scope="row" { (name) }
                        @for number in numbers { td class="num" { (number) } }
                    } } }
                }
            }
        }
        @if ways > LINES_MAX {
            p class="note" {
                "The chart shows the advised configuration and the default, if there are any, and some of the best others; the table has all "
                (ways) ". A configuration has the same color in all charts."
            }
        }
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
    ways.iter()
        .map(|way| {
            let told = way.iter().filter(|e| !is_own_tool(e) && (ways.len() == 1 || !same(e)));
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

/// The result at one queue depth.
#[derive(Clone, Debug)]
struct Point {
    depth: u32,
    /// Requests per second.
    iops: f64,
    /// Latency in seconds.
    latency: f64,
}

/// The most requests per second of a way.
fn most(points: &[Point]) -> f64 {
    points.iter().map(|point| point.iops).fold(0.0, f64::max)
}

/// What was measured of each way, by the load's name without the depth.
type ByLoad = Vec<(String, Vec<(Axes, Vec<Point>)>)>;

/// The ways that were measured at several depths, best first.
fn by_depth(matrix: &Matrix<'_>) -> ByLoad {
    let point = |cell: &Cell| {
        let (depth, rest) = depth_of(cell)?;
        let value = |key: &str| median(&cell.values(key)).filter(|value| *value > 0.0);
        let latency = value("latency_p50_ns").or_else(|| value("latency_mean_ns"))? * 1e-9;
        let part = |wanted: Role| -> Axes {
            let own = matrix.part(&rest, wanted);
            own.into_iter().filter(|(axis, _)| matrix.varying.contains(&axis.as_str())).collect()
        };
        let way = [part(Role::Choice), part(Role::Tool)].concat();
        let point = Point { depth, iops: value("iops")?, latency };
        Some((label(&part(Role::Condition)), (way, point)))
    };
    let mut charts = Vec::new();
    for (load, points) in grouped(matrix.run.cells.iter().filter_map(point)) {
        let mut ways = grouped(points);
        ways.retain(|(_, points)| points.len() > 1);
        ways.iter_mut().for_each(|(_, points)| points.sort_by_key(|point| point.depth));
        ways.sort_by(|(_, a), (_, b)| most(b).total_cmp(&most(a)));
        charts.push((load, ways));
    }
    charts
}

/// Charts of requests per second against latency, for loads measured at several queue depths.
pub(super) fn depth(matrix: &Matrix<'_>, colors: &Colors) -> Option<Markup> {
    let charts = by_depth(matrix).into_iter().enumerate().filter_map(|(i, (load, ways))| {
        let drawn = colors.drawn(&ways, LINES_MAX);
        let (_, first, _) = drawn.iter().max_by(|(.., a), (.., b)| most(a).total_cmp(&most(b)))?;
        let name = if load.is_empty() { "By queue depth".to_owned() } else { load };
        let chart = Chart {
            id: format!("depth-{i}"),
            title: format!("Requests per second against latency, {name}"),
            description: format!(
                "Of these lines, {first} reaches the most requests per second. Numbers below."
            ),
            lines: lines(&drawn, |point| (point.iops, point.latency)),
            x: Axis {
                name: "requests per second (more is better)",
                range: Range::Linear(0.0, 1.08),
                ticks: &[],
                text: &counted,
            },
            y: Axis { name: "median latency", range: Range::Log, ticks: &[], text: &time },
            marks: drawn[0].2.iter().map(|point| format!("Q{}", point.depth)).collect(),
            window: None,
        };
        let row = |way: &Axes, Point { depth, iops, latency }: &Point| {
            (label(way), vec![depth.to_string(), counted(*iops), time(*latency)])
        };
        let rows = ways.iter().flat_map(|(way, points)| points.iter().map(move |p| row(way, p)));
        let rows: Vec<_> = rows.collect();
        let heads = ["Queue depth", "Requests per second", "Median latency"].map(str::to_owned);
        Some((name, html! { (chart.html()) (numbers(&heads, &rows, ways.len())) }))
    });
    stacked(charts.collect())
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
                    (points.len() > 1).then(|| (matrix.way(cell), points))
                })
                .collect();
            let drawn = colors.drawn(&found, LINES_MAX);
            if drawn.is_empty() {
                return None;
            }
            let name = if load.is_empty() { "All requests".to_owned() } else { label(&load) };
            let chart = Chart {
                id: format!("latency-{i}"),
                title: format!("Latency distribution, {name}"),
                description: said(&drawn),
                lines: lines(&drawn, |point| (nines(point.fraction), point.ns as f64 * 1e-9)),
                // One step per nine: 0.9, 0.99, 0.999.
                x: Axis {
                    name: "requests that took at most this long",
                    range: Range::Linear(nines(0.5), 1.0),
                    ticks: &[0.5, 0.9, 0.99, 0.999, 0.9999].map(nines),
                    text: &|nines| percent_of(1.0 - 10f64.powf(-nines)),
                },
                y: Axis { name: "latency", range: Range::Log, ticks: &[], text: &time },
                marks: Vec::new(),
                window: None,
            };
            Some((name, html! { (chart.html()) (latency_table(&found)) }))
        });
    stacked(charts.collect())
}

/// Maps 0.9 to 1 and 0.99 to 2.
fn nines(fraction: f64) -> f64 {
    -(1.0 - fraction).max(1e-9).log10()
}

fn said(drawn: &Drawn<'_, Percentile>) -> String {
    let of = |(_, name, points): &(usize, String, &Vec<Percentile>)| {
        let (first, last) = (points.first()?, points.last()?);
        let ns = |point: &Percentile| time(point.ns as f64 * 1e-9);
        let most = percent_of(last.fraction);
        Some(format!("{name}: median {}, {most} within {}", ns(first), ns(last)))
    };
    drawn.iter().filter_map(of).collect::<Vec<_>>().join("; ")
}

/// Formats a percentile: `99.99 %`.
fn percent_of(fraction: f64) -> String {
    let text = format!("{:.2}", fraction * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}

fn latency_table(ways: &[(Axes, Vec<Percentile>)]) -> Markup {
    let longest = ways.iter().map(|(_, points)| points).max_by_key(|points| points.len());
    let heads = longest.map(Vec::as_slice).unwrap_or_default();
    let row = |(way, points): &(Axes, Vec<Percentile>)| {
        let at = |head: &Percentile| {
            let point = points.iter().find(|point| point.fraction == head.fraction);
            point.map_or_else(|| "–".to_owned(), |point| time(point.ns as f64 * 1e-9))
        };
        (label(way), heads.iter().map(at).collect())
    };
    let rows: Vec<_> = ways.iter().map(row).collect();
    let heads: Vec<String> = heads.iter().map(|head| percent_of(head.fraction)).collect();
    numbers(&heads, &rows, ways.len())
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
        .filter_map(|cell| Some((matrix.way(cell), (*cell, first_series(cell)?))))
        .filter(|(_, (_, series))| series.seconds.len() > 2)
        .collect();
    let metric = metric(&found.first()?.1.1.metric)?;
    let same: Vec<(Axes, (&Cell, &Series))> =
        found.iter().filter(|(_, (_, series))| series.metric == metric.key).cloned().collect();
    let shown = colors.drawn(&same, SHOWN);
    let (_, first, (cell, _)) = shown.first()?;
    let window = steadiness(cell).into_iter().next();
    let lines = shown.iter().map(|(color, name, (_, series))| {
        let points = series.seconds.iter().copied().zip(series.values.iter().copied());
        Line { color: *color, name: name.clone(), points: points.collect() }
    });
    let chart = Chart {
        id: format!("time-{number}"),
        title: format!("{} over time, {name}", title(metric.title)),
        description: window.as_ref().map_or_else(String::new, |window| {
            let (from, to) = (digits(window.from_seconds), digits(window.to_seconds));
            format!("{first} is {} from {from} to {to} seconds", state(window))
        }),
        lines: lines.collect(),
        x: Axis {
            name: "seconds since the load began",
            range: Range::Linear(0.0, 1.0),
            ticks: &[],
            text: &seconds,
        },
        y: Axis {
            name: metric.title,
            range: Range::Linear(0.0, 1.1),
            ticks: &[],
            text: &|number| if number == 0.0 { "0".to_owned() } else { value(metric, number) },
        },
        marks: Vec::new(),
        window,
    };
    Some(html! {
        (chart.html())
        (steady_table(matrix, &found.iter().map(|(_, (cell, _))| *cell).collect::<Vec<_>>()))
    })
}

/// Formats seconds without trailing zeros: `0.2`.
fn seconds(number: f64) -> String {
    let text = digits(number);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

fn steady_table(matrix: &Matrix<'_>, cells: &[&Cell]) -> Markup {
    let row = |cell: &&Cell| {
        let all = steadiness(cell);
        let first = all.first()?;
        let even = all.iter().filter(|sample| sample.reached).count();
        let numbers = vec![
            format!("{even} of {}", all.len()),
            value_of(&first.metric, first.mean),
            percent(first.excursion),
            percent(first.slope),
        ];
        Some((label(&matrix.way(cell)), numbers))
    };
    let rows: Vec<_> = cells.iter().filter_map(row).collect();
    let heads = ["Even samples", "Mean in the window", "Range / mean", "Slope / mean"];
    html! { @if !rows.is_empty() { (numbers(&heads.map(str::to_owned), &rows, 0)) } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_found_in_names() {
        assert_eq!(without_depth("rnd4k-q32-write"), Some((32, "rnd4k-write".to_owned())));
        assert_eq!(without_depth("SEQ1M_Q8"), Some((8, "SEQ1M".to_owned())));
        assert_eq!(without_depth("qcow2-8k"), None);
        assert_eq!([0.5, 0.999, 0.9999].map(percent_of), ["50 %", "99.9 %", "99.99 %"]);
        assert_eq!(percent_of(1.0 - 10f64.powf(-nines(0.9999))), "99.99 %");
    }

    #[test]
    fn ticks_have_no_noughts_at_the_end() {
        let all = [0.0, 0.1, 0.30000000000000004, 1.0, 1.5, 12.5, 100.0];
        assert_eq!(all.map(seconds), ["0", "0.1", "0.3", "1", "1.5", "12.5", "100"]);
    }
}
