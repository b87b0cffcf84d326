//! Tests the method with samples of known distributions. Equal ways must not be called different in
//! more than 5 of 100 verdicts, whatever the noise, and a factor of two must be found.

use super::*;
use crate::calibrate::wrong_verdict;
use crate::compare::compare;
use crate::model::tests::{measured, run_of};
use crate::model::{Cell, Effort, Sample};
use crate::stats::ERROR;

/// A repeatable source of noise.
struct Source(crate::cells::Rng);

impl Source {
    /// A number from 0 to 1, excluding both.
    fn even(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// A normally distributed number. Source: Box and Muller, *A Note on the Generation of Random
    /// Normal Deviates*.
    fn normal(&mut self) -> f64 {
        (-2.0 * self.even().ln()).sqrt() * (2.0 * std::f64::consts::PI * self.even()).cos()
    }
}

/// The logarithm of a sample's deviation. `cell` is the cell's number; `time` goes from 0 to 1 over
/// the run.
type Noise = fn(&mut Source, usize, f64) -> f64;

/// Kinds of noise that were observed with storage.
const NOISES: [(&str, Noise); 7] = [
    ("normal", |s, _, _| 0.1 * s.normal()),
    ("heavy tails", |s, _, _| {
        let stall = if s.even() < 0.2 { -0.6 * s.even().ln() } else { 0.0 };
        stall + 0.05 * s.normal()
    }),
    ("two modes", |s, _, _| if s.even() < 0.5 { 0.4 } else { 0.0 } + 0.02 * s.normal()),
    ("drift", |s, _, time| 0.6 * time + 0.05 * s.normal()),
    ("busy hours", |s, _, time| 0.3 * (9.0 * time).sin() + 0.08 * s.normal()),
    ("some cells noisy", |s, cell, _| [0.3, 0.03, 0.03][cell % 3] * s.normal()),
    ("tails without a mean", |s, _, _| 0.1 * s.normal() / s.normal().abs().max(0.05)),
];

/// A run of several ways under several loads; the second way is `by` times as good.
fn run(source: &mut Source, noise: Noise, ways: usize, loads: usize, rounds: u32, by: f64) -> Run {
    let count = ways * loads;
    let mut cells: Vec<Cell> = (0..count)
        .map(|i| {
            let (layout, load) = (format!("l{}", i % ways), format!("p{}", i / ways));
            measured(&[("layout", layout.as_str()), ("profile", load.as_str())], "iops", &[])
        })
        .collect();
    for round in 0..rounds {
        let order = crate::cells::shuffled(count, &mut source.0);
        for (place, cell) in order.into_iter().enumerate() {
            let time = (f64::from(round) + place as f64 / count as f64) / f64::from(rounds);
            let level = if cell % ways == 1 { 100.0 * by } else { 100.0 };
            let value = level * noise(source, cell, time).exp();
            let values = [("iops".to_owned(), value)].into();
            cells[cell].samples.push(Sample { round, values, ..Sample::default() });
        }
    }
    let mut run = run_of("iops", &["layout", "profile"], Some(&[("layout", "l0")]), cells);
    run.plan.effort = Some(Effort { rounds, seconds: 1.0, disk: 1, bytes: 1 });
    run
}

const TRIALS: usize = 60;

/// Requires that verdicts on equal ways report a difference no more often than they may. `shapes`
/// are numbers of ways, loads and rounds.
fn equals_stay_equal(seed: u64, shapes: &[(usize, usize, u32)]) {
    for (name, noise) in NOISES {
        let (mut wrong, mut made) = (0, 0);
        for (ways, loads, rounds) in shapes {
            let mut source = Source(crate::cells::Rng::new(seed));
            for _ in 0..TRIALS {
                let run = run(&mut source, noise, *ways, *loads, *rounds, 1.0);
                wrong += usize::from(wrong_verdict(&run).is_some());
                made += 1;
            }
        }
        assert!(wrong as f64 <= ERROR * made as f64, "{name}: {wrong} of {made}");
    }
}

#[test]
fn equals_are_not_called_different_in_more_than_five_of_a_hundred_verdicts() {
    equals_stay_equal(1, &[(2, 1, 3), (4, 2, 3), (4, 2, 5)]);
}

/// With many ways, the comparisons with the default have a larger share of the error than others.
#[test]
fn many_equals_and_a_default_are_not_called_different() {
    equals_stay_equal(5, &[(8, 1, 3), (8, 1, 5)]);
}

/// A run that continues until it is decided tests its results repeatedly, which must not raise the
/// number of false differences.
#[test]
fn looking_again_does_not_find_what_is_not_there() {
    for (name, noise) in NOISES {
        let mut wrong = 0;
        let mut source = Source(crate::cells::Rng::new(2));
        for _ in 0..TRIALS {
            let whole = run(&mut source, noise, 3, 1, 8, 1.0);
            let mut looked = whole.clone();
            for rounds in 3..=8 {
                for (cell, all) in looked.cells.iter_mut().zip(&whole.cells) {
                    cell.samples = all.samples[..rounds].to_vec();
                }
                looked.plan.effort = whole.plan.effort.map(|e| Effort { rounds: 3, ..e });
                if is_settled(&looked) {
                    break;
                }
            }
            wrong += usize::from(wrong_verdict(&looked).is_some());
        }
        assert!(wrong as f64 <= ERROR * TRIALS as f64, "{name}: {wrong} of {TRIALS}");
    }
}

#[test]
fn what_is_twice_as_good_is_found() {
    // Noise without a mean may hide the difference.
    for (name, noise) in &NOISES[..6] {
        let mut source = Source(crate::cells::Rng::new(3));
        let mut found = 0;
        for _ in 0..TRIALS {
            let run = run(&mut source, *noise, 4, 2, 8, 2.0);
            let verdict = verdict(&run);
            let best = verdict.best.is_some_and(|best| best[0].1 == "l1");
            found += usize::from(verdict.advice == Advice::Use && best);
        }
        assert!(found * 10 >= TRIALS * 6, "{name}: {found} of {TRIALS}");
    }
}

/// Two runs with nothing changed, half an hour apart: all cells are slower, some more than others.
#[test]
fn another_hour_is_not_called_a_change() {
    for (name, noise) in NOISES {
        let (mut wrong, mut learnt) = (0, 0);
        let mut source = Source(crate::cells::Rng::new(4));
        for _ in 0..TRIALS {
            let mut hour = || {
                let mut run = run(&mut source, noise, 4, 2, 3, 1.0);
                let shared = 0.3 * source.normal();
                for cell in &mut run.cells {
                    let own = (shared + 0.1 * source.normal()).exp();
                    for sample in &mut cell.samples {
                        sample.values.values_mut().for_each(|value| *value *= own);
                    }
                }
                run
            };
            let hours: Vec<Run> = (0..4).map(|_| hour()).collect();
            let differ = |before: &[Run], after: &[Run]| {
                let found = compare(before, after).unwrap();
                usize::from(found.worse + found.better > 0)
            };
            wrong += differ(&hours[..1], &hours[1..2]);
            learnt += differ(&hours[..2], &hours[2..]);
        }
        let most = ERROR * TRIALS as f64;
        assert!(wrong as f64 <= most && learnt as f64 <= most, "{name}: {wrong}, {learnt}");
    }
}
