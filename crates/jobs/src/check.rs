//! Checking an image's metadata, and mending it.

use std::path::Path;

use vdkit_block::{CheckReport, Monitor, Repair, Result};
use vdkit_chain::{OpenOptions, Registry, open_image};

/// What a check says, and of what.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The format's name.
    pub format: &'static str,
    /// The findings.
    pub report: CheckReport,
}

/// Checks an image and mends it as far as `repair` says. Nothing that it stands on is opened.
///
/// # Errors
/// What opening returns; [`vdkit_block::Error::Interrupted`]. What is wrong with the image is a
/// result, unless it is so damaged that nothing can be said of it.
pub fn check(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
    repair: Repair,
    monitor: &Monitor<'_>,
) -> Result<Checked> {
    let options = OpenOptions { writable: repair != Repair::Nothing, ..options.clone() };
    let image = open_image(registry, path, &options)?;
    let report =
        image.driver.check(&image.storage, &image.files, repair, &options.limits, monitor)?;
    Ok(Checked { format: image.driver.name(), report })
}
