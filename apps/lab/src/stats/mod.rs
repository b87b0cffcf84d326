//! What samples say: pure functions on numbers.
//!
//! A cell has few samples (a round each, 3 to 30), of a distribution that nobody knows and that is often
//! skewed. Nothing draws random numbers, and the same samples give the same answer always:
//!
//! | question | method | source |
//! |---|---|---|
//! | where is the middle | median | |
//! | how sure is that | order statistics around the median, exact for any distribution | Le Boudec, *Performance Evaluation of Computer and Communication Systems*, theorem 2.1 |
//! | how much does one round vary | variances of logarithms, without what a round has in common, each drawn towards those of the other cells | Smyth, *Linear models and empirical Bayes methods* (2004) |
//! | how many times as good as another | geometric mean of the ratios, round by round, its interval by Student's distribution | |
//! | is that more than noise | the interval, for all comparisons of a verdict together | Bonferroni |
//! | is another run more than another hour | as above, runs in the place of rounds | `runs` |
//! | is one far off | modified z-score by the median of absolute deviations, above 3.5 | Iglewicz, Hoaglin, *How to Detect and Handle Outliers* (1993) |
//! | was it steady | five rounds, excursion ≤ 20 %, slope ≤ 10 % | SNIA, *Solid State Storage Performance Test Specification* 2.0.2 |
//!
//! A method without any distribution, such as a test of ranks, could decide nothing here: three samples
//! beside three are in one order of twenty by chance, which is not enough for one comparison and far from
//! enough for fifty. What is supposed of the distribution instead is held against samples of
//! distributions with heavy tails, two modes and drift in the tests of [`crate::verdict`], and against real runs
//! by [`crate::calibrate`].

mod gain;
mod histogram;
mod noise;
mod runs;
mod special;
mod steady;

pub use gain::{Decision, ERROR, Gain, Judge, MATTERS, NARROW, ROUNDS_MIN, Side};
pub use histogram::{FRACTIONS, Percentile, merged, percentiles};
pub use noise::{Noise, Rounds, Spread};
pub use runs::{RUNS_APART, Runs};
pub use steady::{EXCURSION_MAX, SLOPE_MAX, WINDOW, judge, steady, window_of};

/// The coverage that intervals aim at.
pub const COVERAGE: f64 = 0.95;

/// From where to where a number lies, and how surely.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The part of all experiments like this one in which the interval holds the true number, from
    /// 0 to 1. Less than [`COVERAGE`] where samples are few.
    pub coverage: f64,
}

impl Interval {
    /// Whether a number lies within.
    pub fn holds(&self, number: f64) -> bool {
        self.low <= number && number <= self.high
    }
}

/// What is known of a cell's samples of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// How many.
    pub count: usize,
    /// The middle.
    pub median: f64,
    /// Of the median.
    pub interval: Interval,
    /// Smallest sample.
    pub min: f64,
    /// Largest sample.
    pub max: f64,
    /// Standard deviation by mean, from 0; nothing of one sample.
    pub variation: Option<f64>,
    /// Samples that are far off, as indices in the order given.
    pub outliers: Vec<usize>,
}

/// Sums up samples. Nothing of none, or where one is not a finite number.
pub fn summary(samples: &[f64]) -> Option<Summary> {
    let sorted = sorted(samples)?;
    Some(Summary {
        count: sorted.len(),
        median: middle(&sorted),
        interval: median_interval(&sorted),
        min: sorted[0],
        max: sorted[sorted.len() - 1],
        variation: variation(samples),
        outliers: outliers(samples),
    })
}

/// The samples in order; nothing of none, or where one is not finite.
fn sorted(samples: &[f64]) -> Option<Vec<f64>> {
    if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
        return None;
    }
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted)
}

/// The middle of ordered numbers: the mean of the two middle ones where their count is even.
fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}

/// The median. Nothing of none, or where one is not finite.
pub fn median(samples: &[f64]) -> Option<f64> {
    sorted(samples).map(|sorted| middle(&sorted))
}

/// The narrowest pair of order statistics, as far from the ends each, that holds the median of the
/// distribution with [`COVERAGE`]; the whole range where there are too few samples for that.
///
/// The median lies below the `j`-th of `n` samples (and as often above the `j`-th from the end) with
/// the chance that a coin shows heads less than `j` times in `n` throws.
fn median_interval(sorted: &[f64]) -> Interval {
    let n = sorted.len();
    let mut outside = 0.0;
    // The logarithm of the chance of just i heads: 2^-n itself may be too small for a number.
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
    // (One sample says nothing about how far off it is.)
    let coverage = if n == 1 { 0.0 } else { 1.0 - 2.0 * outside };
    Interval { low: sorted[skip], high: sorted[n - 1 - skip], coverage }
}

/// Standard deviation (of a sample, divided by n − 1) by mean. Nothing of less than two samples, or
/// where the mean is 0.
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

/// The modified z-score above which a sample is far off.
const OUTLIER_SCORE: f64 = 3.5;
/// A sample that is so near to the median (as a fraction of it) is never far off, however close the
/// others lie together: clocks and schedulers alone make as much.
const NEAR: f64 = 0.02;

/// Which samples are far off, as indices. Among less than three nobody can tell.
///
/// Where more than half of the samples are equal the median of deviations is 0; the mean deviation
/// takes its place, as Iglewicz and Hoaglin advise.
pub fn outliers(samples: &[f64]) -> Vec<usize> {
    let Some(centre) = median(samples).filter(|_| samples.len() >= 3) else { return Vec::new() };
    let deviations: Vec<f64> = samples.iter().map(|sample| (sample - centre).abs()).collect();
    let typical = median(&deviations).unwrap_or(0.0);
    let mean = deviations.iter().sum::<f64>() / deviations.len() as f64;
    // 0.6745 and 0.7979 are what the two are of a normal distribution's standard deviation.
    let unit = if typical > 0.0 { typical / 0.6745 } else { mean / 0.7979 };
    let far = |deviation: f64| {
        deviation > OUTLIER_SCORE * unit && deviation > NEAR * centre.abs() && unit > 0.0
    };
    (0..samples.len()).filter(|i| far(deviations[*i])).collect()
}

/// The geometric mean. Nothing of none, or where one is not above 0.
pub fn geometric_mean(numbers: &[f64]) -> Option<f64> {
    if numbers.is_empty() || numbers.iter().any(|number| !(*number > 0.0 && number.is_finite())) {
        return None;
    }
    Some((numbers.iter().map(|number| number.ln()).sum::<f64>() / numbers.len() as f64).exp())
}

#[cfg(test)]
mod tests;
