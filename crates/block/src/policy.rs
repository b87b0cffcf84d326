//! Which files an image's metadata may make us open.

use std::path::PathBuf;

/// What references found *inside* images may reach. Names that the user typed are always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RefPolicy {
    /// Beneath the folder of the image that names it.
    #[default]
    OwnFolder,
    /// Beneath the image's own folder or any of these.
    Folders(Vec<PathBuf>),
    /// Nowhere.
    Nothing,
}
