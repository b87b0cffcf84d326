//! Chart of a load over time, with the window that was tested by SNIA's rule.

use maud::{Markup, html};

use crate::model::{Metric, Steady};
use crate::words::{digits, value};

use super::{Axis, Caption, EndLabel, Frame, Scale, axes, end_labels, figure, n, path};

/// Loads over the same time.
#[derive(Clone, Debug)]
pub(in crate::report) struct Timeline<'a> {
    pub(in crate::report) metric: &'a Metric,
    /// Color, name, ends of the intervals in seconds, values.
    pub(in crate::report) lines: Vec<(usize, String, &'a [f64], &'a [f64])>,
    /// The window of the first line.
    pub(in crate::report) window: Option<Steady>,
}

/// Draws the chart.
pub(in crate::report) fn timeline(caption: &Caption, timeline: &Timeline<'_>) -> Markup {
    let names = timeline.lines.iter().map(|(color, name, ..)| (*color, name.clone()));
    let names: Vec<(usize, String)> = names.collect();
    figure(caption, &names, |frame| draw(frame, timeline))
}

fn draw(frame: &Frame, timeline: &Timeline<'_>) -> Markup {
    let last = timeline.lines.iter().filter_map(|(.., seconds, _)| seconds.last().copied());
    let last = last.fold(0.0, f64::max);
    let values = timeline.lines.iter().flat_map(|(.., values)| values.iter().copied());
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
    let places = |seconds: &[f64], values: &[f64]| -> Vec<(f64, f64)> {
        let both = seconds.iter().zip(values);
        both.map(|(second, value)| (x.scale.at(*second), y.scale.at(*value))).collect()
    };
    let labels = timeline.lines.iter().filter_map(|(color, name, seconds, values)| {
        let (_, y) = *places(seconds, values).last()?;
        Some(EndLabel { color: *color, text: name.clone(), y })
    });
    let labels = labels.collect();
    html! {
        @if let Some(window) = &timeline.window {
            @let from = x.scale.at(window.from_seconds);
            @let to = x.scale.at(window.to_seconds);
            rect class=(if window.reached { "window" } else { "window unsteady" })
                x=(n(from)) y=(n(frame.y1())) width=(n((to - from).max(0.0)))
                height=(n(frame.y0() - frame.y1())) {}
        }
        (axes(frame, &x, &y))
        @for (color, _, seconds, values) in &timeline.lines {
            path class=(format!("line s{color}")) d=(path(&places(seconds, values))) {}
        }
        @if let Some(window) = &timeline.window {
            @let middle = (x.scale.at(window.from_seconds) + x.scale.at(window.to_seconds)) / 2.0;
            text class="note" x=(n(middle)) y=(n(frame.y0() - 8.0)) text-anchor="middle" {
                (state(window))
            }
        }
        (end_labels(frame, labels))
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
