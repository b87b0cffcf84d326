//! `vdkit lab run`: measures a plan.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::Monitor;
use vdkit_lab::model::{self, Cell, Run};
use vdkit_lab::plan::Plan;
use vdkit_lab::run::{ActiveRun, Estimate, Prepared, Request, Tools, random_seed};
use vdkit_lab::verdict::{Verdict, verdict};
use vdkit_lab::words::{plural, value};
use vdkit_qemu::dates;

use super::plans::PlanChoice;
use crate::arguments::{Json, ProgressOption};
use crate::failure::{Exit, Failure, Outcome, quoted};
use crate::output::{Output, Table, bytes_short};
use crate::session::Session;

#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    plan: PlanChoice,
    /// Create images in a new folder below each DIR (repeatable)
    #[arg(long = "on", num_args = 1.., value_name = "DIR", value_hint = ValueHint::DirPath)]
    on: Vec<PathBuf>,
    /// Create images on these block devices, which are overwritten (repeatable)
    #[arg(long, num_args = 1.., value_name = "DEV", value_hint = ValueHint::FilePath)]
    device: Vec<PathBuf>,
    /// Confirm that DEV, named by --device with the same name, is overwritten (repeatable)
    #[arg(long, num_args = 1.., value_name = "DEV", value_hint = ValueHint::FilePath)]
    erase: Vec<PathBuf>,
    /// Measure fewer cells with smaller disks and shorter loads, for a first answer
    #[arg(long)]
    quick: bool,
    /// The results file (default: a new file in this folder, named after plan and time)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    out: Option<PathBuf>,
    /// Seed of the order of the cells and of random bytes
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Measure each cell exactly N times (default: as often as the decision needs)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Measure more rounds until the result is decided, for about this long at most (90s, 10m, 2h)
    #[arg(long, value_name = "TIME", value_parser = duration, conflicts_with = "rounds")]
    time: Option<u64>,
    /// Resume an interrupted run
    #[arg(long, value_name = "RUN", value_hint = ValueHint::FilePath)]
    #[arg(conflicts_with_all = ["name", "file", "on", "device", "quick", "out", "seed", "rounds", "time"])]
    resume: Option<PathBuf>,
    /// Print what would be measured, and the time and space that it needs
    #[arg(long, conflicts_with = "resume")]
    dry_run: bool,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct RunAnswer<'a> {
    /// None for a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<&'a str>,
    plan: &'a str,
    metric: &'a str,
    rounds: u32,
    cells: Vec<CellAnswer<'a>>,
    estimated_seconds: f64,
    /// Cells that are left out with the reasons, and disks that are smaller than the plan's.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    beforehand: &'a [String],
    warnings: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<Verdict>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CellAnswer<'a> {
    key: &'a str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    /// Values of the plan's metric, by round.
    values: Vec<f64>,
}

impl RunArgs {
    pub(super) fn run(self, session: &mut Session) -> Outcome {
        let cancel = session.cancel_on_signal()?;
        let progress = self.progress.reporter("lab").counting();
        let monitor = Monitor::new(&progress).cancelled_by(cancel);
        let command = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("the path of this command: {error}")))?;
        let registry = vdkit::registry();
        let ask = |told: &str, device: &Path| super::ask::for_name(told, device, &monitor.cancel);
        let tools = Tools {
            command,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            registry: &registry,
            erase: self.erase.clone(),
            ask: super::ask::possible().then_some(&ask),
        };
        if let Some(file) = &self.resume {
            let active = ActiveRun::resume(file, &tools, &monitor)?;
            return self.measure(active, file, &tools, &monitor, session);
        }
        self.plan_comes_first()?;
        // Read once: the file may be a pipe.
        let (plan, origin) = self.plan.read()?;
        let mut prepared = Prepared::new(self.request(&plan, origin)?)?;
        if !self.dry_run {
            prepared.confirm(&tools, &monitor)?;
        }
        prepared.calibrate(&tools, &monitor)?;
        if self.dry_run {
            return self.print_plan(&prepared, &plan, session);
        }
        for line in summary(&prepared.estimate, prepared.rounds_most(), self.time) {
            progress.say(&line);
        }
        let out = self.out.clone().unwrap_or_else(|| new_name(&plan.name));
        let active = prepared.begin(&out, &tools, &monitor)?;
        self.measure(active, &out, &tools, &monitor, session)
    }

    fn request(&self, plan: &Plan, origin: String) -> Result<Request, Failure> {
        if self.on.is_empty() && self.device.is_empty() {
            return Err(Failure::usage(
                "no place for images: name one with --on DIR or --device DEV",
            ));
        }
        if let Some(lost) = self.erase.iter().find(|path| !self.device.contains(path)) {
            let lost = lost.display();
            return Err(Failure::usage(format!("--erase {lost}: also needs --device {lost}")));
        }
        Ok(Request {
            plan: plan.text.clone(),
            origin,
            quick: self.quick,
            seed: self.seed.unwrap_or_else(random_seed),
            rounds: self.rounds,
            seconds: self.time,
            // Absolute, because `--resume` may be called from another working directory.
            folders: self.on.iter().map(|path| absolute(path)).collect(),
            devices: self.device.clone(),
            ..Request::default()
        })
    }

    /// Refuses a plan's name as the last value of `--on`, `--device` or `--erase`: these options take
    /// every name that follows.
    fn plan_comes_first(&self) -> Result<(), Failure> {
        let places = [("--on", &self.on), ("--device", &self.device), ("--erase", &self.erase)];
        for (option, places) in places.into_iter().filter(|_| !self.plan.is_named()) {
            let name = places.last().and_then(|path| path.to_str()).unwrap_or_default();
            if Plan::named(name).is_ok() {
                return Err(Failure::usage(format!(
                    "{option} takes all names that follow it; the plan comes first: \
                     vdkit lab run {name} {option} …"
                )));
            }
        }
        Ok(())
    }

    fn measure(
        &self,
        active: ActiveRun,
        file: &Path,
        tools: &Tools<'_>,
        monitor: &Monitor<'_>,
        session: &mut Session,
    ) -> Outcome {
        let estimate = active.estimate().clone();
        let run =
            active.run(tools, monitor).map_err(|error| match monitor.cancel.is_cancelled() {
                true => Failure::Told(
                    Exit::Interrupted,
                    "interrupted; the samples so far are saved".to_owned(),
                    Some(format!("to continue: {}", self.resume_command(file))),
                ),
                false => error.into(),
            })?;
        let name = file.display().to_string();
        if self.json.json {
            session.out.json(&answer(
                &run.plan,
                &run.cells,
                &estimate,
                Some(&name),
                run.warnings.len(),
                Some(verdict(&run)),
            ));
        } else {
            print(&run, &mut session.out);
            session.out.line("");
            for line in verdict(&run).lines() {
                session.out.line(line);
            }
            session.out.line("");
            session.out.line(format!("results: {name}"));
        }
        Ok(Exit::Done)
    }

    /// The command line that resumes this run. The user confirms devices again.
    fn resume_command(&self, file: &Path) -> String {
        let mut line = format!("vdkit lab run --resume {}", quoted(&file.display().to_string()));
        for device in &self.erase {
            line.push_str(&format!(" --erase {}", quoted(&device.display().to_string())));
        }
        line
    }

    fn print_plan(&self, prepared: &Prepared, plan: &Plan, session: &mut Session) -> Outcome {
        if self.json.json {
            let summary = plan.summary();
            session.out.json(&answer(&summary, &prepared.cells, &prepared.estimate, None, 0, None));
            return Ok(Exit::Done);
        }
        for cell in &prepared.cells {
            session.out.line(&cell.key);
        }
        for line in summary(&prepared.estimate, prepared.rounds_most(), self.time) {
            session.out.line(line);
        }
        Ok(Exit::Done)
    }
}

/// Parses a duration such as `90s`, `10m` or `2h` into seconds.
fn duration(text: &str) -> Result<u64, String> {
    let units = [("s", 1), ("m", 60), ("h", 3600)];
    let seconds = units.into_iter().find_map(|(unit, seconds)| {
        text.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(seconds)
    });
    seconds
        .filter(|seconds| *seconds > 0)
        .ok_or_else(|| "is not a time such as 90s, 10m or 2h".to_owned())
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn new_name(plan: &str) -> PathBuf {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let time = dates::utc(u32::try_from(now).unwrap_or(u32::MAX));
    let digits: String = time.replace(' ', "-").replace(':', "");
    format!("vdkit-lab-{plan}-{digits}.sqlite").into()
}

/// Formats a duration as a number and its unit.
fn about(seconds: f64) -> (String, &'static str) {
    match seconds {
        short if short < 90.0 => (((short / 5.0).ceil().max(1.0) * 5.0).to_string(), "s"),
        minutes if minutes < 600.0 => (((minutes / 30.0).round() / 2.0).to_string(), "min"),
        long => ((long / 60.0).round().to_string(), "min"),
    }
}

/// Formats the expected duration of a run, including the rounds that it may add while comparisons
/// are undecided.
fn span(least: f64, most: f64) -> String {
    match (about(least), about(most)) {
        (from, to) if from == to => format!("about {} {}", from.0, from.1),
        ((from, unit), (to, same)) if unit == same => format!("about {from} to {to} {unit}"),
        ((from, unit), (to, other)) => format!("about {from} {unit} to {to} {other}"),
    }
}

/// Formats the run's estimate in one line, followed by one line for each other thing that is known
/// before the run. `most` is the largest number of rounds, `given` the time limit that the user
/// set.
fn summary(estimate: &Estimate, most: u32, given: Option<u64>) -> Vec<String> {
    let space: Vec<String> = estimate
        .space
        .iter()
        .map(|(name, needed, free)| {
            format!("{} of {} free on {name}", bytes_short(*needed), bytes_short(*free))
        })
        .collect();
    let space = if space.is_empty() { "no space".to_owned() } else { space.join(", ") };
    let (cells, rounds) = (estimate.cells, estimate.rounds);
    let longest = match given {
        Some(given) => estimate.seconds.max(given as f64),
        None => estimate.seconds_of(most),
    };
    let time = span(estimate.seconds, longest);
    let more = match (most > rounds, given) {
        (true, None) => format!(" (up to {most} while comparisons are undecided)"),
        (true, Some(_)) => " (more while comparisons are undecided)".to_owned(),
        (false, _) => String::new(),
    };
    let (cells, rounds) = (plural(cells, "cell"), plural(rounds as usize, "round"));
    let mut lines = vec![format!("{cells}, {rounds}{more}; {time}; needs {space}")];
    lines.extend(estimate.told.iter().cloned());
    lines
}

fn answer<'a>(
    plan: &'a model::PlanSummary,
    cells: &'a [Cell],
    estimate: &'a Estimate,
    filename: Option<&'a str>,
    warnings: usize,
    verdict: Option<Verdict>,
) -> RunAnswer<'a> {
    let cell = |cell: &'a Cell| {
        let (state, reason) = cell.outcome.state();
        CellAnswer { key: &cell.key, state, reason, values: cell.values(&plan.metric) }
    };
    RunAnswer {
        filename,
        plan: &plan.name,
        metric: &plan.metric,
        rounds: estimate.rounds,
        cells: cells.iter().map(cell).collect(),
        estimated_seconds: estimate.seconds,
        beforehand: &estimate.told,
        warnings,
        verdict,
    }
}

/// Largest number of warnings that are printed.
const WARNINGS: usize = 5;

/// Prints a table with a line for each cell, and the reason for each cell that was not measured.
fn print(run: &Run, out: &mut Output) {
    let metric = model::metric(&run.plan.metric);
    let title = format!(">{}", metric.map_or("", |metric| metric.title));
    let mut heads: Vec<&str> = run.plan.axes.iter().map(String::as_str).collect();
    heads.extend([title.as_str(), "outcome"]);
    let mut table = Table::new(&heads);
    for cell in &run.cells {
        let axes = run.plan.axes.iter().map(|axis| cell.axis(axis).unwrap_or_default().to_owned());
        let values = cell.values(&run.plan.metric);
        let middle = metric.and_then(|metric| Some(value(metric, metric.of_rounds(&values)?)));
        let middle = middle.unwrap_or_else(|| "-".to_owned());
        let (state, reason) = cell.outcome.state();
        let reason = reason.and_then(|reason| reason.lines().next()).unwrap_or_default();
        let told = if reason.is_empty() { state.to_owned() } else { format!("{state}: {reason}") };
        table.row(axes.chain([middle, told]).collect::<Vec<_>>());
    }
    table.print(out, 0);
    for warning in run.warnings.iter().take(WARNINGS) {
        out.line(format!("warning: {}", warning.text));
    }
    if let Some(more @ 1..) = run.warnings.len().checked_sub(WARNINGS) {
        out.line(format!("and {} in the results file", plural(more, "more warning")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_that_may_be_added_are_in_the_time() {
        let estimate = Estimate {
            cells: 2,
            rounds: 3,
            seconds: 66.0,
            each: vec![10.0, 12.0],
            ..Estimate::default()
        };
        let line = |most, given| summary(&estimate, most, given).remove(0);
        assert_eq!(line(3, None), "2 cells, 3 rounds; about 70 s; needs no space");
        assert_eq!(
            line(6, None),
            "2 cells, 3 rounds (up to 6 while comparisons are undecided); about 70 s to 2 min; needs no space"
        );
        let given = line(1000, Some(3600));
        assert!(
            given.contains("(more while comparisons are undecided); about 70 s to 60 min;"),
            "{given}"
        );
        assert_eq!(span(120.0, 240.0), "about 2 to 4 min");
        assert_eq!(span(150.0, 700.0), "about 2.5 to 12 min");
    }
}
