//! `qemu-img commit`: copies an overlay's content into an image beneath it.

use std::path::{Path, PathBuf};

use vdkit::jobs::{self, CommitOptions};
use vdkit::{ChainLink, Error, OpenOptions, describe_chain, same_file};

use super::convert::rate_option;
use super::{
    CACHE, Command, FORMAT, IMAGE_OPTS, OBJECT, Output, PROGRESS, QUIET, one_image, opening,
};
use crate::failure::{Failure, could_not_open, words};
use crate::getopt::{Parsed, flag, valued};
use crate::names::Image;
use crate::open::{Access, failed_job, failed_open, open_options, registry};
use crate::output::copying;

pub const COMMAND: Command = Command {
    name: "commit",
    about: "Copy the content of an image into its backing image",
    operands: "FILENAME",
    options: &[
        QUIET,
        PROGRESS,
        FORMAT,
        IMAGE_OPTS,
        CACHE,
        flag('d', "drop", "do not empty the image afterwards"),
        valued('b', "base", "BASE_IMG", "the image of the chain to write to; implies -d"),
        valued('r', "rate", "RATE", "bytes per second at most"),
        OBJECT,
    ],
    run,
};

fn run(parsed: &Parsed, out: &mut Output) -> Result<u8, Failure> {
    let rate = rate_option(parsed)?;
    let file = one_image(parsed)?;
    let cache = opening::cache(parsed, "cache", "cache")?.unwrap_or_default();
    let (objects, image) = opening::image(parsed, file)?;
    let Some(path) = image.path() else {
        return Err(could_not_open(&image.typed, "vdkit commits images in files only"));
    };
    let opening = open_options(&image, Access { cache, ..Access::write() }, &objects)?;
    let links = links(&image, path, &opening)?;
    if links.len() < 2 {
        return Err(Failure::new("Image does not have a backing file"));
    }
    let base = parsed.last("base");
    let to = base.map(|base| found(base, &links, &image.typed)).transpose()?;
    let keep = parsed.has("drop") || base.is_some();
    let mut options = CommitOptions::default();
    options.to = to;
    options.empty = Some(!keep);
    options.force = true;
    options.rate = rate;
    let done =
        copying(parsed, |monitor| jobs::commit(&registry(), path, &opening, &options, monitor))?;
    done.map_err(|error| match &error {
        // It is opened for reading first, and then written to.
        Error::Locked { file, writing: true, .. } if Path::new(file) != path => {
            Failure::new(words(&error))
        }
        other => failed_job(&image, "Block job failed", other),
    })?;
    out.said("Image committed.");
    Ok(0)
}

/// The images of the chain, from the top.
fn links(image: &Image, path: &Path, opening: &OpenOptions) -> Result<Vec<ChainLink>, Failure> {
    let reading = opening.clone().writable(false).lock(false);
    let failed = |error| failed_open(image, opening.format.as_deref(), &error);
    let report = describe_chain(&registry(), path, &reading).map_err(failed)?;
    match report.broken {
        Some(error) => Err(failed(error)),
        None => Ok(report.links),
    }
}

/// The image of the chain that `-b` names: a path, or the name by which the chain refers to it.
fn found(base: &str, links: &[ChainLink], overlay: &str) -> Result<PathBuf, Failure> {
    let beneath = links.windows(2).find(|pair| {
        let referred = pair[0].info.backing_file.as_deref();
        referred == Some(base) || same_file(&pair[1].path, Path::new(base))
    });
    match beneath {
        Some(pair) => Ok(pair[1].path.clone()),
        None => {
            Err(Failure::new(format!("Did not find '{base}' in the backing chain of '{overlay}'")))
        }
    }
}
