//! Changes the image chain of a served disk: adds an overlay, or commits the top image to its
//! backing image.
//!
//! Both do everything that can fail before they block clients, and keep the guest's data the same:
//! a client sees a short wait. On failure the disk is unchanged.

mod commit;
mod snapshot;

use std::path::Path;

use vdkit_block::{Error, Result};
use vdkit_chain::{Layer, OpenOptions, Registry};
use vdkit_serve::{Committed, Export, ImageChain, Images};

/// Changes the images of a disk that was opened with these options.
#[derive(Clone, Debug)]
pub struct LiveImages {
    registry: Registry,
    options: OpenOptions,
}

impl LiveImages {
    /// For a disk opened with `options`.
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

fn is_encrypted(layer: &Layer) -> bool {
    layer.format().encryption().is_some()
}

/// Fails if the disk is read-only, or the parent's of this child of `fork`.
fn check_writable(export: &Export) -> Result<()> {
    export.check_writable()?;
    let disk = export.disk();
    disk.refuse_in_child("exchange the images of")?;
    if disk.writable() {
        return Ok(());
    }
    Err(Error::ReadOnly { file: disk.name().to_owned() })
}
