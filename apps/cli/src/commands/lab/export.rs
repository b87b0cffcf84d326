//! `vdkit lab export`: prints results for other programs.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit_lab::{export, store::Store};

use crate::failure::{Exit, Outcome};
use crate::session::Session;

#[derive(Args, Debug)]
pub struct ExportArgs {
    /// The run's file
    #[arg(value_name = "RUN", value_hint = ValueHint::FilePath)]
    run: PathBuf,
    /// Print the whole run as one JSON object (the default)
    #[arg(long)]
    json: bool,
    /// Print the values as a table, one per line
    #[arg(long, conflicts_with = "json")]
    csv: bool,
}

impl ExportArgs {
    pub(super) fn run(self, session: &mut Session) -> Outcome {
        let run = Store::load(&self.run)?;
        if self.csv {
            let mut bytes = Vec::new();
            export::csv(&run, &mut bytes)?;
            session.out.bytes(&bytes);
        } else {
            session.out.json(&run);
        }
        Ok(Exit::Done)
    }
}
