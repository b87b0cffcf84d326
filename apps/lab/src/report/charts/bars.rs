//! A bar with its interval, as wide as its table cell.

use maud::{Markup, html};

use super::n;

/// One bar. All numbers in the metric's unit.
#[derive(Clone, Debug)]
pub(in crate::report) struct Bar {
    pub(in crate::report) value: f64,
    pub(in crate::report) low: f64,
    pub(in crate::report) high: f64,
    /// The end of the scale, common to all bars of the table.
    pub(in crate::report) most: f64,
    /// `best`, `default`, `tie`, or empty.
    pub(in crate::report) kind: &'static str,
    /// The text for screen readers.
    pub(in crate::report) label: String,
}

/// Draws the bar from 0, and above it the interval as a line with end marks.
pub(in crate::report) fn bar(bar: &Bar) -> Markup {
    let most = if bar.most > 0.0 { bar.most } else { 1.0 };
    let at = |value: f64| (value / most * 100.0).clamp(0.0, 100.0);
    let (low, high) = (at(bar.low), at(bar.high));
    html! {
        svg class={"bar " (bar.kind)} viewBox="0 0 100 16" preserveAspectRatio="none" role="img"
            aria-label=(bar.label) {
            rect class="track" x="0" y="3" width="100" height="10" {}
            rect class="fill" x="0" y="3" width=(n(at(bar.value))) height="10" {}
            @if high > low {
                path class="halo" d=(whisker(low, high)) {}
                path class="whisker" d=(whisker(low, high)) {}
            }
        }
    }
}

fn whisker(low: f64, high: f64) -> String {
    let (low, high) = (n(low), n(high));
    format!("M{low} 8L{high} 8M{low} 5L{low} 11M{high} 5L{high} 11")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_stay_within_their_cell() {
        let drawn = |value, low, high, most| {
            bar(&Bar { value, low, high, most, kind: "best", label: "<x>".into() }).into_string()
        };
        let half = drawn(50.0, 40.0, 60.0, 100.0);
        assert!(half.contains("width=\"50\"") && half.contains("M40 8L60 8"), "{half}");
        assert!(half.contains("aria-label=\"&lt;x&gt;\""));
        assert!(drawn(500.0, 1.0, 900.0, 100.0).contains("L100 8"));
        assert!(!drawn(0.0, 0.0, 0.0, 0.0).contains("whisker"));
        assert!(drawn(f64::NAN, 1.0, 2.0, 3.0).contains("width=\"0\""));
    }
}
