//! Commands that exchange the images of a disk that is being served. This crate opens no image:
//! who does, above it, hands itself in.

use std::fmt::Debug;
use std::path::Path;

use serde::Serialize;
use vdkit_block::Result;

use crate::export::Export;

/// What the disk is made of, after a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ImageChain {
    /// The image that is written.
    pub filename: String,
    /// It and what it stands on, in that order.
    pub chain: Vec<String>,
}

/// Exchanges images.
pub trait Images: Debug + Send + Sync {
    /// Puts a new overlay on the image that is served, and goes on with it.
    ///
    /// # Errors
    /// What making and opening images returns; the disk is as before then.
    fn snapshot_external(&self, export: &Export, overlay: &Path) -> Result<ImageChain>;
}
