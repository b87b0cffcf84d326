//! Other images for a disk that is being served: a new overlay on top, or the top image's content
//! in the image beneath.
//!
//! Both do everything that can fail before they keep clients waiting, and change nothing that the
//! guest reads: a client sees a short wait. What fails leaves the disk as it was.

mod commit;
mod snapshot;

use std::path::Path;

use vdkit_block::{Error, Result};
use vdkit_chain::{Layer, OpenOptions, Registry};
use vdkit_export::{Committed, Export, ImageChain, Images};

/// Exchanges the images of a disk that was opened with these options.
#[derive(Clone, Debug)]
pub struct LiveImages {
    registry: Registry,
    options: OpenOptions,
}

impl LiveImages {
    /// For a disk that was opened so.
    pub fn new(registry: Registry, options: OpenOptions) -> Self {
        Self { registry, options }
    }
}

impl Images for LiveImages {
    fn snapshot_external(&self, export: &Export, overlay: &Path) -> Result<ImageChain> {
        snapshot::snapshot_external(self, export, overlay)
    }

    fn commit(&self, export: &Export, force: bool) -> Result<Committed> {
        commit::commit(self, export, force)
    }
}

/// Whether the data of an image are encrypted.
fn is_encrypted(layer: &Layer) -> bool {
    layer.format().encryption().is_some()
}

/// Refuses changes to a disk that cannot take them.
fn check_writable(export: &Export) -> Result<()> {
    export.check_writable()?;
    if export.disk().writable() {
        return Ok(());
    }
    Err(Error::ReadOnly { file: export.filename() })
}
