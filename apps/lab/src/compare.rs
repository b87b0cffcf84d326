//! Compares two states of a host, such as before and after a change, cell by cell.

use serde::Serialize;

use crate::environment::PROGRAMS;
use crate::lists::{distinct, numbered};
use crate::matrix::Matrix;
use crate::model::{Axes, Cell, Environment, Metric, Run, SURVIVED, metric};
use crate::stats::{Decision, Interval, RUNS_APART, Rounds, Runs};
use crate::words::digits;

/// A cell that was measured in both states.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Compared {
    /// The cell's name.
    pub key: String,
    /// The cell's axes and values.
    #[serde(skip)]
    pub axes: Axes,
    /// Key of the metric.
    pub metric: &'static str,
    /// Median before, in the metric's unit; for survival the share of rounds.
    pub before: f64,
    /// The same after.
    pub after: f64,
    /// Number of rounds before and after, over all runs.
    pub rounds: [usize; 2],
    /// How many times as good the cell is after the change: 2 is twice the throughput, or half the
    /// time.
    pub ratio: f64,
    /// Lower end of the ratio's interval. Equal to the ratio if the interval is not known.
    pub low: f64,
    /// Upper end; see `low`.
    pub high: f64,
    /// Coverage of the intervals: the share of such comparisons in which all intervals contain the
    /// true ratios. 0 with too few rounds.
    pub coverage: f64,
    /// `better`, `worse`, or `tie` if the comparison is undecided.
    pub verdict: &'static str,
}

/// The comparison of two states.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Comparison {
    /// Ids of the earlier runs.
    pub before: Vec<String>,
    /// Ids of the later runs.
    pub after: Vec<String>,
    /// Key of the metric.
    pub metric: String,
    /// Whether the variation between runs was estimated from these runs.
    pub learnt: bool,
    /// Worse cells first, from the worst; then better cells, from the best; then ties.
    pub cells: Vec<Compared>,
    /// Cells that were only measured in the earlier state.
    pub only_before: Vec<String>,
    /// Cells that were only measured in the later state.
    pub only_after: Vec<String>,
    /// Number of worse cells.
    pub worse: usize,
    /// Number of better cells.
    pub better: usize,
    /// Number of undecided cells.
    pub ties: usize,
    /// What makes the states hard to compare: another plan, another machine, too few runs.
    pub warnings: Vec<String>,
}

/// Compares the runs of `after` with those of `before`, by the metric of the later runs' plan.
/// Returns nothing if that metric is unknown or a side has no run.
pub fn compare(before: &[Run], after: &[Run]) -> Option<Comparison> {
    let (first, last) = (before.first()?, after.first()?);
    let metric = metric(&last.plan.metric)?;
    let runs: Vec<&Run> = before.iter().chain(after).collect();
    let keys = distinct(runs.iter().flat_map(|run| &run.cells).map(|cell| cell.key.as_str()));
    let side = |side: &[Run]| -> Vec<Vec<Rounds>> {
        let rounds = |run: &Run, key: &str| {
            find(run, key).map_or_else(Rounds::new, |cell| cell.rounds(metric.key))
        };
        side.iter().map(|run| keys.iter().map(|key| rounds(run, key)).collect()).collect()
    };
    let busy = runs.iter().flat_map(|run| &run.warnings).any(|warning| warning.kind == "load");
    let statistics = Runs::new(&loads(&runs, &keys), side(before), side(after), busy);
    let mut comparison = Comparison {
        before: before.iter().map(|run| run.id.clone()).collect(),
        after: after.iter().map(|run| run.id.clone()).collect(),
        metric: metric.key.to_owned(),
        learnt: statistics.is_learnt(),
        cells: Vec::new(),
        only_before: Vec::new(),
        only_after: Vec::new(),
        worse: 0,
        better: 0,
        ties: 0,
        warnings: differences(first, last),
    };
    if !statistics.is_learnt() && metric.key != SURVIVED {
        comparison.warnings.push(unlearnt(busy));
    }
    for (at, key) in keys.iter().enumerate() {
        let values = |side: &[Run]| -> Vec<f64> {
            let cells = side.iter().filter_map(|run| find(run, key));
            cells.flat_map(|cell| cell.values(metric.key)).collect()
        };
        match (values(before), values(after)) {
            (old, new) if old.is_empty() && new.is_empty() => {}
            (old, _) if old.is_empty() => comparison.only_after.push((*key).to_owned()),
            (_, new) if new.is_empty() => comparison.only_before.push((*key).to_owned()),
            (old, new) => {
                let axes = runs.iter().find_map(|run| find(run, key)).map(|cell| cell.axes.clone());
                let cell = (*key, axes.unwrap_or_default());
                comparison.cells.extend(one(cell, at, metric, &statistics, &old, &new));
            }
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

/// Explains what a single run of each state cannot decide, and how to decide it.
fn unlearnt(busy: bool) -> String {
    let undecided = match busy {
        true => "other programs used the machine, so no difference is reported".to_owned(),
        false => format!("differences below a factor of {} are not reported", digits(RUNS_APART)),
    };
    format!(
        "these runs do not show how much unchanged runs differ here: {undecided}; measure both states \
         again, alternating, and add those runs with --before and --after"
    )
}

fn find<'a>(run: &'a Run, key: &str) -> Option<&'a Cell> {
    run.cells.iter().find(|cell| cell.key == key)
}

/// Assigns a number to the load of each cell.
fn loads(runs: &[&Run], keys: &[&str]) -> Vec<usize> {
    let matrix = runs.first().and_then(|run| Matrix::new(run));
    let cell = |key: &str| runs.iter().find_map(|run| find(run, key));
    numbered(keys.iter().map(|key| Some(matrix.as_ref()?.condition(cell(key)?))))
}

fn one(
    (key, axes): (&str, Axes),
    at: usize,
    metric: &'static Metric,
    statistics: &Runs,
    before: &[f64],
    after: &[f64],
) -> Option<Compared> {
    let (old, new) = (metric.of_rounds(before)?, metric.of_rounds(after)?);
    let gain = statistics.gain(at, metric.better).filter(|_| metric.key != SURVIVED);
    let decision = match gain {
        Some(gain) => gain.decision,
        // Survival has no ratio, only an order.
        None if metric.key == SURVIVED && new > old => Decision::Better,
        None if metric.key == SURVIVED && new < old => Decision::Worse,
        None => Decision::Tie,
    };
    let unknown = Interval { low: 1.0, high: 1.0, coverage: 0.0 };
    let interval = gain.map_or(unknown, |gain| gain.interval);
    Some(Compared {
        key: key.to_owned(),
        axes,
        metric: metric.key,
        before: old,
        after: new,
        rounds: [before.len(), after.len()],
        ratio: gain.map_or(1.0, |gain| gain.ratio),
        low: interval.low,
        high: interval.high,
        coverage: interval.coverage,
        verdict: decision.word(),
    })
}

/// Differences between the two runs' conditions: plan, machine, versions.
pub(crate) fn differences(before: &Run, after: &Run) -> Vec<String> {
    let (old, new) = (&before.environment, &after.environment);
    let mut said = Vec::new();
    let mut differ = |what: &str, a: &str, b: &str| {
        if a != b {
            said.push(format!("{what} was '{a}' and is '{b}'"));
        }
    };
    differ("the plan", &before.plan.name, &after.plan.name);
    differ("the metric", &before.plan.metric, &after.plan.metric);
    let effort = |run: &Run| {
        let of = run.plan.effort;
        of.map_or(String::new(), |of| {
            format!("{} bytes, {} for each job, {} s", of.disk, of.bytes, of.seconds)
        })
    };
    differ("the disk and the work of a cell", &effort(before), &effort(after));
    differ("the processor", &old.cpu, &new.cpu);
    differ("the kernel", &old.kernel, &new.kernel);
    differ("the version of vdkit", &before.vdkit_version, &after.vdkit_version);
    for (name, version) in programs(new) {
        let was = programs(old).find(|(other, _)| other == name);
        differ(&format!("the version of {name}"), was.map_or(version, |(_, was)| was), version);
    }
    for place in &new.places {
        let Some(was) = old.places.iter().find(|other| other.name == place.name) else { continue };
        let system = |place: &crate::model::PlaceInfo| {
            let kind = place.file_system.as_deref().unwrap_or("none");
            format!("{kind} ({})", place.mount_options.as_deref().unwrap_or(""))
        };
        differ(&format!("the file system of {}", place.name), &system(was), &system(place));
    }
    if before.quick != after.quick {
        said.push("one of the runs is quick (--quick), the other is not".to_owned());
    }
    said
}

/// The other programs with their versions.
fn programs(environment: &Environment) -> impl Iterator<Item = &(String, String)> {
    let sections = environment.sections.iter().filter(|section| section.title == PROGRAMS);
    sections.flat_map(|section| &section.entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{measured, run_of};
    use crate::model::{Effort, Section, Warning};

    fn run(id: &str, metric: &str, cells: &[(&str, &[f64])]) -> Run {
        let cell = |(key, values): &(&str, &[f64])| Cell {
            key: (*key).to_owned(),
            ..measured(&[("layout", *key)], metric, values)
        };
        let run = run_of(metric, &[], None, cells.iter().map(cell).collect());
        Run { id: id.to_owned(), ..run }
    }

    /// Three runs of a state, 1 % apart.
    fn runs(metric: &str, cells: &[(&str, f64)]) -> Vec<Run> {
        let one = |by: f64| {
            let values = |level: f64| [0.99, 1.0, 1.01].map(|part| part * level * by);
            let all: Vec<[f64; 3]> = cells.iter().map(|(_, level)| values(*level)).collect();
            let cells: Vec<(&str, &[f64])> =
                cells.iter().zip(&all).map(|((key, _), values)| (*key, &values[..])).collect();
            run("run", metric, &cells)
        };
        [1.0, 1.01, 0.99].map(one).into()
    }

    #[test]
    fn regressions_come_first() {
        let names = ["a", "b", "c", "d", "e"];
        let before: Vec<(&str, f64)> =
            names.iter().map(|name| (*name, 100.0)).chain([("gone", 100.0)]).collect();
        let after = [50.0, 100.0, 200.0, 25.0, 400.0, 100.0];
        let after: Vec<(&str, f64)> = names.into_iter().chain(["new"]).zip(after).collect();
        let found = compare(&runs("iops", &before), &runs("iops", &after)).unwrap();
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
        assert!((found.cells[0].ratio - 0.25).abs() < 1e-9 && found.learnt);
    }

    /// Two runs of `install` half an hour apart with nothing changed gave ratios from 0.48 to 0.64
    /// in three of six cells.
    #[test]
    fn two_runs_of_the_same_are_not_worse() {
        let cells = |by: [f64; 3]| -> Vec<(&'static str, f64)> {
            ["a", "b", "c"].into_iter().zip(by.map(|by| 2.0 / by)).collect()
        };
        let one = |by| runs("elapsed_seconds", &cells(by))[..1].to_vec();
        let found = compare(&one([1.0; 3]), &one([0.48, 0.64, 1.0])).unwrap();
        assert_eq!((found.worse, found.better, found.ties), (0, 0, 3));
        assert!(!found.learnt && found.warnings[0].contains("--before"), "{:?}", found.warnings);
        // Other programs used the machine.
        let mut busy = one([0.1, 0.1, 1.0]);
        assert_eq!(compare(&one([1.0; 3]), &busy).unwrap().worse, 2);
        busy[0].warnings.push(Warning { kind: "load".to_owned(), ..Warning::default() });
        let found = compare(&one([1.0; 3]), &busy).unwrap();
        assert_eq!((found.worse, found.ties), (0, 3));
        assert!(found.warnings[0].contains("other programs used the machine"), "{found:?}");
        // One round on each side does not suffice, even for a factor of a hundred.
        let single = |value: f64| vec![run("one", "iops", &[("a", &[value])])];
        assert_eq!(compare(&single(1.0), &single(100.0)).unwrap().ties, 1);
    }

    #[test]
    fn another_size_of_the_disk_is_said() {
        let sized = |disk| {
            let mut all = runs("iops", &[("a", 100.0)]);
            for run in &mut all {
                run.plan.effort = Some(Effort { rounds: 3, seconds: 5.0, disk, bytes: 1 << 20 });
            }
            all
        };
        let said = |disk| compare(&sized(4 << 30), &sized(disk)).unwrap().warnings;
        assert!(said(4 << 30).is_empty(), "{:?}", said(4 << 30));
        assert!(said(64 << 20)[0].contains("the disk and the work"), "{:?}", said(64 << 20));
    }

    #[test]
    fn less_time_is_better() {
        let before = runs("elapsed_seconds", &[("a", 2.0), ("b", 1.0)]);
        let after = runs("elapsed_seconds", &[("a", 1.0), ("b", 1.0)]);
        let found = compare(&before, &after).unwrap();
        let first = &found.cells[0];
        assert_eq!((first.key.as_str(), first.verdict), ("a", "better"));
        assert!((first.ratio - 2.0).abs() < 1e-9 && first.low > 1.0 && first.high > first.ratio);
        assert_eq!(compare(&before, &[run("x", "speed", &[])]), None);
        assert_eq!(compare(&[], &after), None);
    }

    #[test]
    fn what_came_through_has_an_order() {
        let before = run("old", "survived", &[("a", &[0.0]), ("b", &[1.0]), ("c", &[1.0])]);
        let after = run("new", "survived", &[("a", &[1.0]), ("b", &[0.0]), ("c", &[1.0])]);
        let found = compare(&[before], &[after]).unwrap();
        let order: Vec<_> = found.cells.iter().map(|c| (c.key.as_str(), c.verdict)).collect();
        assert_eq!(order, [("b", "worse"), ("a", "better"), ("c", "tie")]);
        // One lost round of three once disappeared behind the median.
        let before = run("old", "survived", &[("a", &[1.0; 3])]);
        let after = run("new", "survived", &[("a", &[1.0, 0.0, 1.0])]);
        let cell = compare(&[before], &[after]).unwrap().cells.remove(0);
        assert_eq!((cell.verdict, cell.before), ("worse", 1.0));
        assert!(cell.after < 0.7, "{cell:?}");
    }

    #[test]
    fn other_versions_of_programs_are_told() {
        let with = |id: &str, fio: &str| {
            let entries = vec![("fio".to_owned(), fio.to_owned())];
            let mut run = run(id, "iops", &[]);
            run.environment.sections = vec![Section { title: PROGRAMS.to_owned(), entries }];
            run.vdkit_version = id.to_owned();
            run
        };
        let said = differences(&with("1.0", "fio-3.33"), &with("1.1", "fio-3.36"));
        let vdkit = "the version of vdkit was '1.0' and is '1.1'";
        assert_eq!(said, [vdkit, "the version of fio was 'fio-3.33' and is 'fio-3.36'"]);
        // A run of an earlier vdkit may know fewer programs.
        assert!(differences(&run("1.0", "iops", &[]), &with("", "fio-3.36")).is_empty());
    }

    #[test]
    fn another_machine_is_told() {
        let before = run("old", "iops", &[]);
        let mut after = run("new", "iops", &[]);
        after.environment.kernel = "6.1".to_owned();
        after.quick = true;
        let said = compare(&[before], &[after]).unwrap().warnings;
        assert_eq!(said.len(), 3, "{said:?}");
    }
}
