//! `vdkit commit`: copies an overlay's content into an image of its backing chain.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::jobs::{self, CommitOptions, CommitReport};

use super::{Run, Subcommand, runs};
use crate::arguments::{Force, Json, ProgressOption, Writing};
use crate::failure::{Exit, Outcome, Tone, print_line, quoted};
use crate::output::{Output, bytes_long};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "commit",
    about: "Copy an overlay's content into its backing image",
    details: "\
Copies the overlay's content into its backing image and empties the overlay. With --to the content \
goes to an image further down the chain. The overlay then keeps its content; the images between \
the two no longer show a consistent disk, and should be deleted. A smaller base image is enlarged \
first; no base image is made smaller. After an interrupt or a crash, run the command again: the \
result is the same.",
    examples: "
vdkit commit overlay.qcow2                    into its backing image; empties the overlay
vdkit commit --keep overlay.qcow2             keeps the overlay as it is
vdkit commit --to base.qcow2 overlay.qcow2    further down the chain
",
    ..runs::<CommitArgs>()
};

#[derive(Args, Debug)]
pub struct CommitArgs {
    /// The overlay
    #[arg(value_name = "OVERLAY", value_hint = ValueHint::FilePath)]
    overlay: PathBuf,
    /// Commit to this image of the chain instead of the overlay's own backing image
    #[arg(long, value_name = "BASE", value_hint = ValueHint::FilePath)]
    to: Option<PathBuf>,
    /// Keep the overlay's content too
    #[arg(long)]
    keep: bool,
    /// Empty the overlay afterwards (the default without --to)
    #[arg(long, conflicts_with = "keep")]
    empty: bool,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    opening: Writing,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for CommitArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let mut options = CommitOptions::default();
        options.to = self.to.clone();
        options.empty = match (self.keep, self.empty) {
            (true, _) => Some(false),
            (_, true) => Some(true),
            _ => None,
        };
        options.force = self.force.force;
        let opening = self.opening.options();
        let report = self.progress.run("commit", session, |monitor| {
            jobs::commit(&vdkit::registry(), &self.overlay, &opening, &options, monitor)
        })??;
        self.json.print(&report, &mut session.out, print);
        Ok(Exit::Done)
    }
}

fn print(report: &CommitReport, out: &mut Output) {
    let moved = &report.moved;
    out.line(format!(
        "{}: {} written, {} shared, {} made zero{}",
        report.base.display(),
        bytes_long(moved.written),
        bytes_long(moved.reflinked),
        bytes_long(moved.zero_known + moved.zero_found),
        if report.emptied { "; the overlay is empty now" } else { "" }
    ));
    out.flush();
    for image in &report.invalidated {
        print_line(
            Tone::Warning,
            &format!("{}: shows a mixture of old and new from now on", image.display()),
        );
    }
    if !report.invalidated.is_empty() {
        let (overlay, base) = (report.overlay.display(), report.base.display());
        let command = format!(
            "vdkit rebase --unsafe {} --backing {}",
            quoted(&overlay.to_string()),
            quoted(&base.to_string())
        );
        print_line(
            Tone::Hint,
            &format!("'{command}' puts the overlay on the base; then delete what was between"),
        );
    }
}
