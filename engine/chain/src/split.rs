//! A chain split in two disks: the images above an image, and that image with its backing chain.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vdkit_block::{Error, Result};

use crate::disk::{Disk, Layer};
use crate::options::OpenOptions;
use crate::registry::Registry;
use crate::walk::{ChainLink, Walk, describe_chain};

/// A chain as two disks, the lower one open for writing.
#[derive(Debug)]
pub struct Split {
    /// The images above the split: bytes that they do not hold are holes. The top image is writable
    /// if the options say so.
    pub above: Disk,
    /// The image below the split and its backing chain.
    pub base: Disk,
}

/// Describes an image's chain down to `base`, or to its direct backing image: at least two links.
/// Reads headers only.
///
/// # Errors
/// [`Error::Invalid`] if the image has no backing image, or `base` is not in its chain; as
/// [`describe_chain`], also if the chain breaks before `base`.
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
        (None, None, None) => Err(Error::no_backing(&path.display().to_string())),
        (None, None, Some(base)) => Err(Error::invalid_for(
            &path.display(),
            format!("{} is not in its backing chain", base.display()),
        )),
    }
}

/// Opens an image's chain, split above the last one of `links`.
///
/// # Errors
/// [`Error::Invalid`] if the chain has changed, or if the image to write was only probed as raw and
/// its overlay records no format; as [`Disk::open`].
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
        if here == depth && found.fallback {
            return Err(Error::Unnamed {
                file: found.path.display().to_string(),
                overlay: layers.last().map_or(path, Layer::path).display().to_string(),
            });
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
    Error::invalid_for(&path.display(), "its chain has just been changed by another program")
}

/// Whether two paths are the same file.
pub fn same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}
