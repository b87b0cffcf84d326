//! Chart of requests per second against latency: one line per way to store the disk, one point per
//! queue depth.

use maud::{Markup, html};

use crate::words::{counted, time};

use super::{Axis, Caption, EndLabel, Frame, LINES_MAX, Scale, axes, end_labels, figure, n, path};

/// The result at one queue depth.
#[derive(Clone, Debug)]
pub(in crate::report) struct Point {
    pub(in crate::report) depth: u32,
    /// Requests per second.
    pub(in crate::report) iops: f64,
    /// Latency in seconds.
    pub(in crate::report) latency: f64,
}

/// A line.
#[derive(Clone, Debug)]
pub(in crate::report) struct Curve {
    /// The number of its color.
    pub(in crate::report) color: usize,
    pub(in crate::report) name: String,
    /// By queue depth.
    pub(in crate::report) points: Vec<Point>,
}

/// Draws the first [`LINES_MAX`] curves.
pub(in crate::report) fn curves(caption: &Caption, curves: &[Curve]) -> Markup {
    let shown = &curves[..curves.len().min(LINES_MAX)];
    let name = |curve: &Curve| (curve.color, curve.name.clone());
    let names: Vec<(usize, String)> = shown.iter().map(name).collect();
    figure(caption, &names, |frame| draw(frame, shown))
}

fn draw(frame: &Frame, curves: &[Curve]) -> Markup {
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
    let labels = curves.iter().filter_map(|curve| {
        let last = curve.points.last()?;
        Some(EndLabel { color: curve.color, text: curve.name.clone(), y: place(last).1 })
    });
    let labels = labels.collect();
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
        (end_labels(frame, labels))
    }
}
