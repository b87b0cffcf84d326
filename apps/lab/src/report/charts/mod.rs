//! Charts as inline SVG. Each chart is drawn for a wide page and for a phone, has a title and a
//! description for screen readers, and is next to a table with its numbers.

mod axis;
mod bars;
mod curve;
mod distribution;
mod series;

use maud::{Markup, html};

pub(super) use axis::{Axis, Scale};
pub(super) use bars::{Bar, bar};
pub(super) use curve::{Point, curves};
pub(super) use distribution::distribution;
pub(super) use series::{Timeline, state, timeline};

/// Largest number of lines in one chart that color, dash and label can distinguish.
pub(super) const LINES_MAX: usize = 5;

/// Sizes of a drawing and its margins in CSS pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
    /// Whether lines have labels at their ends. Otherwise the chart has a legend.
    pub(super) wide: bool,
}

impl Frame {
    /// For pages wide enough for labels next to the lines.
    pub(super) const WIDE: Self = Self {
        width: 760.0,
        height: 345.0,
        left: 84.0,
        right: 200.0,
        top: 30.0,
        bottom: 46.0,
        wide: true,
    };
    /// For phones.
    pub(super) const NARROW: Self = Self {
        width: 340.0,
        height: 290.0,
        left: 78.0,
        right: 28.0,
        top: 30.0,
        bottom: 46.0,
        wide: false,
    };

    fn x0(&self) -> f64 {
        self.left
    }

    fn x1(&self) -> f64 {
        self.width - self.right
    }

    fn y0(&self) -> f64 {
        self.height - self.bottom
    }

    fn y1(&self) -> f64 {
        self.top
    }
}

/// The texts of a chart for readers who do not see it.
#[derive(Clone, Debug)]
pub(super) struct Caption {
    /// Unique on the page.
    pub(super) id: String,
    /// What the chart shows.
    pub(super) title: String,
    /// What can be seen in the chart.
    pub(super) description: String,
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub(super) struct Line<P> {
    /// The number of its color.
    pub(super) color: usize,
    pub(super) name: String,
    /// In the order of the horizontal axis.
    pub(super) points: Vec<P>,
}

/// Builds a chart in both sizes, with a legend of its lines for the small one.
pub(super) fn figure<P>(
    caption: &Caption,
    lines: &[Line<P>],
    draw: impl Fn(&Frame) -> Markup,
) -> Markup {
    html! {
        @for frame in [Frame::WIDE, Frame::NARROW] {
            @let side = if frame.wide { "wide" } else { "narrow" };
            @let (title, text) = (format!("{}-{side}-t", caption.id), format!("{}-{side}-d", caption.id));
            svg class={"chart " (side)} viewBox=(format!("0 0 {} {}", frame.width, frame.height))
                role="img" aria-labelledby=(format!("{title} {text}")) {
                title id=(title) { (caption.title) }
                desc id=(text) { (caption.description) }
                (draw(&frame))
            }
        }
        @if lines.len() > 1 {
            ul class="legend" aria-hidden="true" {
                @for Line { color, name, .. } in lines {
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

/// Draws the axes with their ticks and names, below the marks.
pub(super) fn axes(frame: &Frame, x: &Axis, y: &Axis) -> Markup {
    let (x0, x1, y0) = (frame.x0(), frame.x1(), frame.y0());
    html! {
        g class="grid" {
            @for (value, text) in &y.ticks {
                @let at = y.scale.at(*value);
                line x1=(n(x0)) x2=(n(x1)) y1=(n(at)) y2=(n(at)) {}
                text x=(n(x0 - 8.0)) y=(n(at + 4.0)) text-anchor="end" { (text) }
            }
            @for (value, text) in &x.ticks {
                @let at = x.scale.at(*value);
                line class="tick" x1=(n(at)) x2=(n(at)) y1=(n(y0)) y2=(n(y0 + 5.0)) {}
                text x=(n(at)) y=(n(y0 + 19.0)) text-anchor="middle" { (text) }
            }
            line class="base" x1=(n(x0)) x2=(n(x1)) y1=(n(y0)) y2=(n(y0)) {}
            text class="name" x=(n((x0 + x1) / 2.0)) y=(n(frame.height - 6.0)) text-anchor="middle" {
                (x.name)
            }
            // Horizontal and above the axis, which is easier to read than a rotated name.
            text class="name" x="0" y="13" { (y.name) }
        }
    }
}

/// Draws lines through the places of their points.
pub(super) fn paths<P>(lines: &[Line<P>], place: impl Fn(&P) -> (f64, f64)) -> Markup {
    html! {
        @for line in lines {
            @let places: Vec<(f64, f64)> = line.points.iter().map(&place).collect();
            path class=(format!("line s{}", line.color)) d=(path(&places)) {}
        }
    }
}

/// Draws the names of lines at their ends, moved apart so that none overlaps another.
pub(super) fn end_labels<P>(
    frame: &Frame,
    lines: &[Line<P>],
    place: impl Fn(&P) -> (f64, f64),
) -> Markup {
    const APART: f64 = 17.0;
    let ends = lines.iter().filter_map(|line| Some((place(line.points.last()?).1, line)));
    let mut labels: Vec<(f64, &Line<P>)> = ends.collect();
    if !frame.wide || labels.len() < 2 {
        return html! {};
    }
    labels.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut least = frame.y1() + 6.0;
    for (y, _) in &mut labels {
        *y = least.max(*y);
        least = *y + APART;
    }
    let mut most = frame.y0();
    for (y, _) in labels.iter_mut().rev() {
        *y = most.min(*y);
        most = *y - APART;
    }
    html! {
        @for (y, line) in &labels {
            text class=(format!("label t{}", line.color)) x=(n(frame.x1() + 10.0)) y=(n(y + 4.0)) {
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
pub(super) fn n(number: f64) -> String {
    if !number.is_finite() {
        return "0".to_owned();
    }
    let tenths = (number * 10.0).round() / 10.0;
    // Print -0 as 0.
    format!("{}", if tenths == 0.0 { 0.0 } else { tenths })
}

/// Path data of a line through points.
pub(super) fn path(points: &[(f64, f64)]) -> String {
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
        let line = |(color, y)| Line { color, name: format!("l{color}"), points: vec![y] };
        let lines = [(0, 100.0), (1, 101.0), (2, 283.0), (3, 284.0)].map(line);
        let drawn = end_labels(&Frame::WIDE, &lines, |y: &f64| (0.0, *y)).into_string();
        let ys: Vec<f64> = drawn
            .split(" y=\"")
            .skip(1)
            .map(|part| part.split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(ys.len(), 4);
        assert!(ys.windows(2).all(|pair| pair[1] - pair[0] >= 16.9), "{ys:?}");
        assert!(*ys.last().unwrap() <= Frame::WIDE.height - Frame::WIDE.bottom + 5.0);
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
