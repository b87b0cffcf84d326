//! Chart of a load over time, with the window that was tested by SNIA's rule.

use maud::{Markup, html};

use crate::model::{Metric, Steady};
use crate::words::{digits, value};

use super::{Axis, Caption, Frame, Line, Scale, axes, end_labels, figure, n, paths};

/// Loads over the same time.
#[derive(Clone, Debug)]
pub(in crate::report) struct Timeline<'a> {
    pub(in crate::report) metric: &'a Metric,
    /// A point is the end of an interval in seconds, and the value.
    pub(in crate::report) lines: Vec<Line<(f64, f64)>>,
    /// The window of the first line.
    pub(in crate::report) window: Option<Steady>,
}

/// Draws the chart.
pub(in crate::report) fn timeline(caption: &Caption, timeline: &Timeline<'_>) -> Markup {
    figure(caption, &timeline.lines, |frame| draw(frame, timeline))
}

fn draw(frame: &Frame, timeline: &Timeline<'_>) -> Markup {
    let all = || timeline.lines.iter().flat_map(|line| &line.points);
    let last = all().map(|(second, _)| *second).fold(0.0, f64::max);
    let values = all().map(|(_, value)| *value);
    let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max);
    let x = Axis::new(
        Scale::linear(0.0, last, frame.x0(), frame.x1()),
        if frame.wide { 8 } else { 4 },
        "seconds since the load began",
        seconds,
    );
    let y = Axis::new(
        Scale::linear(0.0, most * 1.1, frame.y0(), frame.y1()),
        4,
        timeline.metric.title,
        |number| if number == 0.0 { "0".to_owned() } else { value(timeline.metric, number) },
    );
    let place = |(second, value): &(f64, f64)| (x.scale.at(*second), y.scale.at(*value));
    html! {
        @if let Some(window) = &timeline.window {
            @let from = x.scale.at(window.from_seconds);
            @let to = x.scale.at(window.to_seconds);
            rect class=(if window.reached { "window" } else { "window unsteady" })
                x=(n(from)) y=(n(frame.y1())) width=(n((to - from).max(0.0)))
                height=(n(frame.y0() - frame.y1())) {}
        }
        (axes(frame, &x, &y))
        (paths(&timeline.lines, place))
        @if let Some(window) = &timeline.window {
            @let middle = (x.scale.at(window.from_seconds) + x.scale.at(window.to_seconds)) / 2.0;
            text class="note" x=(n(middle)) y=(n(frame.y0() - 8.0)) text-anchor="middle" {
                (state(window))
            }
        }
        (end_labels(frame, &timeline.lines, place))
    }
}

/// The label of a window. Uses SNIA's term only if the window is as long as SNIA's.
pub(in crate::report) fn state(window: &Steady) -> &'static str {
    match (window.reached, window.is_long_enough()) {
        (true, true) => "steady",
        (false, true) => "not steady",
        (true, false) => "even",
        (false, false) => "uneven",
    }
}

/// Formats seconds without trailing zeros: `0.2`.
fn seconds(number: f64) -> String {
    let text = digits(number);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_load_is_not_called_steady() {
        let window =
            |to_seconds, reached| state(&Steady { reached, to_seconds, ..Steady::default() });
        assert_eq!([window(30.0, true), window(30.0, false)], ["even", "uneven"]);
        assert_eq!([window(300.0, true), window(300.0, false)], ["steady", "not steady"]);
    }

    #[test]
    fn ticks_have_no_noughts_at_the_end() {
        let all = [0.0, 0.1, 0.30000000000000004, 1.0, 1.5, 12.5, 100.0];
        assert_eq!(all.map(seconds), ["0", "0.1", "0.3", "1", "1.5", "12.5", "100"]);
    }
}
