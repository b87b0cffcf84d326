//! `vdkit rebase`: gives an image another backing image and keeps its content.

use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{ArgGroup, Args, ValueHint};
use vdkit::jobs::{self, NewBacking, RebaseOptions};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, ProgressOption, Writing};
use crate::failure::{Exit, Outcome};
use crate::output::bytes_long;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "rebase",
    about: "Give an image another backing image, or none",
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
    ..runs::<RebaseArgs>()
};

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
    opening: Writing,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for RebaseArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let mut options = RebaseOptions::default();
        options.backing =
            self.backing.clone().map(|name| NewBacking::new(name, self.backing_format.clone()));
        options.header_only = self.header_only;
        options.force = self.force;
        let opening = self.opening.options();
        let report = self.progress.run("rebase", session, |monitor| {
            jobs::rebase(&vdkit::registry(), &self.image, &opening, &options, monitor)
        })??;
        self.json.print(&report, &mut session.out, |report, out| {
            let on = match &report.backing {
                Some(backing) => format!("backing image {backing}"),
                None => "no backing image".to_owned(),
            };
            out.line(format!(
                "{}: {on}; {} compared, {} copied, {} shared, {} made zero",
                self.image.display(),
                bytes_long(report.compared),
                bytes_long(report.copied),
                bytes_long(report.reflinked),
                bytes_long(report.zeroed)
            ))
        });
        Ok(Exit::Done)
    }
}
