//! `vdkit lab compare`: one run against another.

use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use vdkit::lab::compare::{Compared, Comparison, compare};
use vdkit::lab::metrics::metric;
use vdkit::lab::model::Run;
use vdkit::lab::{store::Store, words};

use super::failure;
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::output::Output;
use crate::session::Session;

/// Arguments of `vdkit lab compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// The earlier run's file
    #[arg(value_name = "BEFORE", value_hint = ValueHint::FilePath)]
    before: PathBuf,
    /// The later run's file
    #[arg(value_name = "AFTER", value_hint = ValueHint::FilePath)]
    after: PathBuf,
    #[command(flatten)]
    json: Json,
}

impl CompareArgs {
    /// Compares the two. What is worse comes first; it is no failure.
    ///
    /// # Errors
    /// A run cannot be read, or this version does not know its metric.
    pub fn run(self, session: &mut Session) -> Outcome {
        let (before, after) = (load(&self.before)?, load(&self.after)?);
        let comparison = compare(&before, &after).ok_or_else(|| {
            let key = &after.plan.metric;
            Failure::failed(format!("{}: unknown metric '{key}'", self.after.display()))
        })?;
        if self.json.json {
            session.out.json(&comparison)?;
        } else {
            print(&comparison, &mut session.out)?;
        }
        Ok(Exit::Done)
    }
}

fn load(path: &Path) -> Result<Run, Failure> {
    Store::load(path).map_err(|error| failure(&error))
}

fn print(comparison: &Comparison, out: &mut Output) -> std::io::Result<()> {
    for warning in &comparison.warnings {
        out.line(format!("note: {warning}"))?;
    }
    for cell in &comparison.cells {
        out.line(row(cell))?;
    }
    for (keys, when) in [(&comparison.only_before, "before"), (&comparison.only_after, "after")] {
        for key in keys {
            out.line(format!("only {when}  {key}"))?;
        }
    }
    out.line(format!(
        "{} worse, {} better, {} ties; measured: {}",
        comparison.worse, comparison.better, comparison.ties, comparison.metric
    ))
}

/// `worse   0.80x (0.75 to 0.85)  12.3k IOPS -> 9.84k IOPS  backend=ext4/layout=raw`
fn row(cell: &Compared) -> String {
    let said = |number: f64| match metric(cell.metric) {
        Some(metric) => words::value(metric, number),
        None => number.to_string(),
    };
    format!(
        "{:<6}  {}x ({})  {} -> {}  {}",
        cell.verdict,
        words::times(cell.ratio),
        words::span(cell.low, cell.high),
        said(cell.before),
        said(cell.after),
        cell.key
    )
}
