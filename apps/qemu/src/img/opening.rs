//! What several subcommands do with the options that say how an image is opened.

use vdkit::{CacheMode, Disk};

use crate::failure::{Failure, could_not_open};
use crate::getopt::Parsed;
use crate::names::Image;
use crate::open::{Access, Named, open};
use crate::secrets::Objects;

/// The objects of the command line, and the image that `text` names.
///
/// # Errors
/// As [`Objects::parse`] and [`Named::parse`].
pub fn image(parsed: &Parsed, text: &str) -> Result<(Objects, Image), Failure> {
    let objects = Objects::parse(parsed.all("object"))?;
    Ok((objects, Named::of(parsed, text).parse()?))
}

/// How an image is opened, with `-U`.
///
/// # Errors
/// `-U` for an image that is to be changed.
pub fn access(parsed: &Parsed, text: &str, writable: bool) -> Result<Access, Failure> {
    let share = parsed.has("force-share");
    if share && writable {
        return Err(could_not_open(text, "force-share=on can only be used with read-only images"));
    }
    Ok(Access { writable, share, ..Access::read() })
}

/// Opens the one image of a command, with its backing chain.
///
/// # Errors
/// As [`image`], [`access`] and [`open`].
pub fn disk(parsed: &Parsed, text: &str, writable: bool) -> Result<Disk, Failure> {
    let (objects, image) = image(parsed, text)?;
    open(&image, access(parsed, text, writable)?, &objects)
}

/// A cache mode by QEMU's name; `what` is the option in words.
///
/// # Errors
/// An unknown name.
pub fn cache(mode: Option<&str>, what: &str) -> Result<CacheMode, Failure> {
    match mode {
        None => Ok(CacheMode::Writeback),
        Some("off") => Ok(CacheMode::None),
        Some(name) => name.parse().map_err(|_| Failure::new(format!("Invalid {what}: {name}"))),
    }
}
