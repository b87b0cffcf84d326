//! `qemu-img resize`: enlarges or shrinks a disk.

use vdkit::jobs::{self, Preallocation, ResizeOptions, SizeChange};
use vdkit::{Disk, Monitor};

use super::{Command, FORMAT, IMAGE_OPTS, OBJECT, Output, QUIET, opening};
use crate::creation::bad_size;
use crate::failure::Failure;
use crate::getopt::{Parsed, long};
use crate::output::cancel_on_signal;
use crate::sizes;

pub const COMMAND: Command = Command {
    name: "resize",
    about: "Enlarge or shrink a disk",
    operands: "FILENAME [+-]SIZE[bkKMGTPE]",
    options: &[
        QUIET,
        FORMAT,
        IMAGE_OPTS,
        long("shrink", None, "allow a smaller disk"),
        long("preallocation", Some("PREALLOC"), "allocation of the new part"),
        OBJECT,
    ],
    run,
};

fn parse_change(text: &str) -> Result<SizeChange, Failure> {
    SizeChange::parse(text, |bytes| sizes::parse(bytes).map_err(|_| bad_size("size")))
}

/// The resulting size of a disk of `old` bytes, if that is a size.
fn changed(old: u64, change: SizeChange) -> Option<u64> {
    change.applied_to(old).filter(|&bytes| bytes > 0 && i64::try_from(bytes).is_ok())
}

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let (name, size) = match &parsed.operands[..] {
        [name, size] => (name, size),
        [] | [_] => return Err(Failure::usage("Expecting image file name and size")),
        _ => return Err(Failure::usage("Extra argument(s) in command line")),
    };
    let preallocation = preallocation(parsed)?;
    let change = parse_change(size)?;
    let disk = opening::disk(parsed, name, true)?;
    opening::close(&disk, resize(&disk, change, preallocation, parsed.has("shrink")))?;
    out.said("Image resized.");
    Ok(0)
}

fn preallocation(parsed: &Parsed) -> Result<Preallocation, Failure> {
    Ok(match parsed.last("preallocation") {
        None | Some("off") => Preallocation::Off,
        Some("metadata") => Preallocation::Metadata,
        Some("falloc") => Preallocation::Falloc,
        Some("full") => Preallocation::Full,
        Some(other) => return Err(Failure::new(format!("Invalid preallocation mode '{other}'"))),
    })
}

fn resize(
    disk: &Disk,
    change: SizeChange,
    preallocation: Preallocation,
    shrink: bool,
) -> Result<(), Failure> {
    let old = disk.guest_bytes();
    let format = disk.layers()[0].info().format;
    let bytes =
        changed(old, change).ok_or_else(|| Failure::new("New image size must be positive"))?;
    if bytes <= old && preallocation != Preallocation::Off {
        return Err(Failure::new("Preallocation can only be used for growing images"));
    }
    if bytes < old && !shrink {
        return Err(Failure::new(
            "Use the --shrink option to perform a shrink operation.\n\
             qemu-img: warning: Shrinking an image will delete all data beyond the shrunken image's \
             end. Before performing such an operation, make sure there is no important data there.",
        ));
    }
    if !matches!(format, "raw" | "qcow2" | "luks") {
        return Err(Failure::new("Image format driver does not support resize"));
    }
    if format == "qcow2" && !bytes.is_multiple_of(512) {
        return Err(Failure::new("The new size must be a multiple of 512"));
    }
    let mut options = ResizeOptions::default();
    options.shrink = shrink;
    options.preallocation = preallocation;
    let monitor = Monitor::default().cancelled_by(cancel_on_signal()?);
    Ok(jobs::resize(disk, bytes, &options, &monitor)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_absolute_or_a_change() {
        let applied = |text: &str| changed(4096, parse_change(text).unwrap());
        assert_eq!(applied("1k"), Some(1024));
        assert_eq!(applied("+1k"), Some(5120));
        assert_eq!(applied("-1k"), Some(3072));
        for text in ["0", "-4096", "-1M", "8E", "+8E"] {
            assert_eq!(applied(text), None, "{text}");
        }
        assert!(parse_change("x").is_err() && parse_change("+x").is_err());
    }
}
