//! One run against another: before and after, cell by cell.

use serde::Serialize;

use crate::model::{Axes, Better, Metric, Run, metric};
use crate::stats::{Decision, gain, summary};

/// A cell in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Compared {
    /// The cell's name.
    pub key: String,
    /// The same in parts.
    #[serde(skip)]
    pub axes: Axes,
    /// Key of the metric.
    pub metric: &'static str,
    /// Median before, in the metric's unit.
    pub before: f64,
    /// Median after.
    pub after: f64,
    /// Rounds before and after.
    pub rounds: [usize; 2],
    /// How many times as good it is after: 2 is twice the throughput, or half the time.
    pub ratio: f64,
    /// Where the ratio lies.
    pub low: f64,
    /// See `low`.
    pub high: f64,
    /// The part of such comparisons whose interval holds the true ratio.
    pub coverage: f64,
    /// better, tie or worse.
    pub verdict: &'static str,
}

/// Two runs compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Comparison {
    /// The earlier run's id.
    pub before: String,
    /// The later one's.
    pub after: String,
    /// Key of the metric.
    pub metric: String,
    /// Worse ones first, the worst at the top; then better ones, the best first; then ties.
    pub cells: Vec<Compared>,
    /// Cells that only the earlier run has measured.
    pub only_before: Vec<String>,
    /// Cells that only the later one has.
    pub only_after: Vec<String>,
    /// How many cells are worse.
    pub worse: usize,
    /// Better.
    pub better: usize,
    /// Neither.
    pub ties: usize,
    /// What makes the two hard to compare: another plan, another machine.
    pub warnings: Vec<String>,
}

/// The word for a decision.
pub fn word(decision: Decision) -> &'static str {
    match decision {
        Decision::Better => "better",
        Decision::Tie => "tie",
        Decision::Worse => "worse",
    }
}

/// Holds `after` against `before`, by the metric of the plan of the former. Nothing where that metric is
/// not known.
pub fn compare(before: &Run, after: &Run) -> Option<Comparison> {
    let metric = metric(&after.plan.metric)?;
    let mut comparison = Comparison {
        before: before.id.clone(),
        after: after.id.clone(),
        metric: metric.key.to_owned(),
        cells: Vec::new(),
        only_before: Vec::new(),
        only_after: Vec::new(),
        worse: 0,
        better: 0,
        ties: 0,
        warnings: differences(before, after),
    };
    let measured = |run: &Run, key: &str| {
        let cell = run.cells.iter().find(|cell| cell.key == key)?;
        let values = cell.values(metric.key);
        (!values.is_empty()).then_some(values)
    };
    for cell in &after.cells {
        let Some(own) = measured(after, &cell.key) else { continue };
        let Some(other) = measured(before, &cell.key) else {
            comparison.only_after.push(cell.key.clone());
            continue;
        };
        comparison.cells.extend(one(&cell.key, &cell.axes, metric, &other, &own));
    }
    for cell in &before.cells {
        if measured(before, &cell.key).is_some() && measured(after, &cell.key).is_none() {
            comparison.only_before.push(cell.key.clone());
        }
    }
    let count = |word: &str| comparison.cells.iter().filter(|cell| cell.verdict == word).count();
    let counts = (count("worse"), count("better"), count("tie"));
    (comparison.worse, comparison.better, comparison.ties) = counts;
    comparison.cells.sort_by(|a, b| {
        let place = |cell: &Compared| match cell.verdict {
            "worse" => 0,
            "better" => 1,
            _ => 2,
        };
        let far = |cell: &Compared| cell.ratio.max(f64::MIN_POSITIVE).ln().abs();
        place(a).cmp(&place(b)).then(far(b).total_cmp(&far(a)))
    });
    Some(comparison)
}

fn one(
    key: &str,
    axes: &Axes,
    metric: &'static Metric,
    before: &[f64],
    after: &[f64],
) -> Option<Compared> {
    let (old, new) = (summary(before)?, summary(after)?);
    let found = gain(after, before, metric.better);
    let (ratio, low, high, coverage, verdict) = match found {
        Some(gain) => {
            let interval = gain.interval;
            (gain.ratio, interval.low, interval.high, interval.coverage, gain.decision)
        }
        // Zeroes have no ratio, but an order.
        None => {
            let up = new.median > old.median;
            let decision = if new.median == old.median {
                Decision::Tie
            } else if up == (metric.better == Better::Higher) {
                Decision::Better
            } else {
                Decision::Worse
            };
            (1.0, 1.0, 1.0, 0.0, decision)
        }
    };
    Some(Compared {
        key: key.to_owned(),
        axes: axes.clone(),
        metric: metric.key,
        before: old.median,
        after: new.median,
        rounds: [old.count, new.count],
        ratio,
        low,
        high,
        coverage,
        verdict: word(verdict),
    })
}

/// What is not the same of the two, beside what was measured.
fn differences(before: &Run, after: &Run) -> Vec<String> {
    let (old, new) = (&before.environment, &after.environment);
    let mut said = Vec::new();
    let mut differ = |what: &str, a: &str, b: &str| {
        if a != b {
            said.push(format!("{what} was '{a}' and is '{b}'"));
        }
    };
    differ("the plan", &before.plan.name, &after.plan.name);
    differ("the metric", &before.plan.metric, &after.plan.metric);
    differ("the processor", &old.cpu, &new.cpu);
    differ("the kernel", &old.kernel, &new.kernel);
    for place in &new.places {
        let Some(was) = old.places.iter().find(|other| other.name == place.name) else { continue };
        let system = |place: &crate::model::PlaceInfo| {
            let kind = place.file_system.as_deref().unwrap_or("none");
            format!("{kind} ({})", place.mount_options.as_deref().unwrap_or(""))
        };
        differ(&format!("the file system of {}", place.name), &system(was), &system(place));
    }
    if before.quick != after.quick {
        said.push("one of the runs is a quick one".to_owned());
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Cell, PlanSummary, Sample};

    fn run(id: &str, metric: &str, cells: &[(&str, &[f64])]) -> Run {
        let cell = |(key, values): &(&str, &[f64])| Cell {
            key: (*key).to_owned(),
            axes: vec![("layout".to_owned(), (*key).to_owned())],
            samples: (0u32..)
                .zip(*values)
                .map(|(round, value)| Sample {
                    round,
                    values: [(metric.to_owned(), *value)].into(),
                    ..Sample::default()
                })
                .collect(),
            ..Cell::default()
        };
        let plan = PlanSummary { metric: metric.to_owned(), ..PlanSummary::default() };
        Run { id: id.to_owned(), plan, cells: cells.iter().map(cell).collect(), ..Run::default() }
    }

    #[test]
    fn regressions_come_first() {
        let base: &[f64] = &[100.0, 101.0, 102.0, 103.0];
        let by = |factor: f64| base.iter().map(|value| value * factor).collect::<Vec<_>>();
        let (half, slower, twice, four) = (by(0.5), by(0.8), by(2.0), by(4.0));
        let before = run(
            "old",
            "iops",
            &[("a", base), ("b", base), ("c", base), ("d", base), ("e", base), ("gone", base)],
        );
        let after = run(
            "new",
            "iops",
            &[
                ("a", &slower),
                ("b", base),
                ("c", &twice),
                ("d", &half),
                ("e", &four),
                ("new", base),
            ],
        );
        let found = compare(&before, &after).unwrap();
        let order: Vec<_> = found.cells.iter().map(|c| (c.key.as_str(), c.verdict)).collect();
        assert_eq!(
            order,
            [("d", "worse"), ("a", "worse"), ("e", "better"), ("c", "better"), ("b", "tie")]
        );
        assert_eq!((found.worse, found.better, found.ties), (2, 2, 1));
        assert_eq!(
            (found.only_before, found.only_after),
            (vec!["gone".into()], vec!["new".into()])
        );
        assert_eq!(found.cells[0].ratio, 0.5);
    }

    #[test]
    fn less_time_is_better() {
        let before = run("old", "elapsed_seconds", &[("a", &[2.0, 2.1, 2.2])]);
        let after = run("new", "elapsed_seconds", &[("a", &[1.0, 1.05, 1.1])]);
        let found = compare(&before, &after).unwrap();
        assert_eq!((found.cells[0].verdict, found.cells[0].ratio), ("better", 2.0));
        assert_eq!(compare(&before, &run("x", "speed", &[])), None);
    }

    #[test]
    fn zeroes_have_an_order() {
        let before = run("old", "survived", &[("a", &[0.0]), ("b", &[1.0]), ("c", &[1.0])]);
        let after = run("new", "survived", &[("a", &[1.0]), ("b", &[0.0]), ("c", &[1.0])]);
        let found = compare(&before, &after).unwrap();
        let order: Vec<_> = found.cells.iter().map(|c| (c.key.as_str(), c.verdict)).collect();
        assert_eq!(order, [("b", "worse"), ("a", "better"), ("c", "tie")]);
    }

    #[test]
    fn another_machine_is_told() {
        let before = run("old", "iops", &[]);
        let mut after = run("new", "iops", &[]);
        after.environment.kernel = "6.1".to_owned();
        after.quick = true;
        let said = compare(&before, &after).unwrap().warnings;
        assert_eq!(said.len(), 2, "{said:?}");
    }
}
