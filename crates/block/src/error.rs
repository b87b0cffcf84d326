//! One error type for storages and formats, with what a caller needs to act on it.

use std::fmt;
use std::io;

/// The result of every storage and format call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What an I/O request was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoAction {
    /// Opening or creating the file.
    Open,
    /// Reading bytes.
    Read,
    /// Writing bytes.
    Write,
    /// Making bytes read as zero.
    WriteZeroes,
    /// Giving space back.
    Discard,
    /// Allocating space.
    Allocate,
    /// Making written bytes durable.
    Sync,
    /// Changing or asking the length.
    Resize,
    /// Asking where data and holes are.
    Map,
    /// Sharing or copying bytes inside the kernel.
    Copy,
    /// Taking or testing a lock.
    Lock,
    /// Putting a finished file in its place.
    Rename,
}

impl fmt::Display for IoAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "write zeroes",
            Self::Discard => "discard",
            Self::Allocate => "allocate",
            Self::Sync => "sync",
            Self::Resize => "resize",
            Self::Map => "map",
            Self::Copy => "copy",
            Self::Lock => "lock",
            Self::Rename => "rename",
        })
    }
}

/// Damage in an image: where it is, what was found, what would have been right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file, as the user named it.
    pub file: String,
    /// Byte offset in that file of the damaged field or structure.
    pub offset: u64,
    /// The structure in the format's own words, such as "L2 entry".
    pub structure: &'static str,
    /// What is there.
    pub found: String,
    /// What the specification asks for.
    pub expected: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} at offset {:#x}: found {}, expected {}",
            self.file, self.structure, self.offset, self.found, self.expected
        )
    }
}

/// Something that was asked for by an image and that the policy forbids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The file whose metadata asked.
    pub file: String,
    /// What it named.
    pub target: String,
    /// Why it is refused.
    pub reason: String,
    /// What the user may do about it.
    pub hint: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: names '{}': {}; {}", self.file, self.target, self.reason, self.hint)
    }
}

/// Who holds a conflicting lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// Process id.
    pub pid: u32,
    /// Its command line, shortened.
    pub command: String,
}

impl LockHolder {
    /// Whether it is this process, which was given the file twice.
    pub fn is_this_process(&self) -> bool {
        self.pid == std::process::id()
    }

    fn told(&self) -> String {
        match self.is_this_process() {
            true => " by this command itself, which was given it twice".to_owned(),
            false => format!(" by process {} ({})", self.pid, self.command),
        }
    }
}

/// Everything that can go wrong in a storage or a format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A request to the operating system failed.
    #[error("{file}: cannot {action} {len} bytes at offset {offset:#x}: {source}")]
    Io {
        /// The file, as the user named it.
        file: String,
        /// What was being done.
        action: IoAction,
        /// Byte offset in the file.
        offset: u64,
        /// Bytes of the request.
        len: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// A file-level request (open, rename, lock, sync) failed.
    #[error("{file}: cannot {action}: {source}")]
    File {
        /// The file, as the user named it.
        file: String,
        /// What was being done.
        action: IoAction,
        /// The system's answer.
        source: io::Error,
    },
    /// The image is damaged.
    #[error("{0}")]
    Corrupt(Box<Fault>),
    /// The image uses something that vdkit does not know or does not do.
    #[error("{file}: {what}; {hint}")]
    Unsupported {
        /// The file, as the user named it.
        file: String,
        /// What is not supported.
        what: String,
        /// What the user may do about it.
        hint: String,
    },
    /// An encrypted image, and no key or a wrong one.
    #[error("{file}: {what}; {hint}")]
    Key {
        /// The file, as the user named it.
        file: String,
        /// What is wrong about the key.
        what: String,
        /// What the user may do about it.
        hint: String,
    },
    /// The policy on references forbids it.
    #[error("refused: {0}")]
    Refused(Box<Refusal>),
    /// Other images would be damaged by what was asked for.
    #[error("{file}: {what}: {}", dependents.join(", "))]
    Dependents {
        /// The file that was to be changed, as the user named it.
        file: String,
        /// What would become of the others.
        what: String,
        /// The others.
        dependents: Vec<String>,
        /// What the user may do about it.
        hint: String,
    },
    /// The image beneath is another one than the overlay was put on, or its data changed since.
    #[error(
        "{file}: stands on a disk with the identity {expected}, and {parent} has {found}: it was \
         changed since or is another one; if it is right nevertheless, 'vdkit rebase --unsafe \
         {file} --backing {name}' says so"
    )]
    Parent {
        /// The overlay, as the user named it.
        file: String,
        /// The image beneath.
        parent: String,
        /// Its name as the overlay has it.
        name: String,
        /// The identity that the overlay expects.
        expected: String,
        /// The identity that is there.
        found: String,
    },
    /// Another process uses the file.
    #[error("{file}: is in use{}", holder.as_ref().map(LockHolder::told).unwrap_or_default())]
    Locked {
        /// The file, as the user named it.
        file: String,
        /// Who holds the lock, where that can be found out.
        holder: Option<LockHolder>,
    },
    /// Something other than a lock holds the file: it is mounted, or part of a volume.
    #[error("{file}: is in use: {what}")]
    Busy {
        /// The file, as the user named it.
        file: String,
        /// What holds it.
        what: String,
    },
    /// No space left for the request.
    #[error("{file}: no space left: {what}")]
    NoSpace {
        /// The file, as the user named it.
        file: String,
        /// What needed the space.
        what: String,
    },
    /// An image asks for more memory or work than the limits allow.
    #[error("{file}: {what} is {found}, more than the limit of {limit}")]
    Limit {
        /// The file, as the user named it.
        file: String,
        /// What is limited.
        what: &'static str,
        /// What the image asks for.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The caller asked for something impossible.
    #[error("{0}")]
    Invalid(String),
    /// A write to something opened for reading.
    #[error("{file}: opened read-only")]
    ReadOnly {
        /// The file, as the user named it.
        file: String,
    },
    /// The job was cancelled.
    #[error("interrupted")]
    Interrupted,
}

/// The coarse class of an [`Error`], on which exit codes are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Anything without a class of its own.
    Failed,
    /// The caller's fault.
    Usage,
    /// The image is damaged, or its chain is not whole.
    Corrupt,
    /// The policy forbids it.
    Refused,
    /// Another process uses the file.
    Locked,
    /// No space left.
    NoSpace,
    /// Cancelled.
    Interrupted,
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } | Self::File { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
                _ => ErrorKind::Failed,
            },
            Self::Corrupt(_) | Self::Limit { .. } | Self::Parent { .. } => ErrorKind::Corrupt,
            Self::Unsupported { .. } | Self::Key { .. } | Self::ReadOnly { .. } => {
                ErrorKind::Failed
            }
            Self::Refused(_) | Self::Dependents { .. } => ErrorKind::Refused,
            Self::Locked { .. } | Self::Busy { .. } => ErrorKind::Locked,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::Invalid(_) => ErrorKind::Usage,
            Self::Interrupted => ErrorKind::Interrupted,
        }
    }

    /// A fault in an image; see [`Fault`].
    pub fn corrupt(
        file: &str,
        offset: u64,
        structure: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self::Corrupt(Box::new(Fault {
            file: file.to_owned(),
            offset,
            structure,
            found: found.into(),
            expected: expected.into(),
        }))
    }

    /// An I/O error at an offset.
    pub fn io(file: &str, action: IoAction, offset: u64, len: u64, source: io::Error) -> Self {
        Self::Io { file: file.to_owned(), action, offset, len, source }
    }

    /// An encrypted image that was opened without a key.
    pub fn no_key(file: &str, method: &str) -> Self {
        Self::Key {
            file: file.to_owned(),
            what: format!("is encrypted ({method}), and no key is given"),
            hint: "give its key with --key-file FILE, --key-fd N or --key-env NAME".to_owned(),
        }
    }

    /// A new image that shall be encrypted, without a key for it.
    pub fn no_new_key(file: &str) -> Self {
        Self::Key {
            file: file.to_owned(),
            what: "shall be encrypted, and no key is given for it".to_owned(),
            hint: "give one: 'vdkit create' takes --key-file FILE, --key-fd N or --key-env NAME, \
                   commands that read another image --target-key-file and so on"
                .to_owned(),
        }
    }

    /// A feature that vdkit does not support.
    pub fn unsupported(file: &str, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Unsupported { file: file.to_owned(), what: what.into(), hint: hint.into() }
    }
}
