//! Statistics of samples: pure functions on numbers.
//!
//! A cell has few samples (one per round, 3 to 30), from an unknown and often skewed distribution.
//! No function draws random numbers, so the same samples always give the same answer:
//!
//! | question | method | source |
//! |---|---|---|
//! | where is the middle | median | |
//! | how certain is that | order statistics around the median, exact for any distribution | Le Boudec, *Performance Evaluation of Computer and Communication Systems*, theorem 2.1 |
//! | how much does one round vary | variances of logarithms without the part that all cells of a round share, each moderated by those of the other cells | Smyth, *Linear models and empirical Bayes methods* (2004) |
//! | how many times as good as another | geometric mean of the ratios, round by round, with an interval from Student's distribution | |
//! | is that more than noise | the interval, for all comparisons of a verdict together | Bonferroni |
//! | does another run differ by more than time alone would explain | as above, with runs in place of rounds | `runs` |
//! | is a sample an outlier | modified z-score by the median of absolute deviations, above 3.5 | Iglewicz, Hoaglin, *How to Detect and Handle Outliers* (1993) |
//! | was it steady | five rounds, excursion ≤ 20 %, slope ≤ 10 % | SNIA, *Solid State Storage Performance Test Specification* 2.0.2 |
//!
//! A distribution-free method, such as a rank test, could decide nothing here. Three samples
//! against three are completely ordered by chance in one case of twenty, which does not suffice for
//! one comparison and far less for fifty. The assumptions about the distribution are tested
//! instead: with samples of heavy-tailed, bimodal and drifting distributions in the tests of
//! [`crate::verdict`], and with real runs by [`crate::calibrate`].

mod gain;
mod histogram;
mod noise;
mod runs;
mod special;
mod steady;

use serde::Serialize;

pub use gain::{Comparator, Decision, ERROR, Gain, MATTERS, NARROW, ROUNDS_MIN, Side};
pub use histogram::{FRACTIONS, Percentile, merged, percentiles};
pub use noise::{Noise, Rounds, Spread};
pub use runs::{RUNS_APART, Runs};
pub use steady::{EXCURSION_MAX, SLOPE_MAX, WINDOW, steady, steady_window, window_of};

/// The coverage that intervals aim at.
pub const COVERAGE: f64 = 0.95;

/// An interval that contains a number with some certainty.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability, from 0 to 1, that such an interval contains the true number. Less than
    /// [`COVERAGE`] if there are few samples.
    pub coverage: f64,
}

impl Interval {
    /// Whether a number is within the interval.
    pub fn holds(&self, number: f64) -> bool {
        self.low <= number && number <= self.high
    }
}

/// Summary of a cell's samples of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of samples.
    pub count: usize,
    /// The median.
    pub median: f64,
    /// Interval of the median.
    pub interval: Interval,
    /// Standard deviation divided by the mean; none for one sample.
    pub variation: Option<f64>,
    /// Indices of outliers, in the order given.
    pub outliers: Vec<usize>,
}

/// Summarizes samples. None without samples, or if a sample is not finite.
pub fn summary(samples: &[f64]) -> Option<Summary> {
    let sorted = sorted(samples)?;
    Some(Summary {
        count: sorted.len(),
        median: middle(&sorted),
        interval: median_interval(&sorted),
        variation: variation(samples),
        outliers: outliers(samples),
    })
}

/// Sorts the samples. None without samples, or if a sample is not finite.
fn sorted(samples: &[f64]) -> Option<Vec<f64>> {
    if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// The median of sorted numbers: the mean of the two middle ones if their count is even.
fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}

/// The median. None without samples, or if a sample is not finite.
pub fn median(samples: &[f64]) -> Option<f64> {
    sorted(samples).map(|sorted| middle(&sorted))
}

/// The narrowest interval between two order statistics, equally far from both ends, that contains
/// the distribution's median with [`COVERAGE`]. The whole range if there are too few samples.
///
/// The median is below the `j`-th of `n` samples (and equally often above the `j`-th from the end)
/// with the probability that a coin shows heads fewer than `j` times in `n` throws.
fn median_interval(sorted: &[f64]) -> Interval {
    let n = sorted.len();
    let mut outside = 0.0;
    // Logarithm of the probability of exactly i heads, because 2^-n may underflow.
    let mut chance = -(n as f64) * std::f64::consts::LN_2;
    let mut skip = 0;
    for i in 0..n / 2 {
        let next = outside + chance.exp();
        if i > 0 && 1.0 - 2.0 * next < COVERAGE {
            break;
        }
        (outside, skip) = (next, i);
        chance += ((n - i) as f64 / (i + 1) as f64).ln();
    }
    // One sample says nothing about its own error.
    let coverage = if n == 1 { 0.0 } else { 1.0 - 2.0 * outside };
    Interval { low: sorted[skip], high: sorted[n - 1 - skip], coverage }
}

/// Standard deviation (of a sample, divided by n − 1) divided by the mean. None for fewer than two
/// samples, or if the mean is 0.
pub fn variation(samples: &[f64]) -> Option<f64> {
    if samples.len() < 2 {
        return None;
    }
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n;
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    let variation = (squares / (n - 1.0)).sqrt() / mean.abs();
    variation.is_finite().then_some(variation)
}

/// Modified z-score above which a sample is an outlier.
const OUTLIER_SCORE: f64 = 3.5;
/// A sample this near to the median (as a fraction of it) is never an outlier, because clocks and
/// schedulers alone cause such differences.
const NEAR: f64 = 0.02;

/// Indices of outliers. None for fewer than three samples.
///
/// If more than half of the samples are equal, the median of the deviations is 0. The mean
/// deviation then replaces it, as Iglewicz and Hoaglin advise.
pub fn outliers(samples: &[f64]) -> Vec<usize> {
    let Some(centre) = median(samples).filter(|_| samples.len() >= 3) else { return Vec::new() };
    let deviations: Vec<f64> = samples.iter().map(|sample| (sample - centre).abs()).collect();
    let typical = median(&deviations).unwrap_or(0.0);
    let mean = deviations.iter().sum::<f64>() / deviations.len() as f64;
    // For a normal distribution, the median deviation is 0.6745 and the mean deviation 0.7979 of
    // the standard deviation.
    let unit = if typical > 0.0 { typical / 0.6745 } else { mean / 0.7979 };
    let far = |deviation: f64| {
        deviation > OUTLIER_SCORE * unit && deviation > NEAR * centre.abs() && unit > 0.0
    };
    (0..samples.len()).filter(|i| far(deviations[*i])).collect()
}

/// The geometric mean. None without numbers, or if a number is not above 0.
pub fn geometric_mean(numbers: &[f64]) -> Option<f64> {
    if numbers.is_empty() || numbers.iter().any(|number| !(*number > 0.0 && number.is_finite())) {
        return None;
    }
    Some((numbers.iter().map(|number| number.ln()).sum::<f64>() / numbers.len() as f64).exp())
}

#[cfg(test)]
mod tests;
