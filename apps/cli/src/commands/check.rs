//! `vdkit check`: finds an image's faults and repairs them.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs;
use vdkit::{CheckReport, Error, Finding, Repair};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, Opening, ProgressOption, one_of};
use crate::failure::{Exit, Failure, Outcome, Tone, print_line};
use crate::output::{Output, bytes_long, counted};
use crate::runs;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "check",
    about: "Check an image's metadata, and repair it",
    details: "\
Reads all metadata of the image and no guest data. Exit codes: 0 no faults, 3 only leaks (space \
that nothing refers to: harmless), 4 corrupt, 8 not checkable (the file is not what its name says, \
uses a feature that vdkit does not know, or needs more memory than a limit allows). With --repair \
the code is for the faults that remain. Warnings do not change the code.

A repair that would discard guest data because a damaged table no longer refers to it is refused \
without --force. If a table was wiped, clusters that look like its data are kept.",
    examples: "
vdkit check disk.qcow2
vdkit check --repair leaks disk.qcow2   free leaked space
vdkit check --repair all disk.qcow2     repair every fault that can be repaired; make a copy first
",
    ..runs::<CheckArgs>()
};

const REPAIRS: &[(&str, Repair)] = &[("leaks", Repair::Leaks), ("all", Repair::All)];

#[derive(Args, Debug)]
pub struct CheckArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Repair leaks, or every fault that can be repaired
    #[arg(short = 'r', long, value_name = "leaks|all", value_parser = one_of(REPAIRS), hide_possible_values = true)]
    repair: Option<Repair>,
    /// With --repair all: also discard guest data that is unreachable because a table is damaged
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    opening: Opening,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

/// The JSON answer. Keys that qemu-img also has keep its names.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CheckAnswer<'a> {
    filename: String,
    format: &'a str,
    leaks: u64,
    corruptions: u64,
    leaks_fixed: u64,
    corruptions_fixed: u64,
    leaks_kept: u64,
    total_clusters: u64,
    allocated_clusters: u64,
    fragmented_clusters: u64,
    compressed_clusters: u64,
    image_end_offset: u64,
    findings: &'a [Finding],
}

impl CheckArgs {
    fn answer<'a>(&self, format: &'a str, report: &'a CheckReport) -> CheckAnswer<'a> {
        CheckAnswer {
            filename: self.image.display().to_string(),
            format,
            leaks: report.leaks_left(),
            corruptions: report.corruptions_left(),
            leaks_fixed: report.leaks_fixed,
            corruptions_fixed: report.corruptions_fixed,
            leaks_kept: report.leaks_kept,
            total_clusters: report.total_clusters,
            allocated_clusters: report.allocated_clusters,
            fragmented_clusters: report.fragmented_clusters,
            compressed_clusters: report.compressed_clusters,
            image_end_offset: report.image_end_offset,
            findings: &report.findings,
        }
    }
}

/// The exit code, from the faults that remain after the repair.
fn verdict(report: &CheckReport) -> Exit {
    if report.corruptions_left() > 0 {
        Exit::Corrupt
    } else if report.leaks_left() > 0 {
        Exit::Differs
    } else {
        Exit::Done
    }
}

fn print(format: &str, report: &CheckReport, out: &mut Output) {
    let (lines, covered) = runs::lines(&report.findings);
    lines.iter().for_each(|line| out.line(line));
    let found = report.leaks + report.corruptions + report.warnings;
    let unlisted = found.saturating_sub(covered as u64);
    if unlisted > 0 {
        out.line(format!("… and {unlisted} more ({found} in all)"));
    }
    if report.leaks_fixed + report.corruptions_fixed > 0 {
        out.line(format!(
            "repaired: {}, {}",
            counted(report.leaks_fixed, "leaked cluster"),
            counted(report.corruptions_fixed, "error")
        ));
    }
    let (leaks, corruptions) = (report.leaks_left(), report.corruptions_left());
    out.line(match (leaks, corruptions) {
        (0, 0) if format == "raw" => {
            "nothing to check: a raw image has no metadata, and every byte of it may be right".to_owned()
        }
        (0, 0) => "sound: no errors were found".to_owned(),
        (_, 0) if report.leaks_kept > 0 => format!(
            "only leaks: {} that nothing refers to; {} of them were kept, which look like lost tables and \
             their data",
            counted(leaks, "cluster"),
            report.leaks_kept
        ),
        (_, 0) => format!(
            "only leaks: {} that nothing refers to; no data is harmed",
            counted(leaks, "cluster")
        ),
        (0, _) => format!("corrupt: {}", counted(corruptions, "error")),
        _ => format!(
            "corrupt: {}, and {}",
            counted(corruptions, "error"),
            counted(leaks, "leaked cluster")
        ),
    });
    if report.total_clusters > 0 {
        let share = |n: u64, of: u64| if of == 0 { 0.0 } else { n as f64 * 100.0 / of as f64 };
        out.line(format!(
            "{} of {} clusters allocated ({:.1} %), {:.1} % of them fragmented, {:.1} % compressed",
            report.allocated_clusters,
            report.total_clusters,
            share(report.allocated_clusters, report.total_clusters),
            share(report.fragmented_clusters, report.allocated_clusters),
            share(report.compressed_clusters, report.allocated_clusters),
        ));
        out.line(format!("image ends at offset {}", bytes_long(report.image_end_offset)));
    }
}

/// A command that was not tried yet and repairs what remains, or else copies what can be read.
fn hint(report: &CheckReport, repair: Repair, named: Option<&str>, image: &str) -> Option<String> {
    let image = crate::failure::quoted(image);
    let image = named.map_or(image.clone(), |format| format!("-f {format} {image}"));
    match repair {
        Repair::Nothing | Repair::Leaks if report.corruptions_left() > 0 => {
            Some(format!("make a copy of it, then 'vdkit check --repair all {image}'"))
        }
        Repair::Nothing if report.leaks_left() > 0 => {
            Some(format!("'vdkit check --repair leaks {image}' gives the space back"))
        }
        Repair::Leaks | Repair::All if report.leaks_kept > 0 => Some(format!(
            "put the L1 entries right by hand; or 'vdkit check --repair all --force {image}' gives that \
             data up"
        )),
        Repair::All | Repair::AllForced if report.corruptions_left() > 0 => {
            Some(format!("'vdkit convert {image} NEW' copies what can be read to a sound image"))
        }
        _ => None,
    }
}

impl Run for CheckArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let repair = match self.repair {
            Some(Repair::All) if self.force => Repair::AllForced,
            repair => repair.unwrap_or(Repair::Nothing),
        };
        if self.force && repair != Repair::AllForced {
            return Err(Failure::usage("--force is for --repair all"));
        }
        if repair != Repair::Nothing && self.opening.force_share {
            return Err(Failure::usage("an image that another process writes cannot be repaired"));
        }
        let options = self.opening.options();
        let checked = self.progress.run("check", session, |monitor| {
            jobs::check(&vdkit::registry(), &self.image, &options, repair, monitor)
        })?;
        let jobs::Checked { format, report, .. } = checked.map_err(|error| match error {
            Error::Unsupported { .. } | Error::Limit { .. } => {
                Failure::from(error).exiting(Exit::Unchecked, "; so it cannot be checked")
            }
            other => other.into(),
        })?;
        if self.json.json {
            session.out.json(&self.answer(format, &report));
        } else {
            print(format, &report, &mut session.out);
            if let Some(hint) = hint(
                &report,
                repair,
                self.opening.format.as_deref(),
                &self.image.display().to_string(),
            ) {
                session.out.flush();
                print_line(Tone::Hint, &hint);
            }
        }
        Ok(verdict(&report))
    }
}
