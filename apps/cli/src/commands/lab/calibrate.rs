//! `vdkit lab calibrate`: counts how often the method reports a difference between equal runs.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit_lab::calibrate::{Tally, calibrate};
use vdkit_lab::{stats, store::Store, words};

use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::session::Session;

#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// Files of runs of one plan with nothing changed between them, oldest first
    #[arg(value_name = "RUN", required = true, value_hint = ValueHint::FilePath)]
    runs: Vec<PathBuf>,
    #[command(flatten)]
    json: Json,
}

impl CalibrateArgs {
    /// Tests the method on the runs and prints the counts. A wrongly reported difference is no
    /// failure of the command.
    ///
    /// # Errors
    /// A run cannot be read, or the runs are of different plans.
    pub fn run(self, session: &mut Session) -> Outcome {
        let runs = self.runs.iter().map(|path| Store::load(path));
        let runs = runs.collect::<vdkit_lab::Result<Vec<_>>>()?;
        for (path, run) in self.runs.iter().zip(&runs) {
            if run.plan.name != runs[0].plan.name {
                return Err(Failure::usage(format!(
                    "{}: a run of the plan '{}', but the first run is of '{}'; all runs must be of one plan",
                    path.display(),
                    run.plan.name,
                    runs[0].plan.name
                )));
            }
        }
        let found = calibrate(&runs);
        if self.json.json {
            session.out.json(&found);
            return Ok(Exit::Done);
        }
        let out = &mut session.out;
        out.line(row("verdicts on copies of one configuration", &found.verdicts));
        out.line(row("one run against another", &found.pairs));
        out.line(row("two or three runs, alternating", &found.turns));
        for tally in [&found.verdicts, &found.pairs, &found.turns] {
            for example in &tally.examples {
                out.line(format!("wrong: {example}"));
            }
        }
        out.line(format!("expected: at most {} of each are wrong", words::percent(stats::ERROR)));
        Ok(Exit::Done)
    }
}

fn row(name: &str, tally: &Tally) -> String {
    let part = match tally.judged {
        0 => String::new(),
        _ => format!(" ({})", words::percent(tally.part())),
    };
    format!("{name:<40}  {} tested, {} wrong{part}", tally.judged, tally.wrong)
}
