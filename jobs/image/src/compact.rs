//! Compacting an image in place.

use std::path::Path;

use vdkit_block::{CompactOptions, CompactReport, Monitor, Result};
use vdkit_chain::{OpenOptions, Registry, open_image};

/// Result of a compaction.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Compacted {
    /// The format's name.
    pub format: &'static str,
    /// The compaction's report.
    pub report: CompactReport,
}

/// Frees space that an image does not need. Its backing image is not opened. Guest data stays the
/// same, also after an interruption: run it again.
///
/// # Errors
/// Errors of opening; [`vdkit_block::Error::Corrupt`] for a damaged image;
/// [`vdkit_block::Error::Unsupported`] for a format without compaction;
/// [`vdkit_block::Error::Interrupted`].
pub fn compact(
    registry: &Registry,
    path: impl AsRef<Path>,
    options: &OpenOptions,
    how: CompactOptions,
    monitor: &Monitor<'_>,
) -> Result<Compacted> {
    let options = options.clone().writable(true);
    let image = open_image(registry, path, &options)?;
    let report = image.driver.compact(&image.offline(options.limits, monitor), how)?;
    Ok(Compacted { format: image.driver.name(), report })
}
