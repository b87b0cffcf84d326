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

/// What a commit did.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Committed {
    /// What the disk is made of now.
    #[serde(flatten)]
    pub now: ImageChain,
    /// The image that was on top, which holds nothing any more.
    pub overlay: String,
    /// Bytes that were moved, those that changed meanwhile more than once.
    pub moved_bytes: u64,
    /// Wall time.
    pub seconds: f64,
    /// For how long clients waited at the end.
    pub pause_seconds: f64,
}

/// Exchanges images.
pub trait Images: Debug + Send + Sync {
    /// Puts a new overlay on the image that is served, and goes on with it.
    ///
    /// # Errors
    /// What making and opening images returns; the disk is as before then.
    fn snapshot_external(&self, export: &Export, overlay: &Path) -> Result<ImageChain>;

    /// Moves what the top image holds into the one beneath it, and goes on with that one. `force`
    /// also where other images or snapshots would be damaged.
    ///
    /// # Errors
    /// What opening, reading and writing images returns, [`vdkit_block::Error::Interrupted`]; the
    /// disk is as before then, and the commit can be run again.
    fn commit(&self, export: &Export, force: bool) -> Result<Committed>;
}
