//! `vdkit validate`: tests whether a hypervisor or cloud would accept an image.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use vdkit::OpenOptions;
use vdkit::jobs::{Preset, ValidateReport, validate};

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Outcome};
use crate::output::{Output, bytes_long};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "validate",
    about: "Check whether a hypervisor or cloud accepts an image",
    details: "\
Reads the image's header and no other file. The exit code is 3 if the target would refuse the \
image. Each reason comes with the command that fixes it.",
    examples: "
vdkit validate --for azure disk.vhd
vdkit validate --for aws --json disk.vmdk | jq .accepted
",
    ..runs::<ValidateArgs>()
};

#[derive(Args, Debug)]
pub struct ValidateArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The target: kvm, openstack, gcp, aws, azure, vmware, hyperv or virtualbox
    #[arg(long = "for", value_name = "TARGET")]
    target: Preset,
    /// Format of the image (default: probed from its header)
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Read the image even while another process writes it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    json: Json,
}

impl Run for ValidateArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let options = OpenOptions::read_only().maybe_format(self.format).lock(!self.force_share);
        let report = validate(&vdkit::registry(), &self.image, self.target, &options)?;
        self.json.print(&report, &mut session.out, print);
        Ok(if report.accepted { Exit::Done } else { Exit::Differs })
    }
}

fn print(report: &ValidateReport, out: &mut Output) {
    let verdict = if report.accepted { "takes it" } else { "would refuse it" };
    let (image, size) = (report.image.display(), bytes_long(report.virtual_size));
    out.line(format!("{image}: {}, {size}: {} {verdict}", report.format, report.target));
    for objection in &report.objections {
        out.line(format!("  {}", objection.message));
        if let Some(mend) = &objection.mend {
            out.line(format!("    {mend}"));
        }
    }
    for note in &report.notes {
        out.line(format!("  note: {note}"));
    }
}
