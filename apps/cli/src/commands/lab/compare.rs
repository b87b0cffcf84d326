//! `vdkit lab compare`: compares two states of a host.

use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use vdkit_lab::compare::{Compared, Comparison, compare};
use vdkit_lab::model::Run;
use vdkit_lab::{store::Store, words};

use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::output::Output;
use crate::session::Session;

#[derive(Args, Debug)]
pub struct CompareArgs {
    /// The earlier run's file
    #[arg(value_name = "BEFORE", value_hint = ValueHint::FilePath)]
    before: PathBuf,
    /// The later run's file
    #[arg(value_name = "AFTER", value_hint = ValueHint::FilePath)]
    after: PathBuf,
    /// More runs of the state before, to estimate how much runs vary (repeatable)
    #[arg(long = "before", num_args = 1.., value_name = "RUN", value_hint = ValueHint::FilePath)]
    more_before: Vec<PathBuf>,
    /// More runs of the state after (repeatable)
    #[arg(long = "after", num_args = 1.., value_name = "RUN", value_hint = ValueHint::FilePath)]
    more_after: Vec<PathBuf>,
    #[command(flatten)]
    json: Json,
}

impl CompareArgs {
    /// Compares the two states and prints cells that became worse first. Worse cells are no failure
    /// of the command.
    ///
    /// # Errors
    /// A run cannot be read, or this version does not know its metric.
    pub fn run(self, session: &mut Session) -> Outcome {
        let all = |first: &Path, more: &[PathBuf]| -> vdkit_lab::Result<Vec<Run>> {
            let paths = std::iter::once(first).chain(more.iter().map(PathBuf::as_path));
            paths.map(Store::load).collect()
        };
        let before = all(&self.before, &self.more_before)?;
        let after = all(&self.after, &self.more_after)?;
        let comparison = compare(&before, &after).ok_or_else(|| {
            let key = after.first().map_or("", |run| run.plan.metric.as_str());
            Failure::failed(format!("{}: unknown metric '{key}'", self.after.display()))
        })?;
        self.json.print(&comparison, &mut session.out, print);
        Ok(Exit::Done)
    }
}

fn print(comparison: &Comparison, out: &mut Output) {
    for warning in &comparison.warnings {
        out.line(format!("note: {warning}"));
    }
    for cell in &comparison.cells {
        out.line(row(cell));
    }
    for (keys, when) in [(&comparison.only_before, "before"), (&comparison.only_after, "after")] {
        for key in keys {
            out.line(format!("only {when}  {key}"));
        }
    }
    out.line(format!(
        "{} worse, {} better, {} not significant; metric: {}",
        comparison.worse, comparison.better, comparison.ties, comparison.metric
    ))
}

/// Formats a cell, such as `worse   0.80x (0.75 to 0.85)  12.3k IOPS -> 9.84k IOPS
/// backend=ext4/layout=raw`. The interval is left out where it is not known (too few rounds, a busy
/// machine).
fn row(cell: &Compared) -> String {
    let said = |number: f64| words::value_of(cell.metric, number);
    let interval = match cell.coverage > 0.0 {
        true => words::span(cell.low, cell.high),
        false => "no interval".to_owned(),
    };
    format!(
        "{:<6}  {}x ({interval})  {} -> {}  {}",
        if cell.verdict == "tie" { "-" } else { cell.verdict },
        words::times(cell.ratio),
        said(cell.before),
        said(cell.after),
        cell.key
    )
}
