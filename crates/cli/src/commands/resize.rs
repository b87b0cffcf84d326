//! `vdkit resize`: another size for a disk.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{Json, OpeningForWriting, ProgressOption, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::output::bytes_long;
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "resize",
    about: "Make a disk larger or smaller",
    group: Group::Change,
    details: "\
A larger disk reads as zero where it is new. A smaller one loses what lies beyond its end, for good: that \
needs --shrink. The guest's partitions and file systems are not touched.",
    examples: "
vdkit resize disk.qcow2 40G                 to 40 GiB
vdkit resize disk.qcow2 +10G                10 GiB more
vdkit resize --shrink disk.qcow2 -- -5G     5 GiB less: shrink what is inside first
vdkit resize -f raw disk.img 40G --preallocation falloc
",
    augment: augment::<ResizeArgs>,
    run: run::<ResizeArgs>,
};

/// Arguments of `vdkit resize`.
#[derive(Args, Debug)]
pub struct ResizeArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// The new size, or with a sign what is added or taken away
    #[arg(value_name = "[+|-]SIZE", value_parser = change, allow_hyphen_values = true)]
    size: Change,
    /// Allow a smaller disk: what lies beyond its end is lost
    #[arg(long)]
    shrink: bool,
    /// Space for the new part: off, metadata, falloc or full
    #[arg(long, value_name = "MODE", default_value = "off", hide_default_value = true)]
    preallocation: String,
    #[command(flatten)]
    opening: OpeningForWriting,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

/// What the size on the command line means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    To(u64),
    By(u64),
    Less(u64),
}

fn change(text: &str) -> Result<Change, String> {
    Ok(if let Some(more) = text.strip_prefix('+') {
        Change::By(size(more)?)
    } else if let Some(less) = text.strip_prefix('-') {
        Change::Less(size(less)?)
    } else {
        Change::To(size(text)?)
    })
}
