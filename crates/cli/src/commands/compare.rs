//! `vdkit compare`: do two images hold the same disk.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{Json, ProgressOption, References};
use crate::failure::{Exit, Outcome};
use crate::output::bytes_long;
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "compare",
    about: "Compare what a guest sees of two images",
    group: Group::Look,
    details: "\
Formats, sizes of clusters and where the bytes lie do not matter. Where one disk is longer, the rest of \
it must read as zero, unless --strict. Exit codes: 0 the same, 3 different.",
    examples: "
vdkit compare disk.raw disk.qcow2
vdkit compare --strict a.qcow2 b.qcow2   sizes must be the same as well
",
    augment: augment::<CompareArgs>,
    run: run::<CompareArgs>,
};

/// Arguments of `vdkit compare`.
#[derive(Args, Debug)]
pub struct CompareArgs {
    /// One image
    #[arg(value_name = "A", value_hint = ValueHint::FilePath)]
    a: PathBuf,
    /// The other
    #[arg(value_name = "B", value_hint = ValueHint::FilePath)]
    b: PathBuf,
    /// Format of A; without it the header is probed
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of B; without it the header is probed
    #[arg(short = 'F', long, value_name = "FORMAT")]
    second_format: Option<String>,
    /// Disks of different sizes differ
    #[arg(short = 's', long)]
    strict: bool,
    /// Read the images even while another process writes them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}
