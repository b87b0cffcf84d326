//! What several subcommands do with the options that say how an image is opened.

use vdkit::{CacheMode, Disk};

use crate::failure::{Failure, could_not_open};
use crate::getopt::Parsed;
use crate::names::Image;
use crate::open::{Access, Named, cache_mode, open};
use crate::secrets::Objects;

/// The objects of the command line, and the image that `text` names.
pub fn image(parsed: &Parsed, text: &str) -> Result<(Objects, Image), Failure> {
    let objects = Objects::of(parsed)?;
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
pub fn disk(parsed: &Parsed, text: &str, writable: bool) -> Result<Disk, Failure> {
    let (objects, image) = image(parsed, text)?;
    open(&image, access(parsed, text, writable)?, &objects)
}

/// Closes a disk after work on it. It is closed after a failure too, so that it is marked clean.
pub fn close<T>(disk: &Disk, done: Result<T, Failure>) -> Result<T, Failure> {
    let closed = disk.close();
    let done = done?;
    closed?;
    Ok(done)
}

/// The cache mode that an option names.
///
/// # Errors
/// There is no mode of this name. `what` is QEMU's word for the option.
pub fn cache(parsed: &Parsed, option: &str, what: &str) -> Result<Option<CacheMode>, Failure> {
    let Some(name) = parsed.last(option) else { return Ok(None) };
    let found = cache_mode(name);
    found.map(Some).ok_or_else(|| Failure::new(format!("Invalid {what} option: {name}")))
}
