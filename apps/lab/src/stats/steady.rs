//! SNIA's rule for a steady state.
//!
//! Source: SNIA, *Solid State Storage (SSS) Performance Test Specification* 2.0.2, definition
//! "Steady State": over a measurement window of five rounds, the largest minus the smallest value
//! is within 20 % of the average, and the slope of the best linear fit over the window is within 10
//! % of the average.
//!
//! The specification's rounds last a minute. Rounds here are parts of one load: the load's time
//! series is divided into [`ROUNDS`] equal parts (or as many as it has values), so that a window is
//! half of the load. This is weaker than SNIA's procedure, which preconditions a device for hours.
//! The report gives the length of the window.

use crate::model::{Series, Steady};

/// Rounds of a window.
pub const WINDOW: usize = 5;
/// Number of parts into which a load is divided.
const ROUNDS: usize = 10;
/// Largest excursion of a window, as a fraction of its average.
pub const EXCURSION_MAX: f64 = 0.2;
/// Largest rise or fall of the fitted line over a window, as a fraction of its average.
pub const SLOPE_MAX: f64 = 0.1;

/// Tests a load by its first series.
pub fn steady(series: &[Series]) -> Option<Steady> {
    let first = series.first()?;
    steady_window(&first.metric, &first.seconds, &first.values)
}

/// Tests a time series: `seconds` are the ends of intervals since the start of the load, `values`
/// their means. Returns the first steady window, or the last window if none is steady. None for
/// fewer than five values.
pub fn steady_window(metric: &str, seconds: &[f64], values: &[f64]) -> Option<Steady> {
    let count = seconds.len().min(values.len());
    if count < WINDOW || values.iter().any(|value| !value.is_finite()) {
        return None;
    }
    let rounds = count.min(ROUNDS);
    // If the values do not divide evenly, leave out the first ones, which are the least steady.
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

/// Applies the rule to a window's rounds. The caller sets times and metric.
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
    // Without any activity there is no steady state.
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
        // 20 % from the smallest to the largest value, without a trend.
        let level = window_of(&[90.0, 110.0, 100.0, 110.0, 90.0]);
        assert!(level.reached && (level.excursion - 0.2).abs() < 1e-12 && level.slope == 0.0);
        assert!(!window_of(&[89.0, 110.0, 101.0, 110.0, 90.0]).reached);
        // Within 20 %, but rising throughout, by 16 %.
        let rising = window_of(&[92.0, 96.0, 100.0, 104.0, 108.0]);
        assert!(!rising.reached && rising.excursion < 0.2);
        assert!((rising.slope - 0.16).abs() < 1e-12);
        assert!(!window_of(&[0.0; 5]).reached);
        assert!(!window_of(&[]).reached);
    }

    #[test]
    fn the_first_steady_window_of_a_load() {
        let seconds: Vec<f64> = (1..=20).map(f64::from).collect();
        // Fast for six seconds, then at the speed of a full device.
        let values: Vec<f64> = (0..20).map(|i| if i < 6 { 900.0 } else { 300.0 }).collect();
        let steady = steady_window("iops", &seconds, &values).unwrap();
        assert!(steady.reached);
        assert_eq!((steady.from_seconds, steady.to_seconds), (6.0, 16.0));
        assert_eq!((steady.mean, steady.metric.as_str()), (300.0, "iops"));
        // Never steady: the last window is returned.
        let values: Vec<f64> = (0..20).map(|i| 100.0 * 1.2f64.powi(i)).collect();
        let steady = steady_window("iops", &seconds, &values).unwrap();
        assert!(!steady.reached);
        assert_eq!((steady.from_seconds, steady.to_seconds), (10.0, 20.0));
    }

    #[test]
    fn few_values_and_odd_counts() {
        assert_eq!(steady_window("iops", &[1.0; 4], &[1.0; 4]), None);
        assert_eq!(steady_window("iops", &[1.0; 9], &[f64::NAN; 9]), None);
        let steady = steady_window("iops", &[1.0, 2.0, 3.0, 4.0, 5.0], &[5.0; 5]).unwrap();
        assert_eq!((steady.from_seconds, steady.to_seconds), (0.0, 5.0));
        // 23 values make ten rounds of two values each, without the first three values.
        let seconds: Vec<f64> = (1..=23).map(f64::from).collect();
        let mut values = vec![7.0; 23];
        values[0] = 1e6;
        let steady = steady_window("iops", &seconds, &values).unwrap();
        assert_eq!((steady.reached, steady.from_seconds, steady.to_seconds), (true, 3.0, 13.0));
    }
}
