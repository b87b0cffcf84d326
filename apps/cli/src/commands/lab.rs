//! `vdkit lab`: measures which way to store a guest's disk is best on this host.

use clap::{Args, Subcommand as Actions};

use super::{Run, Subcommand, runs};
use crate::failure::{Exit, Failure, Outcome};
use crate::session::Session;

mod ask;
mod calibrate;
mod compare;
mod export;
mod measure;
mod plans;
mod report;

pub const COMMAND: Subcommand = Subcommand {
    name: "lab",
    about: "Measure which way to store a disk is best on this host",
    details: "\
A plan names choices (format, cluster size, cache mode, server, bus, load). The lab measures each \
combination on each of your places, several times, in random order, together with QEMU's tools. It \
creates images in a new folder below DIR and removes them at the end. The results are one SQLite \
file.

  list                      the built-in plans
  show PLAN                 what a plan measures
  run PLAN --on DIR         measure
  report RUN                the advice with its reasons, as one HTML file
  compare BEFORE AFTER      compare one run with another
  calibrate RUN...          count false differences between unchanged runs on this host
  export RUN                the results for other programs

A device that is mounted or in use is refused. A device is overwritten, so you give its name \
twice: the second time with --erase, or by typing it on a terminal when asked.",
    examples: "
vdkit lab list
vdkit lab run zvol-vs-qcow2 --quick --on /srv/images      a first answer
vdkit lab run cache-modes --on /srv/images /mnt/xfs       a whole plan on two file systems
vdkit lab run zvol-vs-qcow2 --device /dev/vg/test --erase /dev/vg/test
vdkit lab run --resume RUN.sqlite                         continue after an interrupt
vdkit lab report RUN.sqlite                               the advice, tables and charts as one HTML file
vdkit lab compare BEFORE.sqlite AFTER.sqlite              which cells became worse or better
vdkit lab compare B1 A1 --before B2 B3 --after A2 A3      the same with several runs of each state
vdkit lab export RUN.sqlite --csv > values.csv
",
    ..runs::<LabArgs>()
};

#[derive(Args, Debug)]
#[command(
    override_usage = "vdkit lab list|show|run|report|compare|calibrate|export [OPTIONS]",
    subcommand_required = true
)]
pub struct LabArgs {
    #[command(subcommand)]
    action: Action,
}

/// The actions of `vdkit lab`.
#[derive(Actions, Debug)]
enum Action {
    /// List the plans that come with vdkit
    List(plans::ListArgs),
    /// Show what a plan measures
    Show(plans::ShowArgs),
    /// Measure a plan on places
    Run(Box<measure::RunArgs>),
    /// Write a run as one HTML file: the advice, its confidence, tables and charts
    Report(report::ReportArgs),
    /// Compare a run with an earlier one
    Compare(compare::CompareArgs),
    /// Count false differences between unchanged runs
    Calibrate(calibrate::CalibrateArgs),
    /// Print the results of a run for other programs
    Export(export::ExportArgs),
}

impl Run for LabArgs {
    fn run(self, session: &mut Session) -> Outcome {
        match self.action {
            Action::List(arguments) => arguments.run(session),
            Action::Show(arguments) => arguments.run(session),
            Action::Run(arguments) => arguments.run(session),
            Action::Report(arguments) => arguments.run(session),
            Action::Compare(arguments) => arguments.run(session),
            Action::Calibrate(arguments) => arguments.run(session),
            Action::Export(arguments) => arguments.run(session),
        }
    }
}

impl From<vdkit_lab::Error> for Failure {
    fn from(error: vdkit_lab::Error) -> Self {
        if let Some(refusal) = error.refusal() {
            return Self::Told(Exit::Refused, refusal.reason.clone(), Some(refusal.hint.clone()));
        }
        let Some(engine) = error.engine() else { return Self::failed(format!("{error:#}")) };
        let hint = match engine {
            vdkit::Error::NoSpace { .. } => {
                "free space, choose another folder or a larger device, or try --quick"
            }
            vdkit::Error::Locked { .. } => {
                "that process measures this run: wait for its end, or stop it"
            }
            _ => return Self::Told(engine.kind().into(), format!("{error:#}"), None),
        };
        Self::Told(engine.kind().into(), engine.to_string(), Some(hint.to_owned()))
    }
}
