//! `vdkit resize`: changes a disk's size.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs::{self, Preallocation, ResizeOptions, SizeChange};

use super::{Run, Subcommand, runs};
use crate::arguments::{Force, Json, ProgressOption, Writing, one_of, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::guard;
use crate::output::bytes_long;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "resize",
    about: "Enlarge or shrink a disk",
    details: "\
The new part of a larger disk reads as zero. A smaller disk loses the data beyond its new end, so \
it needs --shrink. The guest's partitions and file systems stay as they are.",
    examples: "
vdkit resize disk.qcow2 40G                 to 40 GiB
vdkit resize disk.qcow2 +10G                10 GiB more
vdkit resize --shrink disk.qcow2 -5G        5 GiB less: first shrink the guest's file systems
vdkit resize -f raw disk.img 40G --preallocation falloc
",
    ..runs::<ResizeArgs>()
};

#[derive(Args, Debug)]
pub struct ResizeArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The new size, or with a sign the change of size
    #[arg(value_name = "[+|-]SIZE", value_parser = change, allow_hyphen_values = true)]
    size: SizeChange,
    /// Allow a smaller disk; data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    /// Allocation of the new part: off, metadata, falloc or full
    #[arg(
        long,
        value_name = "MODE",
        value_parser = one_of(MODES),
        default_value = "off",
        hide_default_value = true,
        hide_possible_values = true
    )]
    preallocation: Preallocation,
    #[command(flatten)]
    force: Force,
    #[command(flatten)]
    opening: Writing,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

const MODES: &[(&str, Preallocation)] = &[
    ("off", Preallocation::Off),
    ("metadata", Preallocation::Metadata),
    ("falloc", Preallocation::Falloc),
    ("full", Preallocation::Full),
];

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ResizeAnswer {
    filename: String,
    old_size: u64,
    virtual_size: u64,
}

fn change(text: &str) -> Result<SizeChange, String> {
    SizeChange::parse(text, size)
}

impl Run for ResizeArgs {
    fn run(self, session: &mut Session) -> Outcome {
        if self.shrink {
            let cancel = session.cancel_on_signal()?;
            guard::refuse_dependents(&self.image, self.force.force, "shrinking it", &cancel)?;
        }
        let disk = session.open(&self.image, &self.opening.options())?;
        let old_size = disk.guest_bytes();
        let size = self.size.applied_to(old_size).ok_or_else(|| {
            let old = bytes_long(old_size);
            Failure::usage(format!("a disk of {old} cannot change by that much"))
        })?;
        if size < old_size && !self.shrink {
            return Err(Failure::usage(format!(
                "{}: {} is less than the {} it has, and what lies beyond would be lost",
                disk.name(),
                bytes_long(size),
                bytes_long(old_size)
            ))
            .hint("shrink what is inside first, then repeat this with --shrink"));
        }
        let mut options = ResizeOptions::default();
        options.shrink = self.shrink;
        options.preallocation = self.preallocation;
        let resized = self
            .progress
            .run("resize", session, |monitor| jobs::resize(&disk, size, &options, monitor))?;
        super::closed(&disk, resized)?;
        let (filename, virtual_size) = (self.image.display().to_string(), disk.guest_bytes());
        let answer = ResizeAnswer { filename, old_size, virtual_size };
        self.json.print(&answer, &mut session.out, |answer, out| {
            let [old, new] = [answer.old_size, answer.virtual_size].map(bytes_long);
            out.line(format!("{}: from {old} to {new}", answer.filename))
        });
        Ok(Exit::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_may_be_relative() {
        for (text, bytes) in [("40G", 40 << 30), ("+1K", 1024 + 4096), ("-1K", 4096 - 1024)] {
            assert_eq!(change(text).unwrap().applied_to(4096), Some(bytes), "{text}");
        }
        assert_eq!(SizeChange::Less(4097).applied_to(4096), None);
        assert_eq!(SizeChange::By(u64::MAX).applied_to(1), None);
        assert!(change("++1").is_err() && change("--1").is_err() && change("").is_err());
    }
}
