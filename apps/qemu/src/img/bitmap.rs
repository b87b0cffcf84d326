//! `qemu-img bitmap`: changes the persistent dirty bitmaps of an image.

use vdkit::jobs::{bitmaps, merge_bitmap};
use vdkit::{Disk, Error, NewBitmap};

use super::{Command, FORMAT, IMAGE_OPTS, OBJECT, Output, opening};
use crate::failure::{Failure, words};
use crate::getopt::{Parsed, long, valued};
use crate::open::{Access, Named, open};
use crate::secrets::Objects;
use crate::sizes;

pub const COMMAND: Command = Command {
    name: "bitmap",
    about: "Change the dirty bitmaps of an image",
    operands: "FILE BITMAP",
    options: &[
        FORMAT.short_only(),
        IMAGE_OPTS,
        long("add", None, "add BITMAP, which records changes from now on"),
        valued('g', "granularity", "SIZE", "with --add: bytes that one bit stands for"),
        long("remove", None, "remove BITMAP"),
        long("clear", None, "clear all bits of BITMAP"),
        long("enable", None, "let BITMAP record changes"),
        long("disable", None, "stop BITMAP from recording changes"),
        long("merge", Some("SOURCE"), "set the bits in BITMAP that are set in the bitmap SOURCE"),
        valued('b', "source-file", "FILE", "with --merge: the image with SOURCE"),
        valued('F', "source-format", "FMT", "format of the image with SOURCE"),
        OBJECT,
    ],
    run,
};

/// The actions, which are performed in the order in which they are given.
const ACTIONS: &[&str] = &["add", "remove", "clear", "enable", "disable", "merge"];

fn run(parsed: &Parsed, _out: &mut Output) -> Result<u8, Failure> {
    let granularity = parsed
        .last("granularity")
        .map(|text| sizes::size("granularity", text))
        .transpose()?
        // Zero is the default.
        .filter(|bytes| *bytes > 0);
    let [file, name] = &parsed.operands[..] else {
        return Err(Failure::new("Expecting filename and bitmap name"));
    };
    if !parsed.in_order().any(|(option, _)| ACTIONS.contains(&option)) {
        return Err(Failure::new(
            "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
        ));
    }
    if granularity.is_some() && !parsed.has("add") {
        return Err(Failure::new("granularity only supported with --add"));
    }
    if parsed.has("source-format") && !parsed.has("source-file") {
        return Err(Failure::new("-F only supported with -b"));
    }
    if parsed.has("source-file") && !parsed.has("merge") {
        return Err(Failure::new("Merge bitmap source file only supported with --merge"));
    }
    let (objects, image) = opening::image(parsed, file)?;
    let disk = open(&image, Access { alone: true, ..Access::write() }, &objects)?;
    opening::close(&disk, change(parsed, &disk, name, granularity))?;
    Ok(0)
}

fn change(
    parsed: &Parsed,
    disk: &Disk,
    name: &str,
    granularity: Option<u64>,
) -> Result<(), Failure> {
    let source = parsed.last("source-file").map(|text| source(parsed, text)).transpose()?;
    for (action, value) in parsed.in_order().filter(|(option, _)| ACTIONS.contains(option)) {
        act(disk, source.as_ref(), (action, value), name, granularity).map_err(|why| {
            Failure::new(format!("Operation {action} on bitmap {name} failed: {why}"))
        })?;
    }
    Ok(())
}

/// The image with the bitmap to merge, without its backing images.
fn source(parsed: &Parsed, text: &str) -> Result<Disk, Failure> {
    let objects = Objects::of(parsed)?;
    let image = Named { text, format: parsed.last("source-format"), options: false }.parse()?;
    open(&image, Access { alone: true, ..Access::read() }, &objects)
}

/// Performs one action. The error is why it failed.
fn act(
    disk: &Disk,
    source: Option<&Disk>,
    (action, value): (&str, &str),
    name: &str,
    granularity: Option<u64>,
) -> Result<(), String> {
    let why = |error: Error| words(&error);
    if disk.top().bitmaps().is_none() {
        return Err(match action {
            "add" => format!(
                "Can't store persistent bitmaps to {}: Operation not supported",
                disk.name()
            ),
            _ => not_found(name),
        });
    }
    let all = bitmaps(disk).map_err(why)?;
    let state = state_of(disk, name)?;
    match (action, state) {
        ("add", Some(_)) => return Err(format!("Bitmap already exists: {name}")),
        ("add", None) => {
            check_new(name, granularity)?;
            return all.add(&NewBitmap { name, granularity, enabled: true }).map_err(why);
        }
        (_, None) => return Err(not_found(name)),
        ("remove", _) => return all.remove(name).map_err(why),
        (_, Some(true)) => return Err(inconsistent(name)),
        (_, Some(false)) => {}
    }
    match action {
        "clear" => all.clear(name),
        "enable" => all.set_enabled(name, true),
        "disable" => all.set_enabled(name, false),
        _ => {
            let from = source.unwrap_or(disk);
            match state_of(from, value)? {
                None => return Err(not_found(value)),
                Some(true) => return Err(inconsistent(value)),
                Some(false) => {}
            }
            let (bytes, other) = (disk.guest_bytes(), from.guest_bytes());
            if bytes != other {
                return Err(format!(
                    "Bitmaps are of different sizes (destination size is {bytes}, source size is {other}) \
                     and can't be merged"
                ));
            }
            merge_bitmap(disk, name, from, value)
        }
    }
    .map_err(why)
}

fn not_found(name: &str) -> String {
    format!("Dirty bitmap '{name}' not found")
}

fn inconsistent(name: &str) -> String {
    format!(
        "Bitmap '{name}' is inconsistent and cannot be used\nTry block-dirty-bitmap-remove to delete this \
         bitmap from disk"
    )
}

/// Whether a bitmap is there, and inconsistent.
fn state_of(disk: &Disk, name: &str) -> Result<Option<bool>, String> {
    let Some(all) = disk.top().bitmaps() else { return Ok(None) };
    let list = all.list().map_err(|error| words(&error))?;
    Ok(list.iter().find(|one| one.info.name == name).map(|one| one.info.in_use))
}

fn check_new(name: &str, granularity: Option<u64>) -> Result<(), String> {
    const NAME_BYTES_MAX: usize = 1023;
    let fits = |bytes: u64| bytes.is_power_of_two() && (512..=1 << 31).contains(&bytes);
    if granularity.is_some_and(|bytes| !fits(bytes)) {
        return Err("Granularity must be power of 2 and at least 512".to_owned());
    }
    if name.is_empty() {
        return Err("Bitmap name cannot be empty".to_owned());
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(format!("Name length exceeds maximum ({NAME_BYTES_MAX} characters)"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_bitmaps_are_checked_in_qemus_words() {
        let wrong = Some("Granularity must be power of 2 and at least 512".to_owned());
        for granularity in [1000, 256, 4 << 30] {
            assert_eq!(check_new("a", Some(granularity)).err(), wrong);
        }
        for granularity in [None, Some(512), Some(2 << 30)] {
            assert_eq!(check_new("a", granularity), Ok(()));
        }
        assert_eq!(check_new("", None).unwrap_err(), "Bitmap name cannot be empty");
        assert!(check_new(&"x".repeat(1024), None).is_err());
    }
}
