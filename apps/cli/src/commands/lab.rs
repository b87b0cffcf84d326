//! `vdkit lab`: measures which way to store a guest's disk is best on this host.

use clap::{Args, Subcommand as Actions};

use super::{Group, Run, Subcommand, augment, run};
use crate::failure::{Exit, Failure, Outcome};
use crate::session::Session;

mod ask;
mod calibrate;
mod compare;
mod export;
mod measure;
mod plans;
mod report;

/// Entry in the table of subcommands.
pub const COMMAND: Subcommand = Subcommand {
    name: "lab",
    about: "Measure which way to store a disk is best on this host",
    group: Group::Look,
    details: "\
A plan names choices (format, cluster size, cache mode, server, bus, load); each combination is measured on \
each place that you give, several times, in random order, beside QEMU's tools. Images are made in a new folder \
beneath DIR, and removed at the end. The results are one SQLite file.

  list                      the plans that come with vdkit
  show PLAN                 what a plan measures
  run PLAN --on DIR         measure
  report RUN                what to use here, and why: one HTML file
  compare BEFORE AFTER      one run against another
  calibrate RUN...          how often equals are called different here
  export RUN                the results for other programs

A device that is mounted or in use is refused. All on a device is lost, so its name is given twice, \
the second time with --erase, or typed when asked for on a terminal.",
    examples: "
vdkit lab list
vdkit lab run zvol-vs-qcow2 --quick --on /srv/images      a first answer
vdkit lab run cache-modes --on /srv/images /mnt/xfs       all of a plan, on two file systems
vdkit lab run zvol-vs-qcow2 --device /dev/vg/test --erase /dev/vg/test
vdkit lab run --resume RUN.sqlite                         go on after an interrupt
vdkit lab report RUN.sqlite                               the verdict, tables and charts, as one HTML file
vdkit lab compare BEFORE.sqlite AFTER.sqlite              what became worse, what better
vdkit lab compare B1 A1 --before B2 B3 --after A2 A3      the same, by several runs of each state
vdkit lab export RUN.sqlite --csv > values.csv
",
    augment: augment::<LabArgs>,
    run: run::<LabArgs>,
};

/// Arguments of `vdkit lab`.
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
    /// Make one HTML file of a run: what to use here, how sure that is, tables and charts
    Report(report::ReportArgs),
    /// Hold a run against an earlier one
    Compare(compare::CompareArgs),
    /// Count how often runs with nothing changed between them are called different
    Calibrate(calibrate::CalibrateArgs),
    /// Print the results of a run for other programs
    Export(export::ExportArgs),
}

impl Run for LabArgs {
    const ROW: &'static Subcommand = &COMMAND;

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

/// Converts the lab's error into the command's, with its exit code.
fn failure(error: &vdkit_lab::Error) -> Failure {
    if let Some(refusal) = error.refusal() {
        return Failure::Told(Exit::Refused, refusal.reason.clone(), Some(refusal.hint.clone()));
    }
    match error.engine() {
        Some(engine @ vdkit::Error::NoSpace { .. }) => {
            let hint =
                "make room, choose another folder or a larger device, or try --quick".to_owned();
            Failure::Told(engine.kind().into(), engine.to_string(), Some(hint))
        }
        Some(engine @ vdkit::Error::Locked { .. }) => {
            let hint = "the run goes on there: wait for its end, or stop that process".to_owned();
            Failure::Told(engine.kind().into(), engine.to_string(), Some(hint))
        }
        Some(engine) => Failure::Told(engine.kind().into(), format!("{error:#}"), None),
        None => Failure::failed(format!("{error:#}")),
    }
}
