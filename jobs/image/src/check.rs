//! Checking and repairing an image's metadata.

use std::path::Path;

use vdkit_block::{CheckReport, Finding, Monitor, Repair, Result, Severity};
use vdkit_chain::{OpenOptions, Registry, changed_parent, open_image};

/// Result of a check.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Checked {
    /// The format's name.
    pub format: &'static str,
    /// The findings.
    pub report: CheckReport,
}

/// Checks an image, and repairs it as `repair` allows. Its backing image is not opened. If the
/// image records a parent's modification time, a different time causes a warning.
///
/// # Errors
/// Errors of opening; [`vdkit_block::Error::Interrupted`]. Defects of the image are a result,
/// unless it is too damaged to examine.
pub fn check(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
    repair: Repair,
    monitor: &Monitor<'_>,
) -> Result<Checked> {
    let options = options.clone().writable(repair != Repair::Nothing);
    let path = path.as_ref();
    let image = open_image(registry, path, &options)?;
    let mut report = image.driver.check(&image.offline(options.limits, monitor), repair)?;
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
