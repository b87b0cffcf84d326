//! `vdkit rebase`: gives an image another backing image and keeps its content.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, ValueHint};
use vdkit::Monitor;
use vdkit::jobs::{self, NewBacking, RebaseOptions};

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{Json, OpeningForWriting, ProgressOption};
use crate::failure::{Exit, Outcome};
use crate::keys::Keys;
use crate::output::bytes_long;
use crate::session::Session;

/// Entry in the table of subcommands.
pub const COMMAND: Subcommand = Subcommand {
    name: "rebase",
    about: "Give an image another backing image, or none",
    group: Group::Change,
    details: "\
Keeps every byte of the guest disk: where the old and the new backing image differ, the old \
content is copied into the image. With --unsafe only the stored name changes, which is right if \
the backing image was moved or renamed. An image with snapshots is refused without --force, \
because its snapshots also read the backing image. A relative name starts at the image's folder. \
After an interrupt or a crash, run the command again: the result is the same.",
    examples: "
vdkit rebase overlay.qcow2 --backing newer.qcow2             the same disk with another backing image
vdkit rebase overlay.qcow2 --no-backing                      everything in one file
vdkit rebase --unsafe overlay.qcow2 --backing ../base.qcow2  the backing image was moved
",
    augment: augment::<RebaseArgs>,
    run: run::<RebaseArgs>,
};

/// Arguments of `vdkit rebase`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("new").args(["backing", "no_backing"]).required(true))]
pub struct RebaseArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The new backing image, as stored in the image: absolute, or relative to the image's folder
    #[arg(short = 'b', long, value_parser = NonEmptyStringValueParser::new(), value_name = "NEW", value_hint = ValueHint::FilePath)]
    backing: Option<String>,
    /// Format of the new backing image (default: probed from its header)
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<String>,
    /// Remove the backing image: copy its content into the image
    #[arg(long)]
    no_backing: bool,
    /// Change only the stored name; the guest disk may change
    #[arg(short = 'u', long = "unsafe")]
    header_only: bool,
    /// Proceed even if the content of the image's snapshots would change
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    opening: OpeningForWriting,
    #[command(flatten)]
    keys: Keys,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for RebaseArgs {
    const ROW: &'static Subcommand = &COMMAND;

    fn run(self, session: &mut Session) -> Outcome {
        let options = RebaseOptions {
            backing: self.backing.clone().map(|name| NewBacking {
                name,
                format: self.backing_format.clone(),
                open: true,
            }),
            header_only: self.header_only,
            force: self.force,
            compress: false,
            threads: None,
        };
        let progress = self.progress.reporter("rebase");
        let monitor = Monitor { cancel: session.cancel_on_signal()?, progress: &progress };
        let opening = self.keys.apply(self.opening.options());
        let done = jobs::rebase(&vdkit::registry(), &self.image, &opening, &options, &monitor);
        progress.finish();
        let report = done?;
        if self.json.json {
            session.out.json(&report)?;
            return Ok(Exit::Done);
        }
        let on = match &report.backing {
            Some(backing) => format!("stands on {backing}"),
            None => "stands alone".to_owned(),
        };
        session.out.line(format!(
            "{}: {on}; {} compared, {} copied, {} shared, {} made zero",
            self.image.display(),
            bytes_long(report.compared),
            bytes_long(report.copied),
            bytes_long(report.reflinked),
            bytes_long(report.zeroed)
        ))?;
        Ok(Exit::Done)
    }
}
