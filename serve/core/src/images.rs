//! Commands that change the image chain of a served disk. This crate opens no images; the layer
//! above implements [`Images`].

use std::fmt::Debug;
use std::path::Path;

use serde::Serialize;
use vdkit_block::Result;

use crate::export::Export;

/// The image chain after a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ImageChain {
    /// The top image.
    pub filename: String,
    /// The top image and its backing chain, in that order.
    pub chain: Vec<String>,
}

/// Result of a commit.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Committed {
    /// The new image chain.
    #[serde(flatten)]
    pub now: ImageChain,
    /// The former top image, which is empty now.
    pub overlay: String,
    /// Bytes moved; bytes that changed meanwhile count more than once.
    pub moved_bytes: u64,
    /// Wall time.
    pub seconds: f64,
    /// How long clients were blocked at the end.
    pub pause_seconds: f64,
}

/// Changes the image chain.
pub trait Images: Debug + Send + Sync {
    /// Puts a new overlay on the served image and continues with it.
    ///
    /// # Errors
    /// Errors of creating and opening images; the disk is then unchanged.
    fn snapshot_external(&self, export: &Export, overlay: &Path) -> Result<ImageChain>;

    /// Commits the top image to its backing image and continues with that one. `force` allows
    /// damage to dependent images or snapshots.
    ///
    /// # Errors
    /// Errors of opening, reading and writing images, [`vdkit_block::Error::Interrupted`]; the disk
    /// is then unchanged, and the commit can be repeated.
    fn commit(&self, export: &Export, force: bool) -> Result<Committed>;
}
