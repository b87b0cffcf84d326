//! Charts as inline SVG. Each chart is drawn for a wide page and for a phone, has a title and a
//! description for screen readers, and is next to a table with its numbers.

mod axis;
mod bars;

use maud::{Markup, html};

use axis::Scale;
pub(super) use axis::{Axis, Range};
pub(super) use bars::{Bar, bar};

use crate::model::Steady;

/// Largest number of lines in one chart that color, dash and label can distinguish.
pub(super) const LINES_MAX: usize = 5;

/// Sizes of a drawing and ends of its axes in CSS pixels.
#[derive(Clone, Copy, Debug)]
struct Frame {
    width: f64,
    height: f64,
    x0: f64,
    x1: f64,
    y0: f64,
    y1: f64,
    /// Whether lines have labels at their ends. Otherwise the chart has a legend.
    wide: bool,
}

/// For pages wide enough for labels next to the lines.
const WIDE: Frame =
    Frame { width: 760.0, height: 345.0, x0: 84.0, x1: 560.0, y0: 299.0, y1: 30.0, wide: true };
/// For phones.
const NARROW: Frame =
    Frame { width: 340.0, height: 290.0, x0: 78.0, x1: 312.0, y0: 244.0, y1: 30.0, wide: false };

#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) color: usize,
    pub(super) name: String,
    /// In the order of the horizontal axis.
    pub(super) points: Vec<(f64, f64)>,
}

pub(super) struct Chart<'a> {
    /// Unique on the page.
    pub(super) id: String,
    /// What the chart shows.
    pub(super) title: String,
    /// What can be seen in the chart, for readers who do not see it.
    pub(super) description: String,
    pub(super) lines: Vec<Line>,
    pub(super) x: Axis<'a>,
    pub(super) y: Axis<'a>,
    /// Texts at the points of the first line. With them, all points have dots.
    pub(super) marks: Vec<String>,
    /// A window of time that is marked.
    pub(super) window: Option<Steady>,
}

impl Chart<'_> {
    /// Draws the chart in both sizes, with a legend of its lines for the small one.
    pub(super) fn html(&self) -> Markup {
        html! {
            @for frame in [WIDE, NARROW] {
                @let side = if frame.wide { "wide" } else { "narrow" };
                @let (title, text) = (format!("{}-{side}-t", self.id), format!("{}-{side}-d", self.id));
                svg class={"chart " (side)} viewBox=(format!("0 0 {} {}", frame.width, frame.height))
                    role="img" aria-labelledby=(format!("{title} {text}")) {
                    title id=(title) { (self.title) }
                    desc id=(text) { (self.description) }
                    (self.draw(&frame))
                }
            }
            @if self.lines.len() > 1 {
                ul class="legend" aria-hidden="true" {
                    @for Line { color, name, .. } in &self.lines {
                        li {
                            svg viewBox="0 0 28 10" class="swatch" {
                                line class=(format!("line s{color}")) x1="1" x2="27" y1="5" y2="5" {}
                            }
                            (name)
                        }
                    }
                }
            }
        }
    }

    fn draw(&self, frame: &Frame) -> Markup {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = self.x.scale(points().map(|(x, _)| *x), frame.x0, frame.x1);
        let y = self.y.scale(points().map(|(_, y)| *y), frame.y0, frame.y1);
        let place = |(a, b): &(f64, f64)| (x.at(*a), y.at(*b));
        html! {
            @if let Some(window) = &self.window {
                @let (from, to) = (x.at(window.from_seconds), x.at(window.to_seconds));
                rect class=(if window.reached { "window" } else { "window unsteady" })
                    x=(n(from)) y=(n(frame.y1)) width=(n((to - from).max(0.0)))
                    height=(n(frame.y0 - frame.y1)) {}
            }
            (self.axes(frame, &x, &y))
            @for (i, line) in self.lines.iter().enumerate() {
                @let places: Vec<(f64, f64)> = line.points.iter().map(place).collect();
                path class=(format!("line s{}", line.color)) d=(path(&places)) {}
                @if !self.marks.is_empty() {
                    @for (px, py) in &places {
                        circle class=(format!("dot f{}", line.color)) cx=(n(*px)) cy=(n(*py)) r="4" {}
                    }
                }
                @if i == 0 {
                    @for ((px, py), mark) in places.iter().zip(&self.marks) {
                        text class="note" x=(n(*px)) y=(n(py - 9.0)) text-anchor="middle" { (mark) }
                    }
                }
            }
            @if let Some(window) = &self.window {
                @let middle = (x.at(window.from_seconds) + x.at(window.to_seconds)) / 2.0;
                text class="note" x=(n(middle)) y=(n(frame.y0 - 8.0)) text-anchor="middle" {
                    (state(window))
                }
            }
            (end_labels(frame, &self.lines, place))
        }
    }

    /// Draws the axes with their ticks and names, below the marks.
    fn axes(&self, frame: &Frame, x: &Scale, y: &Scale) -> Markup {
        let Frame { x0, x1, y0, .. } = *frame;
        html! {
            g class="grid" {
                @for (value, text) in self.y.ticks(y, 5) {
                    @let at = y.at(value);
                    line x1=(n(x0)) x2=(n(x1)) y1=(n(at)) y2=(n(at)) {}
                    text x=(n(x0 - 8.0)) y=(n(at + 4.0)) text-anchor="end" { (text) }
                }
                @for (value, text) in self.x.ticks(x, if frame.wide { 6 } else { 3 }) {
                    @let at = x.at(value);
                    line class="tick" x1=(n(at)) x2=(n(at)) y1=(n(y0)) y2=(n(y0 + 5.0)) {}
                    text x=(n(at)) y=(n(y0 + 19.0)) text-anchor="middle" { (text) }
                }
                line class="base" x1=(n(x0)) x2=(n(x1)) y1=(n(y0)) y2=(n(y0)) {}
                text class="name" x=(n((x0 + x1) / 2.0)) y=(n(frame.height - 6.0)) text-anchor="middle" {
                    (self.x.name)
                }
                // Horizontal and above the axis, which is easier to read than a rotated name.
                text class="name" x="0" y="13" { (self.y.name) }
            }
        }
    }
}

/// The label of a window. Uses SNIA's term only if the window is as long as SNIA's.
pub(super) fn state(window: &Steady) -> &'static str {
    match (window.reached, window.is_long_enough()) {
        (true, true) => "steady",
        (false, true) => "not steady",
        (true, false) => "even",
        (false, false) => "uneven",
    }
}

/// Draws the names of lines at their ends, moved apart so that none overlaps another.
fn end_labels(frame: &Frame, lines: &[Line], place: impl Fn(&(f64, f64)) -> (f64, f64)) -> Markup {
    const APART: f64 = 17.0;
    let ends = lines.iter().filter_map(|line| Some((place(line.points.last()?).1, line)));
    let mut labels: Vec<(f64, &Line)> = ends.collect();
    if !frame.wide || labels.len() < 2 {
        return html! {};
    }
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least = frame.y1 + 6.0;
    for (y, _) in &mut labels {
        *y = least.max(*y);
        least = *y + APART;
    }
    let mut most = frame.y0;
    for (y, _) in labels.iter_mut().rev() {
        *y = most.min(*y);
        most = *y - APART;
    }
    html! {
        @for (y, line) in &labels {
            text class=(format!("label t{}", line.color)) x=(n(frame.x1 + 10.0)) y=(n(y + 4.0)) {
                (shortened(&line.name, 26))
            }
        }
    }
}

/// Truncates a text to a number of letters.
pub(super) fn shortened(text: &str, letters: usize) -> String {
    if text.chars().count() <= letters {
        return text.to_owned();
    }
    text.chars().take(letters - 1).chain(['…']).collect()
}

/// Formats a coordinate to a tenth of a pixel. Numbers that are not finite become 0.
fn n(number: f64) -> String {
    if !number.is_finite() {
        return "0".to_owned();
    }
    let tenths = (number * 10.0).round() / 10.0;
    // Print -0 as 0.
    format!("{}", if tenths == 0.0 { 0.0 } else { tenths })
}

/// Path data of a line through points.
fn path(points: &[(f64, f64)]) -> String {
    let mut path = String::new();
    for (i, (x, y)) in points.iter().enumerate() {
        path.push_str(&format!("{}{} {}", if i == 0 { "M" } else { "L" }, n(*x), n(*y)));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_do_not_cover_one_another() {
        let line = |(color, y)| Line { color, name: format!("l{color}"), points: vec![(0.0, y)] };
        let lines = [(0, 100.0), (1, 101.0), (2, 283.0), (3, 284.0)].map(line);
        let drawn = end_labels(&WIDE, &lines, |point| *point).into_string();
        let ys: Vec<f64> = drawn
            .split(" y=\"")
            .skip(1)
            .map(|part| part.split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(ys.len(), 4);
        assert!(ys.windows(2).all(|pair| pair[1] - pair[0] >= 16.9), "{ys:?}");
        assert!(*ys.last().unwrap() <= WIDE.y0 + 5.0);
    }

    #[test]
    fn a_short_load_is_not_called_steady() {
        let window =
            |to_seconds, reached| state(&Steady { reached, to_seconds, ..Steady::default() });
        assert_eq!([window(30.0, true), window(30.0, false)], ["even", "uneven"]);
        assert_eq!([window(300.0, true), window(300.0, false)], ["steady", "not steady"]);
    }

    #[test]
    fn coordinates_are_short_and_finite() {
        assert_eq!(
            (n(1.26), n(-0.01), n(f64::NAN), n(f64::INFINITY)),
            ("1.3".into(), "0".into(), "0".into(), "0".into())
        );
        assert_eq!(path(&[(0.0, 1.0), (2.5, 3.0)]), "M0 1L2.5 3");
        assert_eq!(shortened("abcdef", 4), "abc…");
    }
}
