//! `qemu-img dd`: copies a part of a disk into a new image.

use vdkit::jobs::{self, DdOptions, DdPlan, NewImage};
use vdkit::{Disk, Monitor, OpenOptions};

use super::convert::is_device;
use super::create::{check_host_device, create_at, refuse_own_source, target_path};
use super::{Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, Output, opening};
use crate::creation::{Wanted, failed_creation, table};
use crate::failure::Failure;
use crate::getopt::{Parsed, valued};
use crate::open::{open, references, registry};
use crate::output::{cancel_on_signal, say};
use crate::secrets::Objects;
use crate::sizes;

pub const COMMAND: Command = Command {
    name: "dd",
    about: "Copy a part of a disk into a new image",
    operands: "[bs=BLOCK_SIZE] [count=BLOCKS] [skip=BLOCKS] if=INPUT of=OUTPUT",
    options: &[
        FORMAT,
        IMAGE_OPTS,
        OBJECT,
        valued('O', "output-format", "OUTPUT_FMT", "format of the output (raw)"),
        FORCE_SHARE,
    ],
    run,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operands<'a> {
    input: Option<&'a str>,
    output: Option<&'a str>,
    block_bytes: u64,
    count: Option<u64>,
    skip: u64,
}

impl<'a> Operands<'a> {
    fn parse(texts: &'a [String]) -> Result<Self, Failure> {
        let mut operands =
            Self { input: None, output: None, block_bytes: 512, count: None, skip: 0 };
        let blocks = |what: &str, text: &str| sizes::number(what, text, 0, i64::MAX as u64);
        for text in texts {
            let (key, value) = text.split_once('=').unwrap_or((text, ""));
            match key {
                "if" => operands.input = Some(value),
                "of" => operands.output = Some(value),
                "bs" => operands.block_bytes = sizes::within("bs", value, 1, i32::MAX as u64)?,
                "count" => operands.count = Some(blocks(key, value)?),
                "skip" => operands.skip = blocks(key, value)?,
                _ => return Err(Failure::new(format!("unrecognized operand {key}"))),
            }
        }
        Ok(operands)
    }

    /// The part of a disk of `bytes` to copy: its start and length. `count` limits the end of the
    /// part before `skip` moves its start. `None` if the start lies behind the end.
    fn part(&self, bytes: u64) -> Option<(u64, u64)> {
        let wanted = self.count.map_or(u64::MAX, |count| count.saturating_mul(self.block_bytes));
        let end = bytes.min(wanted);
        let start = self.skip.saturating_mul(self.block_bytes);
        Some((start, end.checked_sub(start)?))
    }
}

fn run(parsed: &Parsed, _out: &mut Output) -> Result<u8, Failure> {
    let operands = Operands::parse(&parsed.operands)?;
    let (Some(input), Some(output)) = (operands.input, operands.output) else {
        return Err(Failure::new("Must specify both input and output files"));
    };
    let (objects, image) = opening::image(parsed, input)?;
    let source = open(&image, opening::access(parsed, input, false)?, &objects)?;
    let (from, len) = operands.part(source.guest_bytes()).unwrap_or_else(|| {
        say(format_args!("qemu-img: {input}: cannot skip to specified offset"));
        (0, 0)
    });
    let format = parsed.last("output-format").unwrap_or("raw");
    // A block of one byte: the part need not consist of whole sectors.
    let mut options = DdOptions::default();
    options.block_bytes = 1;
    options.count = Some(len);
    options.skip = from;
    options.size_unit = 512;
    copy(&source, &options, output, format, &objects)?;
    Ok(0)
}

/// Copies into the new image `name`.
fn copy(
    source: &Disk,
    dd: &DdOptions,
    name: &str,
    format: &str,
    objects: &Objects,
) -> Result<(), Failure> {
    let table = table(format).map_err(unnamed_format)?;
    let path = target_path(name)?;
    let creating = format!("{name}: error while creating output image");
    let within = |failure: Failure| failure.within(&creating);
    let bytes = dd.count.unwrap_or(0).next_multiple_of(512);
    let driver = table.driver()?;
    check_host_device(table, &path).map_err(within)?;
    let options = Wanted::new(table, Vec::new())?.options(objects, bytes).map_err(within)?;
    let monitor = Monitor::default().cancelled_by(cancel_on_signal()?);
    let format = driver.name().to_owned();
    if !is_device(&path) {
        refuse_own_source(&path, source.layers().iter().map(|layer| layer.path()))?;
        let new = NewImage::new(path.clone(), format).options(options).in_place_if_needed(true);
        return jobs::dd_new(&registry(), source, &new, dd, &monitor)
            .map(drop)
            .map_err(|error| within(failed_creation(&path, &error)));
    }
    if format != "raw" {
        create_at(&path, driver, bytes, options, None).map_err(within)?;
    }
    let opening = OpenOptions::read_write().format(&format).refs(references());
    let target = Disk::open(&registry(), &path, &opening)?;
    let plan = DdPlan::new(source.guest_bytes(), dd)?;
    let copied = plan.run(source, &target, dd, &monitor);
    opening::close(&target, copied.map(drop).map_err(Failure::from))
}

/// QEMU's `dd` does not name the format that it does not know.
fn unnamed_format(failure: Failure) -> Failure {
    match failure.text.starts_with("Unknown file format") {
        true => Failure::new("Unknown file format"),
        false => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_ends_the_part_and_skip_starts_it() {
        let part = |line: &str| {
            let texts: Vec<_> = line.split(' ').map(str::to_owned).collect();
            Operands::parse(&texts).unwrap().part(10 << 20)
        };
        assert_eq!(part("bs=1M count=3 skip=1"), Some((1 << 20, 2 << 20)));
        assert_eq!(part("bs=1M count=1 skip=1"), Some((1 << 20, 0)));
        assert_eq!(part("bs=1M skip=10"), Some((10 << 20, 0)));
        assert_eq!(part("bs=1M skip=12"), None);
        assert_eq!(part("bs=1000 count=3"), Some((0, 3000)));
        for (operand, words) in
            [("count=1M", "Invalid count specified: '1M'."), ("foo", "unrecognized operand foo")]
        {
            assert_eq!(Operands::parse(&[operand.to_owned()]).unwrap_err().text, words);
        }
    }
}
