//! Checking an image's metadata, and mending it.

use std::path::Path;

use vdkit_block::{CheckReport, Finding, Monitor, Repair, Result, Severity};
use vdkit_chain::{OpenOptions, Registry, changed_parent, open_image};

/// What a check says, and of what.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The format's name.
    pub format: &'static str,
    /// The findings.
    pub report: CheckReport,
}

/// Checks an image and mends it as far as `repair` says. Nothing that it stands on is opened, but
/// where it notes the time of that one's file: a warning tells another time.
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
    let path = path.as_ref();
    let image = open_image(registry, path, &options)?;
    let mut report =
        image.driver.check(&image.storage, &image.files, repair, &options.limits, monitor)?;
    let noted = image.info.backing_time;
    if let Some(changed) = noted.and_then(|_| changed_parent(registry, path, &options)) {
        report.add(Finding {
            severity: Severity::Warning,
            offset: changed.noted.offset,
            structure: changed.noted.structure,
            message: changed.to_string(),
            repaired: false,
        });
    }
    Ok(Checked { format: image.driver.name(), report })
}
