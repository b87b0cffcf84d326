//! `qemu-img compare`: whether two images have the same content.

use vdkit::jobs::{self, CompareOptions};
use vdkit::{Disk, Monitor, Progress as Sink};

use super::map::each_row;
use super::{Command, FORCE_SHARE, IMAGE_OPTS, OBJECT, Output, PROGRESS, QUIET, opening};
use crate::failure::Failure;
use crate::getopt::{Parsed, alias, flag, valued};
use crate::open::{Access, Named, open};
use crate::output::{Progress, cancel_on_signal};
use crate::secrets::Objects;

pub const COMMAND: Command = Command {
    name: "compare",
    about: "Compare the contents of two images",
    operands: "FILE1 FILE2",
    options: &[
        QUIET,
        PROGRESS,
        valued('f', "a-format", "FMT", "format of FILE1"),
        alias("left-format", "a-format"),
        valued('F', "b-format", "FMT", "format of FILE2"),
        alias("right-format", "b-format"),
        IMAGE_OPTS,
        flag('s', "strict", "sizes and allocation must be equal too"),
        valued('T', "cache", "CACHE", "cache mode of both images (writeback)"),
        FORCE_SHARE,
        OBJECT,
    ],
    run,
};

const DIFFERENT: u8 = 1;
/// An image cannot be opened.
const NOT_OPENED: u8 = 2;
/// A map cannot be read.
const NOT_MAPPED: u8 = 3;
/// Bytes cannot be read.
const NOT_READ: u8 = 4;
/// Differences are found in this unit.
const SECTOR_BYTES: u64 = 512;

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let [first, second] = &parsed.operands[..] else {
        return Err(Failure::usage("Expecting two image file names"));
    };
    let not_opened = |failure: Failure| failure.code(NOT_OPENED);
    let objects = Objects::of(parsed).map_err(not_opened)?;
    let cache = opening::cache(parsed, "cache", "source cache").map_err(not_opened)?;
    let cache = cache.unwrap_or_default();
    let access = Access { share: parsed.has("force-share"), cache, ..Access::read() };
    let disk = |text: &str, format: &str| -> Result<Disk, Failure> {
        let options = parsed.has("image-opts");
        let named = Named { text, format: parsed.last(format), options };
        open(&named.parse()?, access, &objects)
    };
    let a = disk(first, "a-format").map_err(not_opened)?;
    let b = disk(second, "b-format").map_err(not_opened)?;
    let strict = parsed.has("strict");
    let progress = Progress::of(parsed)?;
    let ended = compare(&a, &b, strict, &progress, out);
    out.flush();
    progress.finish(false);
    ended
}

fn compare(
    a: &Disk,
    b: &Disk,
    strict: bool,
    progress: &Progress,
    out: &mut Output,
) -> Result<u8, Failure> {
    let sizes = [a, b].map(|disk| disk.guest_bytes().next_multiple_of(SECTOR_BYTES));
    if strict && sizes[0] != sizes[1] {
        out.said("Strict mode: Image size mismatch!");
        return Ok(DIFFERENT);
    }
    let monitor = Monitor::new(progress).cancelled_by(cancel_on_signal()?);
    let options = CompareOptions::default();
    let report = jobs::compare(a, b, &options, &monitor)
        .map_err(|error| Failure::from(error).code(NOT_READ))?;
    let different = report.first_difference.map(|at| at / SECTOR_BYTES * SECTOR_BYTES);
    if strict {
        let other = other_allocation(a, b).map_err(|failure| failure.code(NOT_MAPPED))?;
        if let Some(at) = other.filter(|at| different.is_none_or(|different| *at <= different)) {
            out.said(format!("Strict mode: Offset {at} block status mismatch!"));
            return Ok(DIFFERENT);
        }
    }
    let common = sizes[0].min(sizes[1]);
    if sizes[0] != sizes[1] && different.is_none_or(|at| at >= common) {
        out.said("Warning: Image size mismatch!");
    }
    if let Some(at) = different {
        out.said(format!("Content mismatch at offset {at}!"));
        return Ok(DIFFERENT);
    }
    let total = report.a_bytes.max(report.b_bytes).max(1);
    out.flush();
    progress.update(total, total);
    out.said("Images are identical.");
    Ok(0)
}

/// The first byte that one disk allocates, or knows to be zero, and the other does not.
fn other_allocation(a: &Disk, b: &Disk) -> Result<Option<u64>, Failure> {
    let (a, b) = (kinds(a)?, kinds(b)?);
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    let mut at = 0;
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        if x.1 != y.1 {
            return Ok(Some(at));
        }
        at = x.0.min(y.0);
        a.next_if(|run| run.0 == at);
        b.next_if(|run| run.0 == at);
    }
    Ok(None)
}

/// The end of each run of a disk, and what is known of it: data, zero, present, compressed, and
/// whether it reaches the end of a raw file.
fn kinds(disk: &Disk) -> Result<Vec<(u64, [bool; 5])>, Failure> {
    let mut kinds = Vec::new();
    each_row(disk, 0, disk.guest_bytes(), &mut |row| {
        let format = disk.layers()[row.depth].format();
        let last = format.name() == "raw" && row.end() == format.guest_bytes();
        kinds.push((row.end(), [row.data, row.zero, row.present, row.compressed, last]));
        Ok(())
    })?;
    Ok(kinds)
}
