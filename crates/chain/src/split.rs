//! A chain cut in two: what lies above an image, and that image with what it stands on.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vdkit_block::{Error, Result};

use crate::disk::{Disk, Layer};
use crate::options::OpenOptions;
use crate::registry::Registry;
use crate::walk::{ChainLink, Walk, describe_chain};

/// A chain in two disks, the lower one open for writing.
#[derive(Debug)]
pub struct Split {
    /// The images above the cut; what they do not hold is a hole. Its top image is writable where
    /// the options asked for it.
    pub above: Disk,
    /// The image below the cut and what it stands on.
    pub base: Disk,
}

/// Describes an image's chain down to `base`, or down to its direct backing image: at least two
/// links. Reads headers only.
///
/// # Errors
/// [`Error::Invalid`] where the image stands on nothing, or not on `base`; as
/// [`describe_chain`], also where the chain breaks before `base`.
pub fn links_down_to(
    registry: &Registry,
    path: &Path,
    base: Option<&Path>,
    options: &OpenOptions,
) -> Result<Vec<ChainLink>> {
    let mut report = describe_chain(registry, path, options)?;
    let count = match base {
        None => Some(2).filter(|_| report.links.len() > 1),
        Some(base) => {
            let mut beneath = report.links.iter().skip(1);
            beneath.position(|link| same_file(&link.path, base)).map(|above| above + 2)
        }
    };
    match (count, report.broken, base) {
        (Some(count), _, _) => {
            report.links.truncate(count);
            Ok(report.links)
        }
        (None, Some(broken), _) => Err(broken),
        (None, None, None) => Err(Error::Invalid(format!(
            "{}: stands on no other image, so there is nothing to commit to",
            path.display()
        ))),
        (None, None, Some(base)) => Err(Error::Invalid(format!(
            "{}: does not stand on {}; 'vdkit info --chain {}' shows on what it does",
            path.display(),
            base.display(),
            path.display()
        ))),
    }
}

/// Opens an image's chain, cut above the last one of `links`.
///
/// # Errors
/// [`Error::Invalid`] where the chain is another one by now, or where the image to be written is
/// recognised only as raw and its overlay does not say that it is; as [`Disk::open`].
pub fn open_split(
    registry: &Registry,
    path: &Path,
    links: &[ChainLink],
    options: &OpenOptions,
) -> Result<Split> {
    let depth = links.len().saturating_sub(1).max(1);
    let mut walk = Walk::new(registry, path, options).also_writing(depth);
    let mut layers: Vec<Layer> = Vec::new();
    while let Some(found) = walk.step()? {
        let here = layers.len();
        if links.get(here).is_some_and(|link| link.path != found.path) {
            return Err(changed(path));
        }
        if here == depth && found.guessed() {
            return Err(Error::Invalid(format!(
                "{}: no header says which format it has, and its overlay names none; if it is raw, have \
                 the overlay say so: 'vdkit rebase --unsafe {} --backing {} --backing-format raw'",
                found.path.display(),
                layers.last().map_or(path, Layer::path).display(),
                found.path.display()
            )));
        }
        let writable = here == depth || (here == 0 && options.writable);
        layers.push(Layer::open(&mut walk, found, writable, options)?);
    }
    if layers.len() <= depth {
        return Err(changed(path));
    }
    let below = layers.split_off(depth);
    let written = OpenOptions { writable: true, ..options.clone() };
    Ok(Split {
        above: Disk::from_layers(layers, options),
        base: Disk::from_layers(below, &written),
    })
}

fn changed(path: &Path) -> Error {
    Error::Invalid(format!(
        "{}: its chain has just been changed by another program",
        path.display()
    ))
}

/// Whether two names are one file.
pub fn same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
