//! `qemu-img rebase`: gives an image another backing image, or none.

use std::path::Path;

use vdkit::jobs::{self, NewBacking, RebaseOptions};
use vdkit::{Error, describe_chain};

use super::{
    CACHE, Command, FORCE_SHARE, FORMAT, IMAGE_OPTS, OBJECT, Output, PROGRESS, QUIET, one_image,
    opening,
};
use crate::failure::{Failure, could_not_open, system_words, words};
use crate::getopt::{Parsed, flag, valued};
use crate::names::Image;
use crate::open::{Access, check_alone, driver, failed_job, failed_open, open_options, registry};
use crate::output::copying;

pub const COMMAND: Command = Command {
    name: "rebase",
    about: "Change the backing image of an image",
    operands: "FILENAME",
    options: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        valued('b', "backing", "BACKING_FILENAME", "the new backing image; \"\" is none"),
        valued('F', "backing-format", "BACKING_FMT", "format of the new backing image"),
        valued('T', "backing-cache", "CACHE", "cache mode of the backing images (writeback)"),
        flag('u', "backing-unsafe", "change the name only"),
        flag('c', "compress", "compress what is copied (qcow2)"),
        FORCE_SHARE,
        OBJECT,
    ],
    run,
};

fn run(parsed: &Parsed, _out: &mut Output) -> Result<u8, Failure> {
    let header_only = parsed.has("backing-unsafe");
    let file = one_image(parsed)?;
    if parsed.last("backing").is_none() && !header_only {
        return Err(Failure::usage("Must specify backing file (-b) or use unsafe mode (-u)"));
    }
    let cache = opening::cache(parsed, "cache", "cache")?.unwrap_or_default();
    let backing_cache = opening::cache(parsed, "backing-cache", "source cache")?;
    let (objects, image) = opening::image(parsed, file)?;
    let Some(path) = image.path() else {
        return Err(could_not_open(&image.typed, "vdkit rebases images in files only"));
    };
    if header_only {
        check_alone(&image)?;
    }
    // `-U` is for the new backing image: nobody else may have the image that is changed open.
    let access = Access { cache, alone: header_only, ..Access::write() };
    let mut opening = open_options(&image, access, &objects)?;
    opening.backing_cache = Some(backing_cache.unwrap_or_default());
    let compress = parsed.has("compress");
    let able = |format| matches!(format, "qcow2" | "qcow" | "vmdk");
    if compress && !opening.format.as_deref().is_some_and(able) {
        return Err(Failure::new("Compression not supported for this file format"));
    }
    // The job takes the lock, and reports a conflict.
    let reading = opening.clone().lock(false);
    let report = describe_chain(&registry(), path, &reading)
        .map_err(|error| failed_open(&image, opening.format.as_deref(), &error))?;
    if let Some(error) = report.broken.filter(|_| !header_only) {
        return Err(failed_open(&image, None, &error));
    }
    let backing = new_backing(parsed, path, header_only)?;
    let mut options = RebaseOptions::default();
    options.backing = backing;
    options.header_only = header_only;
    options.force = true;
    options.compress = compress;
    options.share_backing = parsed.has("force-share");
    let done =
        copying(parsed, |monitor| jobs::rebase(&registry(), path, &opening, &options, monitor))?;
    done.map(|_| 0).map_err(|error| failed(&image, parsed.last("backing").unwrap_or(""), &error))
}

/// The new backing image, if there shall be one.
fn new_backing(
    parsed: &Parsed,
    image: &Path,
    header_only: bool,
) -> Result<Option<NewBacking>, Failure> {
    let format = parsed.last("backing-format");
    let engine = format.map(|name| {
        let found = driver(name).map(|driver| driver.name().to_owned());
        found.ok_or_else(|| Failure::new(format!("Invalid format name: '{name}'")))
    });
    let engine = engine.transpose()?;
    let Some(name) = parsed.last("backing").filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    if engine.is_none() {
        let folder = image.parent().unwrap_or(Path::new(""));
        if !header_only && let Err(error) = folder.join(name).metadata() {
            let why = system_words(&error);
            return Err(Failure::new(format!(
                "Could not open new backing file '{name}': Could not open '{name}': {why}"
            )));
        }
        return Err(Failure::new(format!(
            "Could not change the backing file to '{name}': backing format must be specified"
        )));
    }
    Ok(Some(NewBacking::new(name, engine).open(!header_only)))
}

fn failed(image: &Image, backing: &str, error: &Error) -> Failure {
    match error {
        Error::Unsupported { .. } => Failure::new(format!(
            "Could not change the backing file to '{backing}': Operation not supported"
        )),
        Error::File { file, .. } if file.ends_with(backing) && !backing.is_empty() => {
            Failure::new(format!("Could not open new backing file '{backing}': {}", words(error)))
        }
        other => failed_job(image, "Error while writing to COW image", other),
    }
}
