//! `vdkit amend`: changes an image's options in place.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::jobs;

use super::{Run, Subcommand, runs};
use crate::arguments::{FormatOptions, Json, ProgressOption, Writing};
use crate::failure::{Exit, Failure, Outcome};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "amend",
    about: "Change an image's options in place",
    details: "\
Keeps the guest disk as it is. Options that only a new image can have are refused, with the \
command that creates one. backing_file changes only the stored name, as 'vdkit rebase --unsafe' \
does.

Options that can be changed in a qcow2 image: compat, lazy_refcounts, refcount_bits, \
compression_type (if nothing is compressed), backing_file, backing_fmt, data_file (its name), \
data_file_raw (off), size (larger).",
    examples: "
vdkit amend disk.qcow2 -o compat=1.1,lazy_refcounts=on
vdkit amend disk.qcow2 -o refcount_bits=64               room for more snapshots
vdkit amend disk.qcow2 -o compat=0.10                    for very old software
",
    ..runs::<AmendArgs>()
};

#[derive(Args, Debug)]
pub struct AmendArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    #[command(flatten)]
    options: FormatOptions,
    #[command(flatten)]
    opening: Writing,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

impl Run for AmendArgs {
    fn run(self, session: &mut Session) -> Outcome {
        if self.options.options.is_empty() {
            return Err(Failure::usage("nothing to change is given")
                .hint("'-o KEY=VALUE' says what; 'vdkit formats qcow2' lists the options"));
        }
        let opening = self.opening.options();
        let texts = self.options.options.iter().map(String::as_str);
        let report = self.progress.run("amend", session, |monitor| {
            jobs::amend(&vdkit::registry(), &self.image, &opening, texts, monitor)
        })??;
        self.json.print(&report, &mut session.out, |report, out| {
            let image = self.image.display();
            if report.changed.is_empty() {
                return out.line(format!("{image}: has these options already"));
            }
            out.line(format!("{image}: changed {}", report.changed.join(", ")))
        });
        Ok(Exit::Done)
    }
}
