//! Scales and axes, with ticks at round numbers.

/// Maps numbers to coordinates.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    log: bool,
}

impl Scale {
    /// Equal differences have equal lengths.
    pub(super) fn linear(low: f64, high: f64, from: f64, to: f64) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, from, to, log: false }
    }

    /// Equal ratios have equal lengths. Both ends are above 0.
    pub(super) fn log(low: f64, high: f64, from: f64, to: f64) -> Self {
        let low = low.max(f64::MIN_POSITIVE);
        let high = if high > low { high } else { low * 10.0 };
        Self { low, high, from, to, log: true }
    }

    /// The coordinate of a number. Numbers beyond the ends are placed at the ends.
    pub(super) fn at(&self, number: f64) -> f64 {
        let number = number.clamp(self.low, self.high);
        let part = if self.log {
            (number / self.low).ln() / (self.high / self.low).ln()
        } else {
            (number - self.low) / (self.high - self.low)
        };
        self.from + part * (self.to - self.from)
    }

    /// About `wanted` numbers for ticks, within the ends. At least three, because an axis with
    /// fewer is hard to read.
    fn ticks(&self, wanted: usize) -> Vec<f64> {
        const READABLE: usize = 3;
        let log = if self.log { self.log_ticks(wanted) } else { Vec::new() };
        if log.len() >= READABLE {
            return log;
        }
        let finer = (wanted..wanted + 8).map(|wanted| self.linear_ticks(wanted));
        let mut last = Vec::new();
        for ticks in finer {
            last = ticks;
            if last.len() >= READABLE {
                break;
            }
        }
        last
    }

    fn linear_ticks(&self, wanted: usize) -> Vec<f64> {
        let step = nice((self.high - self.low) / wanted.max(1) as f64);
        let first = (self.low / step).ceil();
        (0..64)
            .map(|i| (first + f64::from(i)) * step)
            .take_while(|tick| *tick <= self.high * (1.0 + 1e-9))
            .collect()
    }

    /// Powers of ten. Leaves out some if there are many, and adds 2 and 5 times each if there are
    /// few.
    fn log_ticks(&self, wanted: usize) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let every = (decades / wanted.max(1) as f64).ceil().max(1.0) as i32;
        let digits: &[f64] = if decades <= 2.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        (first..=last)
            .filter(|power| (power - first) % every == 0)
            .flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)))
            .filter(|tick| *tick >= self.low * 0.999 && *tick <= self.high * 1.001)
            .collect()
    }
}

/// The smallest of 1, 2 or 5 times a power of ten that is not below `step`.
fn nice(step: f64) -> f64 {
    let power = 10f64.powf(step.max(f64::MIN_POSITIVE).log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|digit| digit * power)
        .find(|nice| *nice >= step * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

/// The numbers of an axis.
#[derive(Clone, Copy, Debug)]
pub(in crate::report) enum Range {
    /// From the first number to the largest of the chart times the second. Equal differences have
    /// equal lengths.
    Linear(f64, f64),
    /// Around all numbers of the chart, which are above 0. Equal ratios have equal lengths.
    Log,
}

pub(in crate::report) struct Axis<'a> {
    pub(in crate::report) name: &'a str,
    pub(in crate::report) range: Range,
    /// The numbers of the ticks; empty for round numbers.
    pub(in crate::report) ticks: &'a [f64],
    /// The text of a tick.
    pub(in crate::report) text: &'a dyn Fn(f64) -> String,
}

impl Axis<'_> {
    /// The scale for these numbers between two coordinates.
    pub(super) fn scale(
        &self,
        numbers: impl Iterator<Item = f64> + Clone,
        from: f64,
        to: f64,
    ) -> Scale {
        let numbers = numbers.filter(|number| number.is_finite());
        let most = numbers.clone().fold(0.0, f64::max);
        match self.range {
            Range::Linear(low, room) => Scale::linear(low, most * room, from, to),
            Range::Log => {
                let least = numbers.fold(f64::INFINITY, f64::min);
                Scale::log(least * 0.8, most * 1.25, from, to)
            }
        }
    }

    /// The ticks on a scale, about `wanted`, with their texts.
    pub(super) fn ticks(&self, scale: &Scale, wanted: usize) -> Vec<(f64, String)> {
        let ticks = match self.ticks {
            [] => scale.ticks(wanted),
            fixed => fixed.iter().copied().filter(|tick| *tick <= scale.high + 1e-6).collect(),
        };
        ticks.into_iter().map(|tick| (tick, (self.text)(tick))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_between_the_ends() {
        let scale = Scale::linear(0.0, 10.0, 100.0, 200.0);
        assert_eq!((scale.at(0.0), scale.at(5.0), scale.at(99.0)), (100.0, 150.0, 200.0));
        let log = Scale::log(1.0, 100.0, 0.0, 2.0);
        assert!((log.at(10.0) - 1.0).abs() < 1e-12);
        assert!(Scale::linear(5.0, 5.0, 0.0, 1.0).at(5.0).is_finite());
        assert!(Scale::log(0.0, 0.0, 0.0, 1.0).at(0.0).is_finite());
    }

    #[test]
    fn an_axis_has_labels_enough_to_read() {
        // Between two powers of ten there may be no power of ten to place a tick at.
        for (low, high) in [(120.0, 180.0), (0.011, 0.019), (2.1, 4.9), (1.0, 1e6), (55.0, 64.0)] {
            for wanted in 3..8 {
                let ticks = Scale::log(low, high, 0.0, 1.0).ticks(wanted);
                assert!((3..=10).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
                assert!(ticks.iter().all(|tick| (low * 0.99..=high * 1.01).contains(tick)));
            }
        }
        for high in [1.0, 1.9, 2.3, 97.0] {
            assert!(Scale::linear(0.0, high, 0.0, 1.0).ticks(3).len() >= 3, "{high}");
        }
    }

    #[test]
    fn ticks_are_numbers_that_people_like() {
        assert_eq!(Scale::linear(0.0, 97.0, 0.0, 1.0).ticks(5), [0.0, 20.0, 40.0, 60.0, 80.0]);
        assert_eq!(Scale::linear(0.0, 0.3, 0.0, 1.0).ticks(3).len(), 4);
        assert_eq!(Scale::log(1.0, 1e6, 0.0, 1.0).ticks(6).len(), 7);
        assert!(Scale::log(1.0, 1e12, 0.0, 1.0).ticks(5).len() <= 6);
        let few: Vec<i64> =
            Scale::log(15.0, 300.0, 0.0, 1.0).ticks(5).iter().map(|t| t.round() as i64).collect();
        assert_eq!(few, [20, 50, 100, 200]);
    }
}
