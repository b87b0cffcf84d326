//! Options for opening a disk.

use std::path::PathBuf;

use vdkit_block::{CacheMode, Limits, RefPolicy, Secret};

/// Choice of the top image's backing image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackingChoice {
    /// Open the image's own reference, as far as [`OpenOptions::refs`] allows.
    #[default]
    Follow,
    /// Open the image alone: unallocated bytes are holes.
    Ignore,
    /// Open this file instead of the image's reference. The policy does not apply to it, only to
    /// its own references.
    Override {
        /// The file.
        path: PathBuf,
        /// Its format; `None` probes.
        format: Option<String>,
    },
    /// Open these files instead of the images' references: the first backs the top image, the
    /// second backs the first, and so on; the last uses its own reference. An empty list is the
    /// same as [`BackingChoice::Follow`].
    ///
    /// The first file acts as [`BackingChoice::Override`]. Further down, an image must have a
    /// backing reference; if it records a format or an identity, the file must match.
    Parents(Vec<PathBuf>),
    /// Open this image instead of the image's reference, with choices of its own. If it names no
    /// file, the image's reference is opened with these choices, as far as [`OpenOptions::refs`]
    /// allows. Choices nest: they describe a chain down to the last image that they name.
    Image(Box<BackingImage>),
}

/// A backing image with choices of its own: see [`BackingChoice::Image`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackingImage {
    /// The file; `None` is the one that the overlay names.
    pub path: Option<PathBuf>,
    /// Its format; `None` is the one that the overlay records, and probes if it records none.
    pub format: Option<String>,
    /// Its data file, instead of the one that it names.
    pub data_file: Option<PathBuf>,
    /// Whether its files are locked; `None` as other backing images.
    pub lock: Option<bool>,
    /// Its keys, tried before [`OpenOptions::keys`].
    pub keys: Vec<Secret>,
    /// Choice of its own backing image.
    pub backing: BackingChoice,
}

impl BackingImage {
    /// The image that the overlay names, opened as any other.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Options for opening a disk. The default: read-only, with locks, through the page cache,
/// references restricted to each image's own folder. Each field has a method that sets it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenOptions {
    /// The image's format; `None` probes. An image probed as raw is opened read-only: the guest may
    /// have written any header into its first bytes.
    pub format: Option<String>,
    /// Opens the top image (and its data file) for writing. Backing images are read-only.
    pub writable: bool,
    /// Cache mode of every file of the chain.
    pub cache: CacheMode,
    /// Cache mode of the backing images, if it is another one.
    pub backing_cache: Option<CacheMode>,
    /// Policy for references in image metadata.
    pub refs: RefPolicy,
    /// Resource limits on images.
    pub limits: Limits,
    /// Lock files as QEMU does: a writer excludes all others, readers exclude writers.
    pub lock: bool,
    /// Whether backing images are locked, if not as the top image.
    pub backing_lock: Option<bool>,
    /// Choice of the backing image.
    pub backing: BackingChoice,
    /// The top image's data file, instead of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// Open an internal snapshot of the top image, by id or name; read-only.
    pub snapshot: Option<String>,
    /// Keys for all encrypted images of the chain, tried in order for each. (Legacy AES cannot
    /// verify a key: it takes the first.)
    pub keys: Vec<Secret>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            format: None,
            writable: false,
            cache: CacheMode::default(),
            backing_cache: None,
            refs: RefPolicy::default(),
            limits: Limits::default(),
            lock: true,
            backing_lock: None,
            backing: BackingChoice::default(),
            data_file: None,
            snapshot: None,
            keys: Vec::new(),
        }
    }
}

impl OpenOptions {
    /// Options for opening another image beside this one: read-only, with the same references,
    /// limits and keys, and the locks of backing images.
    #[must_use]
    pub fn of_other(&self, format: Option<String>) -> Self {
        Self {
            format,
            refs: self.refs.clone(),
            limits: self.limits,
            lock: self.backing_lock.unwrap_or(self.lock),
            keys: self.keys.clone(),
            ..Self::read_only()
        }
    }

    /// Read-only.
    pub fn read_only() -> Self {
        Self::default()
    }

    /// Read-write.
    pub fn read_write() -> Self {
        Self { writable: true, ..Self::default() }
    }

    /// Sets the format.
    pub fn format(self, format: impl Into<String>) -> Self {
        self.maybe_format(Some(format.into()))
    }

    /// Sets the format; `None` probes.
    pub fn maybe_format(self, format: Option<String>) -> Self {
        Self { format, ..self }
    }

    vdkit_block::setters! {
        /// Sets whether the top image is opened for writing.
        writable: bool,
        /// Sets the cache mode.
        cache: CacheMode,
        /// Sets the cache mode of the backing images; `None` for that of the others.
        backing_cache: Option<CacheMode>,
        /// Sets the policy for references in image metadata.
        refs: RefPolicy,
        /// Sets the resource limits.
        limits: Limits,
        /// Sets whether files are locked.
        lock: bool,
        /// Sets whether backing images are locked; `None` for the same as the top image.
        backing_lock: Option<bool>,
        /// Sets the choice of backing image.
        backing: BackingChoice,
        /// Sets the data file; `None` for the one that the image names.
        data_file: Option<PathBuf>,
        /// Sets the snapshot to open; `None` for the current disk.
        snapshot: Option<String>,
        /// Sets the keys for encrypted images.
        keys: Vec<Secret>,
    }
}
