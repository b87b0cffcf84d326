//! Which files an image's metadata may cause us to open.

use std::path::PathBuf;

/// Allowed targets of references *inside* images. Names that the user typed are always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RefPolicy {
    /// Files beneath the folder of the referring image.
    #[default]
    OwnFolder,
    /// Files beneath the image's own folder or any of these.
    Folders(Vec<PathBuf>),
    /// None.
    Nothing,
}
