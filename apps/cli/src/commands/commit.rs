//! `vdkit commit`: copies an overlay's content into an image of its backing chain.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::Monitor;
use vdkit::jobs::{self, CommitOptions, CommitReport};

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{Force, Json, OpeningForWriting, ProgressOption};
use crate::failure::{Exit, Outcome, Tone, print_line, quoted};
use crate::keys::Keys;
use crate::output::bytes_long;
use crate::session::Session;

/// Entry in the table of subcommands.
pub const COMMAND: Subcommand = Subcommand {
    name: "commit",
    about: "Put what an overlay holds into an image beneath it",
    group: Group::Change,
    details: "\
The image that the overlay stands on gets its content, and the overlay is emptied. With --to it goes to an \
image further down; the overlay then keeps its content, and the images between the two show a mixture and \
should be deleted. A smaller base is made larger first; none is made smaller. Interrupted or cut off by a \
crash, the command can be run again and comes to the same end.",
    examples: "
vdkit commit overlay.qcow2                    into the image it stands on; empties it
vdkit commit --keep overlay.qcow2             leaves the overlay as it is
vdkit commit --to base.qcow2 overlay.qcow2    further down the chain
",
    augment: augment::<CommitArgs>,
    run: run::<CommitArgs>,
};

/// Arguments of `vdkit commit`.
#[derive(Args, Debug)]
pub struct CommitArgs {
    /// The overlay
    #[arg(value_name = "OVERLAY", value_hint = ValueHint::FilePath)]
    overlay: PathBuf,
    /// Commit to this image of the chain instead of the one that the overlay stands on
    #[arg(long, value_name = "BASE", value_hint = ValueHint::FilePath)]
    to: Option<PathBuf>,
    /// Leave the overlay's content where it is as well
    #[arg(long)]
    keep: bool,
    /// Empty the overlay, as is done anyway without --to
    #[arg(long, conflicts_with = "keep")]
    empty: bool,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    opening: OpeningForWriting,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for CommitArgs {
    const ROW: &'static Subcommand = &COMMAND;

    fn run(self, session: &mut Session) -> Outcome {
        let options = CommitOptions {
            to: self.to.clone(),
            empty: match (self.keep, self.empty) {
                (true, _) => Some(false),
                (_, true) => Some(true),
                _ => None,
            },
            force: self.force.force,
            threads: None,
        };
        let progress = self.progress.reporter("commit");
        let monitor = Monitor { cancel: session.cancel_on_signal()?, progress: &progress };
        let opening = self.keys.apply(self.opening.options());
        let done = jobs::commit(&vdkit::registry(), &self.overlay, &opening, &options, &monitor);
        progress.finish();
        let report = done?;
        if self.json.json {
            session.out.json(&report)?;
        } else {
            tell(&report, session)?;
        }
        Ok(Exit::Done)
    }
}

fn tell(report: &CommitReport, session: &mut Session) -> std::io::Result<()> {
    let moved = &report.moved;
    session.out.line(format!(
        "{}: {} written, {} shared, {} made zero{}",
        report.base.display(),
        bytes_long(moved.written),
        bytes_long(moved.reflinked),
        bytes_long(moved.zero_known + moved.zero_found),
        if report.emptied { "; the overlay is empty now" } else { "" }
    ))?;
    session.out.finish()?;
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
    Ok(())
}
