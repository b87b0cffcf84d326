//! `vdkit compare`: tests whether two images hold the same guest disk.

use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use vdkit::jobs::{self, CompareOptions, CompareReport};
use vdkit::{Disk, OpenOptions};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, ProgressOption, References};
use crate::failure::{Exit, Failure, Outcome};
use crate::keys::Keys;
use crate::output::bytes_long;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "compare",
    about: "Compare the guest disks of two images",
    details: "\
Compares what a guest reads. Formats, cluster sizes and the location of the bytes do not matter. \
If one disk is longer, the rest of it must read as zero; with --strict the sizes must be equal. \
Exit codes: 0 equal, 3 different.",
    examples: "
vdkit compare disk.raw disk.qcow2
vdkit compare --strict a.qcow2 b.qcow2   sizes must be equal too
vdkit compare --snapshot golden disk.qcow2 disk.qcow2
                                         has anything changed since the snapshot?
",
    ..runs::<CompareArgs>()
};

#[derive(Args, Debug)]
pub struct CompareArgs {
    /// First image
    #[arg(value_name = "A", value_hint = ValueHint::FilePath)]
    a: PathBuf,
    /// Second image
    #[arg(value_name = "B", value_hint = ValueHint::FilePath)]
    b: PathBuf,
    /// Format of A (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of B (default: probed from its header)
    #[arg(short = 'F', long, value_name = "FORMAT")]
    second_format: Option<String>,
    /// Compare this snapshot of A (an id or a name)
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Compare this snapshot of B
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot_b: Option<String>,
    /// Report disks of different sizes as different
    #[arg(short = 's', long)]
    strict: bool,
    /// Read the images even while another process writes them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl CompareArgs {
    fn open(
        &self,
        session: &Session,
        path: &Path,
        format: Option<&String>,
        snapshot: Option<&String>,
    ) -> Result<Disk, Failure> {
        let options = OpenOptions::read_only()
            .maybe_format(format.cloned())
            .snapshot(snapshot.cloned())
            .refs(self.references.policy())
            .lock(!self.force_share);
        session.open(path, &self.keys.apply(options))
    }
}

impl Run for CompareArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let a = self.open(session, &self.a, self.format.as_ref(), self.snapshot.as_ref())?;
        let b =
            self.open(session, &self.b, self.second_format.as_ref(), self.snapshot_b.as_ref())?;
        let mut options = CompareOptions::default();
        options.strict = self.strict;
        let report = self
            .progress
            .run("compare", session, |monitor| jobs::compare(&a, &b, &options, monitor))??;
        self.json.print(&report, &mut session.out, |report, out| out.line(verdict(report)));
        Ok(if report.identical { Exit::Done } else { Exit::Differs })
    }
}

fn verdict(report: &CompareReport) -> String {
    let sizes =
        || format!("sizes are {} and {}", bytes_long(report.a_bytes), bytes_long(report.b_bytes));
    match (report.identical, report.first_difference) {
        (true, _) if report.sizes_differ => {
            format!("identical, but for zeroes at the end: {}", sizes())
        }
        (true, _) => "identical".to_owned(),
        (false, Some(offset)) => format!("different: first at offset {offset} ({offset:#x})"),
        (false, None) => format!("different: {}", sizes()),
    }
}
