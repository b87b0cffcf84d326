//! `vdkit measure`: computes the size of a converted image.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueHint};
use vdkit::Monitor;
use vdkit::jobs;

use super::{Run, Subcommand, runs};
use crate::arguments::{FormatOptions, Json, Reading, size};
use crate::failure::{Exit, Outcome};
use crate::output::{Fields, bytes_long};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "measure",
    about: "Compute how many bytes a converted or new image needs",
    details: "\
Sizes are without compression. 'required' is what the image needs for the current data, 'fully \
allocated' its size after the guest has written every byte.",
    examples: "
vdkit measure disk.raw -O qcow2
vdkit measure --size 100G -O qcow2 -o cluster_size=2M
",
    ..runs::<MeasureArgs>()
};

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("what").args(["source", "size"]).required(true))]
pub struct MeasureArgs {
    /// The image that would be converted
    #[arg(value_name = "SOURCE", value_hint = ValueHint::FilePath)]
    source: Option<PathBuf>,
    /// Measure an empty disk of this size instead
    #[arg(short = 's', long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// Measure this snapshot of the source (an id or a name)
    #[arg(short = 'l', long, value_name = "SNAPSHOT", conflicts_with = "size")]
    snapshot: Option<String>,
    /// Format of the new image
    #[arg(short = 'O', long, value_name = "FORMAT", default_value = "raw")]
    target_format: String,
    #[command(flatten)]
    options: FormatOptions,
    #[command(flatten)]
    opening: Reading,
    #[command(flatten)]
    json: Json,
}

impl Run for MeasureArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let driver = vdkit::format(&self.target_format)?;
        let options = self.options.parse(driver, None, None)?;
        let report = match (&self.source, self.size) {
            (Some(path), _) => {
                let mut opening = self.opening.options();
                opening.snapshot = self.snapshot;
                let disk = session.open(path, &opening)?;
                let monitor = Monitor::default().cancelled_by(session.cancel_on_signal()?);
                jobs::measure(&[disk], driver, &options, &monitor)?
            }
            (None, bytes) => jobs::measure_empty(bytes.unwrap_or(0), driver, &options)?,
        };
        self.json.print(&report, &mut session.out, |report, out| {
            let mut fields = Fields::default();
            fields.add("required", bytes_long(report.required));
            fields.add("fully allocated", bytes_long(report.fully_allocated));
            fields.print(out, 0)
        });
        Ok(Exit::Done)
    }
}
