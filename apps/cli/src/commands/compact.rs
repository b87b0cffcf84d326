//! `vdkit compact`: frees an image's unused clusters without changing the guest disk.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs::{self, Compacted};
use vdkit::{CompactOptions, CompactReport};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, OpeningForWriting, ProgressOption};
use crate::failure::{Exit, Outcome};
use crate::output::{Output, bytes_short};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "compact",
    about: "Free unused and zero clusters in place",
    details: "\
Discards clusters of zeroes, moves clusters from the end of the file into free space before them, \
truncates the file, and punches holes into what stays free. The guest disk reads the same at every \
moment, also after a power failure: an interrupted run leaves an image with at most leaks, and the \
next run continues. The command makes no second copy: at most 16 MiB are stored twice. Snapshots \
and bitmaps stay valid.

To free what the guest has deleted, first run fstrim in the guest (with discard=unmap), or fill \
its free space with zeroes.",
    examples: "
vdkit compact disk.qcow2
vdkit compact --no-zero-scan disk.qcow2    uses metadata only, without reading guest data
vdkit compact -f raw disk.img              holes instead of blocks of zeroes
",
    ..runs::<CompactArgs>()
};

#[derive(Args, Debug)]
pub struct CompactArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Do not read guest data to find zeroes
    #[arg(long)]
    no_zero_scan: bool,
    #[command(flatten)]
    opening: OpeningForWriting,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CompactAnswer<'a> {
    filename: String,
    format: &'a str,
    /// Bytes of host space that were freed.
    gained: u64,
    #[serde(flatten)]
    report: &'a CompactReport,
}

fn print(answer: &CompactAnswer<'_>, out: &mut Output) {
    let CompactAnswer { filename, gained, report, .. } = answer;
    out.line(format!(
        "{filename}: {} gained: {} on disk before, {} now; the file's length is {}, was {}",
        bytes_short(*gained),
        bytes_short(report.allocated_before),
        bytes_short(report.allocated_after),
        bytes_short(report.length_after),
        bytes_short(report.length_before),
    ));
    for (count, what) in [
        (report.zero_clusters, "clusters of zeroes dropped"),
        (report.empty_tables, "empty tables dropped"),
        (report.table_clusters, "clusters of longer tables than are needed given back"),
        (report.leaked_clusters, "leaked clusters given back"),
        (report.moved_clusters, "clusters moved"),
    ] {
        if count > 0 {
            out.line(format!("{count} {what}"));
        }
    }
    if report.punched_bytes > 0 {
        out.line(format!("{} of zeroes are holes now", bytes_short(report.punched_bytes)));
    }
    for left in &report.left_alone {
        out.line(format!("{} clusters left where they are: {}", left.clusters, left.what));
    }
}

impl Run for CompactArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let how = CompactOptions::default().zero_scan(!self.no_zero_scan);
        let options = self.opening.options();
        let Compacted { format, report, .. } =
            self.progress.run("compact", session, |monitor| {
                jobs::compact(&vdkit::registry(), &self.image, &options, how, monitor)
            })??;
        let filename = self.image.display().to_string();
        let gained = report.allocated_before.saturating_sub(report.allocated_after);
        let answer = CompactAnswer { filename, format, gained, report: &report };
        self.json.print(&answer, &mut session.out, print);
        Ok(Exit::Done)
    }
}
