//! `vdkit convert`: one disk from one format to another.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::{CacheMode, Codec, CompressionSpec};

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::{FormatOptions, Json, ProgressOption, References, cache_mode, size};
use crate::failure::{Exit, Failure, Outcome};
use crate::output::bytes_long;
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "convert",
    about: "Convert an image to another format, or copy it",
    group: Group::Make,
    details: "\
Copies what the guest sees of SOURCE (through its backing chain) into a new image TARGET, the \
cheapest way there is: blocks are shared where the file system can, regions without data are \
skipped, and zeroes are not stored. Several sources are pieces of one disk, one after the other.

TARGET is a new file (put in place only when it is complete), a block device, an existing file with \
--into, or 'null:', which reads everything that is needed and writes nothing. Its format is -O, or \
what its name ends in, or raw.",
    examples: "
vdkit convert disk.raw disk.qcow2
vdkit convert disk.qcow2 -O raw /dev/vg0/guest     onto a block device
vdkit convert --compress=zstd disk.qcow2 small.qcow2
vdkit convert disk.vmdk disk.qcow2 -o cluster_size=1M,preallocation=metadata
vdkit convert a.raw b.raw whole.qcow2              two pieces of one disk
vdkit convert overlay.qcow2 new.qcow2 --backing base.qcow2
                                                   what differs from base.qcow2
vdkit convert disk.qcow2 null:                     how fast can it be read?
",
    augment: augment::<ConvertArgs>,
    run: run::<ConvertArgs>,
};

/// Arguments of `vdkit convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// The image, or the pieces of one disk in their order
    #[arg(value_name = "SOURCE", required = true, num_args = 1.., value_hint = ValueHint::FilePath)]
    sources: Vec<PathBuf>,
    /// The new image, a block device, or null:
    #[arg(value_name = "TARGET", required = true, value_hint = ValueHint::FilePath)]
    target: PathBuf,
    /// Format of the sources; without it their headers are probed
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Format of the target; without it what its name ends in, or raw
    #[arg(short = 'O', long, value_name = "FORMAT")]
    target_format: Option<String>,
    #[command(flatten)]
    options: FormatOptions,
    /// Compress the data: zlib or zstd, with a level if wanted, as in zstd:9
    #[arg(short = 'c', long, value_name = "METHOD[:LEVEL]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = compression)]
    compress: Option<Compress>,
    /// Convert this internal snapshot
    #[arg(short = 'l', long, value_name = "NAME")]
    snapshot: Option<String>,
    /// Make the target an overlay on this image and store only what differs from it
    #[arg(short = 'B', long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    backing: Option<PathBuf>,
    /// Format of the image given with --backing; without it the header is probed
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<String>,
    /// Threads that move and compress; without it one a core
    #[arg(short = 'm', long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Cache mode of the target: writeback, none, writethrough, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", value_parser = cache_mode)]
    cache: Option<CacheMode>,
    /// Cache mode of the sources: writeback or none
    #[arg(short = 'T', long, value_name = "MODE", value_parser = cache_mode)]
    src_cache: Option<CacheMode>,
    /// Look for zeroes in units of SIZE, or not at all with 'off'; without it 4K
    #[arg(short = 'S', long, value_name = "SIZE|off", value_parser = detect_zeros)]
    detect_zeros: Option<DetectZeros>,
    /// Read the target back and compare it with the sources
    #[arg(long)]
    verify: bool,
    /// Write into the existing TARGET instead of making a new one
    #[arg(short = 'n', long)]
    into: bool,
    /// Move at most so many bytes a second
    #[arg(short = 'r', long, value_name = "SIZE", value_parser = size)]
    rate: Option<u64>,
    /// Read the sources even while another process writes them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    references: References,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

/// The value of `--compress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compress {
    /// As the target's options say.
    Default,
    /// This method.
    Method(CompressionSpec),
}

/// The value of `--detect-zeros`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DetectZeros {
    Off,
    Unit(u64),
}

fn compression(text: &str) -> Result<Compress, String> {
    if text.is_empty() {
        return Ok(Compress::Default);
    }
    let (name, level) = match text.split_once(':') {
        Some((name, level)) => (name, Some(level)),
        None => (text, None),
    };
    let (codec, levels) = match name {
        "zlib" | "deflate" => (Codec::Deflate, 1..=12),
        "zstd" => (Codec::Zstd, 1..=22),
        _ => return Err("methods are zlib and zstd".to_owned()),
    };
    let level = match level {
        None => None,
        Some(level) => match level.parse::<i32>() {
            Ok(level) if levels.contains(&level) => Some(level),
            _ => {
                return Err(format!(
                    "levels of {name} are {} to {}",
                    levels.start(),
                    levels.end()
                ));
            }
        },
    };
    Ok(Compress::Method(CompressionSpec { codec, level }))
}

fn detect_zeros(text: &str) -> Result<DetectZeros, String> {
    if text == "off" {
        return Ok(DetectZeros::Off);
    }
    match size(text)? {
        0 => Ok(DetectZeros::Off),
        unit if unit.is_power_of_two() && (512..=1 << 21).contains(&unit) => {
            Ok(DetectZeros::Unit(unit))
        }
        _ => Err("units are powers of two from 512 to 2M, or 'off'".to_owned()),
    }
}
