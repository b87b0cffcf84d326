//! Chart of requests per second against latency: one line per way to store the disk, one point per
//! queue depth.

use maud::{Markup, html};

use crate::words::{counted, time};

use super::{Axis, Caption, Frame, Line, Scale, axes, end_labels, figure, n, path};

/// The result at one queue depth.
#[derive(Clone, Debug)]
pub(in crate::report) struct Point {
    pub(in crate::report) depth: u32,
    /// Requests per second.
    pub(in crate::report) iops: f64,
    /// Latency in seconds.
    pub(in crate::report) latency: f64,
}

/// Draws the chart.
pub(in crate::report) fn curves(caption: &Caption, curves: &[Line<Point>]) -> Markup {
    figure(caption, curves, |frame| draw(frame, curves))
}

fn draw(frame: &Frame, curves: &[Line<Point>]) -> Markup {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let most = all().map(|point| point.iops).fold(0.0, f64::max);
    let slowest = all().map(|point| point.latency).fold(0.0, f64::max);
    let fastest = all().map(|point| point.latency).fold(f64::INFINITY, f64::min);
    let x = Axis::new(
        Scale::linear(0.0, most * 1.08, frame.x0(), frame.x1()),
        if frame.wide { 6 } else { 3 },
        "requests per second (more is better)",
        counted,
    );
    let y = Axis::new(
        Scale::log(fastest * 0.8, slowest * 1.25, frame.y0(), frame.y1()),
        5,
        "median latency",
        time,
    );
    let place = |point: &Point| (x.scale.at(point.iops), y.scale.at(point.latency));
    html! {
        (axes(frame, &x, &y))
        @for (line, curve) in curves.iter().enumerate() {
            @let color = curve.color;
            @let places: Vec<(f64, f64)> = curve.points.iter().map(place).collect();
            path class=(format!("line s{color}")) d=(path(&places)) {}
            @for (point, (px, py)) in curve.points.iter().zip(&places) {
                circle class=(format!("dot f{color}")) cx=(n(*px)) cy=(n(*py)) r="4" {}
                @if line == 0 {
                    text class="note" x=(n(*px)) y=(n(py - 9.0)) text-anchor="middle" { "Q" (point.depth) }
                }
            }
        }
        (end_labels(frame, curves, place))
    }
}
