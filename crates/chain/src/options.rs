//! What a caller says when it opens a disk.

use std::path::PathBuf;

use vdkit_block::{CacheMode, Limits, RefPolicy, Secret};

/// What is done about the image that the top image stands on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingChoice {
    /// Open what the image names, as far as [`OpenOptions::refs`] allows.
    #[default]
    Follow,
    /// Open the image alone; what it does not hold is a hole.
    Ignore,
    /// Open this instead of what the image names. The user named it, so no policy applies to it
    /// (but to what it names in turn).
    Override {
        /// The file.
        path: PathBuf,
        /// Its format; none probes.
        format: Option<String>,
    },
    /// Open these instead of what the images name: the first beneath the top image, the second
    /// beneath the first, and so on; beneath the last is what it names. An empty list is the same as
    /// [`BackingChoice::Follow`].
    ///
    /// Beneath the top image this is [`BackingChoice::Override`]. Further down, an image must stand
    /// on something; where it notes a format or an identity of that, the file must have it.
    Parents(Vec<PathBuf>),
}

/// How a disk is opened. The default opens for reading, with locks, through the page cache, and
/// lets images name only files beneath their own folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// The format of the image; none probes. An image that was probed as raw is opened for reading
    /// only: the guest may have written anything into its first bytes.
    pub format: Option<String>,
    /// For writing to the top image (and its data file). Backing images are only ever read.
    pub writable: bool,
    /// What is promised about bytes, for every file of the chain.
    pub cache: CacheMode,
    /// Which files the metadata of images may make us open.
    pub refs: RefPolicy,
    /// What images may cost.
    pub limits: Limits,
    /// Keep other processes away as QEMU does: a writer excludes everyone, readers exclude
    /// writers.
    pub lock: bool,
    /// What the top image stands on.
    pub backing: BackingChoice,
    /// The one file with the top image's guest data, instead of the one that the image names.
    pub data_file: Option<PathBuf>,
    /// The top image as one of its internal snapshots holds it, by id or name; for reading only.
    pub snapshot: Option<String>,
    /// Keys for encrypted images, those that the top image stands on included: for each, they are
    /// tried in their order. (Legacy AES cannot tell a right key from a wrong one: it takes the
    /// first.)
    pub keys: Vec<Secret>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            format: None,
            writable: false,
            cache: CacheMode::default(),
            refs: RefPolicy::default(),
            limits: Limits::default(),
            lock: true,
            backing: BackingChoice::default(),
            data_file: None,
            snapshot: None,
            keys: Vec::new(),
        }
    }
}

impl OpenOptions {
    /// How another image is opened beside one that is opened like this: for reading, with the same
    /// references, limits, locks and keys.
    #[must_use]
    pub fn of_other(&self, format: Option<String>) -> Self {
        Self {
            format,
            refs: self.refs.clone(),
            limits: self.limits,
            lock: self.lock,
            keys: self.keys.clone(),
            ..Self::read_only()
        }
    }

    /// For reading.
    pub fn read_only() -> Self {
        Self::default()
    }

    /// For reading and writing.
    pub fn read_write() -> Self {
        Self { writable: true, ..Self::default() }
    }

    /// These options with a format.
    pub fn format(self, format: impl Into<String>) -> Self {
        Self { format: Some(format.into()), ..self }
    }

    /// These options with a cache mode.
    pub fn cache(self, cache: CacheMode) -> Self {
        Self { cache, ..self }
    }

    /// These options with a policy on references.
    pub fn refs(self, refs: RefPolicy) -> Self {
        Self { refs, ..self }
    }

    /// These options with keys for encrypted images.
    pub fn keys(self, keys: Vec<Secret>) -> Self {
        Self { keys, ..self }
    }

    /// These options with another choice of backing image.
    pub fn backing(self, backing: BackingChoice) -> Self {
        Self { backing, ..self }
    }
}
