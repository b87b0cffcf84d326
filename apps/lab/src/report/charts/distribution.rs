//! Chart of latencies, from the median to one request in ten thousand.

use maud::{Markup, html};

use crate::stats::Percentile;
use crate::words::time;

use super::{Axis, Caption, Frame, Line, Scale, axes, end_labels, figure, paths};

/// Draws the chart. The horizontal axis has one step per nine: 0.9, 0.99, 0.999.
pub(in crate::report) fn distribution(caption: &Caption, lines: &[Line<Percentile>]) -> Markup {
    figure(caption, lines, |frame| draw(frame, lines))
}

/// Maps 0.9 to 1 and 0.99 to 2.
fn nines(fraction: f64) -> f64 {
    -(1.0 - fraction).max(1e-9).log10()
}

fn draw(frame: &Frame, lines: &[Line<Percentile>]) -> Markup {
    let all = || lines.iter().flat_map(|line| &line.points);
    let seconds = |ns: u64| ns as f64 * 1e-9;
    let slowest = all().map(|point| seconds(point.ns)).fold(0.0, f64::max);
    let fastest = all().map(|point| seconds(point.ns)).fold(f64::INFINITY, f64::min);
    let most = all().map(|point| nines(point.fraction)).fold(0.5, f64::max);
    let scale = Scale::linear(nines(0.5), most, frame.x0(), frame.x1());
    let named =
        [(0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %")];
    let ticks = named.into_iter().filter(|(fraction, _)| nines(*fraction) <= most + 1e-6);
    let x = Axis {
        scale,
        ticks: ticks.map(|(fraction, text)| (nines(fraction), text.to_owned())).collect(),
        name: "requests that took at most this long".to_owned(),
    };
    let y = Axis::new(
        Scale::log(fastest * 0.8, slowest * 1.25, frame.y0(), frame.y1()),
        6,
        "latency",
        time,
    );
    let place =
        |point: &Percentile| (x.scale.at(nines(point.fraction)), y.scale.at(seconds(point.ns)));
    html! {
        (axes(frame, &x, &y))
        (paths(lines, place))
        (end_labels(frame, lines, place))
    }
}
