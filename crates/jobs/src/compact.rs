//! Making an image smaller where it lies.

use std::path::Path;

use vdkit_block::{CompactOptions, CompactReport, Monitor, Result};
use vdkit_chain::{OpenOptions, Registry, open_image};

/// What a compaction did, and to what.
#[derive(Clone, Debug)]
pub struct Compacted {
    /// The format's name.
    pub format: &'static str,
    /// What it did.
    pub report: CompactReport,
}

/// Gives back what an image holds and does not need. Nothing that it stands on is opened, and the
/// guest reads the same afterwards, also where this is interrupted: run it again.
///
/// # Errors
/// What opening returns; [`vdkit_block::Error::Corrupt`] for an image that is damaged;
/// [`vdkit_block::Error::Unsupported`] for a format that cannot do it;
/// [`vdkit_block::Error::Interrupted`].
pub fn compact(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
    how: CompactOptions,
    monitor: &Monitor<'_>,
) -> Result<Compacted> {
    let options = OpenOptions { writable: true, ..options.clone() };
    let image = open_image(registry, path, &options)?;
    let report =
        image.driver.compact(&image.storage, &image.files, how, &options.limits, monitor)?;
    Ok(Compacted { format: image.driver.name(), report })
}
