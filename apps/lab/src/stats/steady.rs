//! SNIA's rule for a steady state.
//!
//! Source: SNIA, *Solid State Storage (SSS) Performance Test Specification* 2.0.2, definition
//! "Steady State": over a measurement window of five rounds, the largest value less the smallest is
//! within 20 % of the average, and the slope of the best linear fit, over the window, within 10 % of it.
//!
//! The specification's rounds last a minute. Ours are parts of one load: a series of a load is cut into
//! [`ROUNDS`] equal parts (or as many as it has values), so that a window is a half of the load. That
//! is weaker than SNIA's own procedure, which preconditions a device for hours; the report says how
//! long the window was.

use crate::model::{Series, Steady};

/// Rounds of a window.
pub const WINDOW: usize = 5;
/// Parts that a load is cut into.
const ROUNDS: usize = 10;
/// Largest excursion of a window, as a fraction of its average.
pub const EXCURSION_MAX: f64 = 0.2;
/// Largest rise or fall of the line through a window, as a fraction of its average.
pub const SLOPE_MAX: f64 = 0.1;

/// Judges a load by its first series.
pub fn steady(series: &[Series]) -> Option<Steady> {
    let first = series.first()?;
    judge(&first.metric, &first.seconds, &first.values)
}

/// Judges a series: `seconds` are ends of intervals since the load began, `values` the means in them.
/// The first window that is steady; where none is, the last one. Nothing of less than five values.
pub fn judge(metric: &str, seconds: &[f64], values: &[f64]) -> Option<Steady> {
    let count = seconds.len().min(values.len());
    if count < WINDOW || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let rounds = count.min(ROUNDS);
    // Equal parts; where that does not come out even, the first values are left out: they are the
    // least steady.
    let per = count / rounds;
    let first = count - per * rounds;
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let means: Vec<f64> = values[first..count].chunks_exact(per).map(mean).collect();
    let begin = |round: usize| match first + round * per {
        0 => 0.0,
        at => seconds[at - 1],
    };
    let windows = (0..=rounds - WINDOW).map(|at| {
        let mut steady = window_of(&means[at..at + WINDOW]);
        steady.metric = metric.to_owned();
        steady.from_seconds = begin(at);
        steady.to_seconds = seconds[first + (at + WINDOW) * per - 1];
        steady
    });
    let mut last = None;
    for window in windows {
        let reached = window.reached;
        last = Some(window);
        if reached {
            break;
        }
    }
    last
}

/// Holds a window's rounds against the rule; times and metric are left to the caller.
pub fn window_of(rounds: &[f64]) -> Steady {
    let n = rounds.len().max(1) as f64;
    let mean = rounds.iter().sum::<f64>() / n;
    let largest = rounds.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = rounds.iter().copied().fold(f64::INFINITY, f64::min);
    let centre = (n - 1.0) / 2.0;
    let (mut product, mut square) = (0.0, 0.0);
    for (i, value) in rounds.iter().enumerate() {
        let x = i as f64 - centre;
        product += x * (value - mean);
        square += x * x;
    }
    // From the first round to the last one.
    let rise = if square > 0.0 { product / square * (n - 1.0) } else { 0.0 };
    let excursion = (largest - smallest) / mean.abs();
    let slope = rise / mean.abs();
    // (Nothing happened at all: that is no state to speak of.)
    let reached = mean > 0.0 && excursion <= EXCURSION_MAX && slope.abs() <= SLOPE_MAX;
    let finite = |number: f64| if number.is_finite() { number } else { f64::MAX };
    Steady {
        reached,
        mean,
        excursion: finite(excursion),
        slope: finite(slope),
        ..Steady::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_rules_have_to_hold() {
        assert!(window_of(&[100.0; 5]).reached);
        // 20 % from the smallest to the largest, level.
        let level = window_of(&[90.0, 110.0, 100.0, 110.0, 90.0]);
        assert!(level.reached && (level.excursion - 0.2).abs() < 1e-12 && level.slope == 0.0);
        assert!(!window_of(&[89.0, 110.0, 101.0, 110.0, 90.0]).reached);
        // Within 20 %, but always rising: by 16 %.
        let rising = window_of(&[92.0, 96.0, 100.0, 104.0, 108.0]);
        assert!(!rising.reached && rising.excursion < 0.2);
        assert!((rising.slope - 0.16).abs() < 1e-12);
        assert!(!window_of(&[0.0; 5]).reached);
        assert!(!window_of(&[]).reached);
    }

    #[test]
    fn the_first_steady_window_of_a_load() {
        let seconds: Vec<f64> = (1..=20).map(f64::from).collect();
        // Fast for six seconds, then as a full device goes.
        let values: Vec<f64> = (0..20).map(|i| if i < 6 { 900.0 } else { 300.0 }).collect();
        let steady = judge("iops", &seconds, &values).unwrap();
        assert!(steady.reached);
        assert_eq!((steady.from_seconds, steady.to_seconds), (6.0, 16.0));
        assert_eq!((steady.mean, steady.metric.as_str()), (300.0, "iops"));
        // Never steady: the last window is told.
        let values: Vec<f64> = (0..20).map(|i| 100.0 * 1.2f64.powi(i)).collect();
        let steady = judge("iops", &seconds, &values).unwrap();
        assert!(!steady.reached);
        assert_eq!((steady.from_seconds, steady.to_seconds), (10.0, 20.0));
    }

    #[test]
    fn few_values_and_odd_counts() {
        assert_eq!(judge("iops", &[1.0; 4], &[1.0; 4]), None);
        assert_eq!(judge("iops", &[1.0; 9], &[f64::NAN; 9]), None);
        let steady = judge("iops", &[1.0, 2.0, 3.0, 4.0, 5.0], &[5.0; 5]).unwrap();
        assert_eq!((steady.from_seconds, steady.to_seconds), (0.0, 5.0));
        // 23 values are ten rounds of two, less the first three values.
        let seconds: Vec<f64> = (1..=23).map(f64::from).collect();
        let mut values = vec![7.0; 23];
        values[0] = 1e6;
        let steady = judge("iops", &seconds, &values).unwrap();
        assert_eq!((steady.reached, steady.from_seconds, steady.to_seconds), (true, 3.0, 13.0));
    }
}
