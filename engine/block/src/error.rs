//! The error type of storages and formats.

use std::fmt;
use std::io;

use crate::remedy::Remedy;

/// The result of every storage and format call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failed operation of an I/O error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IoAction {
    /// Opening the file.
    Open,
    /// Creating the file.
    Create,
    /// Reading bytes.
    Read,
    /// Writing bytes.
    Write,
    /// Making bytes read as zero.
    WriteZeroes,
    /// Discarding.
    Discard,
    /// Allocating space.
    Allocate,
    /// Making written bytes durable.
    Sync,
    /// Changing or querying the length.
    Resize,
    /// Querying data and holes.
    Map,
    /// Sharing or copying blocks in the kernel.
    Copy,
    /// Taking or testing a lock.
    Lock,
    /// Renaming a finished file into place.
    Rename,
    /// Starting threads for requests.
    Start,
}

impl fmt::Display for IoAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "open",
            Self::Create => "create",
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
            Self::Start => "start threads for it",
        })
    }
}

/// Damage in an image: location, value found, value expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The file, as the user named it.
    pub file: String,
    /// Byte offset in that file of the damaged field or structure.
    pub offset: u64,
    /// The structure in the format's own words, such as "L2 entry".
    pub structure: &'static str,
    /// The value found.
    pub found: String,
    /// The value that the specification requires.
    pub expected: String,
    /// What the user can do about it, if that is known.
    pub remedy: Option<Remedy>,
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

/// A reference in an image that the policy forbids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The file whose metadata holds the reference.
    pub file: String,
    /// The target of the reference.
    pub target: String,
    /// Why it is refused.
    pub reason: String,
    /// What the user can do about it.
    pub remedy: Remedy,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: names '{}': {}; {}", self.file, self.target, self.reason, self.remedy)
    }
}

/// The process that holds a conflicting lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// Process id.
    pub pid: u32,
    /// Its command line, shortened.
    pub command: String,
}

impl LockHolder {
    /// Whether it is this process (the same file was opened twice).
    pub fn is_this_process(&self) -> bool {
        self.pid == std::process::id()
    }

    fn phrase(&self) -> String {
        match self.is_this_process() {
            true => " by this program itself, which opened it twice".to_owned(),
            false => format!(" by process {} ({})", self.pid, self.command),
        }
    }
}

/// Errors of storages and formats.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An I/O request on a byte range failed.
    #[error("{file}: cannot {action} {len} bytes at offset {offset:#x}: {}", plain(source))]
    Io {
        /// The file, as the user named it.
        file: String,
        /// The failed operation.
        action: IoAction,
        /// Byte offset in the file.
        offset: u64,
        /// Bytes of the request.
        len: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A file-level request (open, rename, lock, sync) failed.
    #[error("{file}: cannot {action}: {}", plain(source))]
    File {
        /// The file, as the user named it.
        file: String,
        /// The failed operation.
        action: IoAction,
        /// The system's error.
        source: io::Error,
    },
    /// A file that an image names cannot be opened.
    #[error("{file}: cannot open: {}; '{namer}' names it as its {role}", plain(source))]
    Reference {
        /// The file.
        file: String,
        /// The image that names it.
        namer: String,
        /// What the file is to the image, such as "backing file".
        role: &'static str,
        /// The system's error.
        source: io::Error,
        /// What the user can do about it.
        remedy: Box<Remedy>,
    },
    /// The image is damaged.
    #[error("{0}")]
    Corrupt(Box<Fault>),
    /// The image uses a feature that vdkit does not support.
    #[error("{file}: {what}; {remedy}")]
    Unsupported {
        /// The file, as the user named it.
        file: String,
        /// What is not supported.
        what: String,
        /// What the user can do about it.
        remedy: Box<Remedy>,
    },
    /// An encrypted image was opened without a key or with a wrong one.
    #[error("{file}: {what}; {remedy}")]
    Key {
        /// The file, as the user named it.
        file: String,
        /// The problem with the key.
        what: String,
        /// What the user can do about it.
        remedy: Box<Remedy>,
    },
    /// The reference policy forbids it.
    #[error("refused: {0}")]
    Refused(Box<Refusal>),
    /// The operation would damage dependent images.
    #[error("{file}: {what}: {}", dependents.join(", "))]
    Dependents {
        /// The file to change, as the user named it.
        file: String,
        /// How the dependents would be damaged.
        what: String,
        /// The dependent images.
        dependents: Vec<String>,
        /// What the user can do about it.
        remedy: Box<Remedy>,
    },
    /// The backing image is not the one that the overlay was created on, or its data changed since.
    #[error(
        "{file}: records the identity {expected} for its backing image, but {parent} has {found}: \
         that was changed since, or is another image"
    )]
    Parent {
        /// The overlay, as the user named it.
        file: String,
        /// The backing image.
        parent: String,
        /// The backing file name that the overlay stores.
        name: String,
        /// The identity that the overlay stores.
        expected: String,
        /// The identity of the backing image.
        found: String,
    },
    /// Another process uses the file.
    #[error("{file}: is in use{}", holder.as_ref().map(LockHolder::phrase).unwrap_or_default())]
    Locked {
        /// The file, as the user named it.
        file: String,
        /// The lock holder, if known.
        holder: Option<LockHolder>,
        /// The file was to be written or replaced, not only read.
        writing: bool,
    },
    /// The file is in use other than by a lock: it is mounted, or part of a volume.
    #[error("{file}: is in use: {what}")]
    Busy {
        /// The file, as the user named it.
        file: String,
        /// What uses it.
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
    /// An image exceeds the limits on memory or work.
    #[error("{file}: {what} is {found}, more than the limit of {limit}")]
    Limit {
        /// The file, as the user named it.
        file: String,
        /// What is limited.
        what: &'static str,
        /// The value in the image.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A write to an image whose format was neither given nor detected.
    #[error(
        "{file}: its format was not detected. If a guest writes to it as {format}, the guest could write the \
         header of another format; name its format"
    )]
    Guessed {
        /// The file, as the user named it.
        file: String,
        /// The format assumed.
        format: String,
    },
    /// A write to a backing image whose format neither its header nor its overlay names.
    #[error("{file}: its format was not detected, and its overlay {overlay} names none")]
    Unnamed {
        /// The backing image.
        file: String,
        /// Its overlay.
        overlay: String,
    },
    /// An invalid request.
    #[error("{}{what}", .file.as_ref().map_or_else(String::new, |file| format!("{file}: ")))]
    Invalid {
        /// The file that it was for, as the user named it.
        file: Option<String>,
        /// What is wrong.
        what: String,
        /// What the user can do about it, if that is known.
        remedy: Option<Box<Remedy>>,
    },
    /// A write to something opened for reading.
    #[error("{file}: is open for reading only")]
    ReadOnly {
        /// The file, as the user named it.
        file: String,
    },
    /// The job was cancelled.
    #[error("interrupted")]
    Interrupted,
}

/// The system's error text without the error number.
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(at) if text.ends_with(')') => text[..at].to_owned(),
        _ => text,
    }
}

/// The class of an [`Error`], from which exit codes derive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Any other error.
    Failed,
    /// Invalid request.
    Usage,
    /// A file is not there.
    NotFound,
    /// It was opened for reading only.
    ReadOnly,
    /// The image is damaged, or its chain is incomplete.
    Corrupt,
    /// It needs more memory or work than the limits allow; the image may be sound.
    Limit,
    /// The image uses a feature that is not supported, or the format lacks one.
    Unsupported,
    /// An encrypted image, and no key or a wrong one.
    Key,
    /// The policy forbids it.
    Refused,
    /// Another process uses the file.
    Locked,
    /// No space left.
    NoSpace,
    /// Cancelled.
    Interrupted,
}

/// [`Error::ReadOnly`] about `file`, unless `writable`.
pub fn require_writable(writable: bool, file: &str) -> Result<()> {
    if writable { Ok(()) } else { Err(Error::ReadOnly { file: file.to_owned() }) }
}

/// [`Error::Limit`] about `file`, unless `found` is at most `limit`.
pub fn require_within(file: &str, what: &'static str, found: u64, limit: u64) -> Result<()> {
    if found <= limit { Ok(()) } else { Err(Error::limit(file, what, found, limit)) }
}

impl Error {
    /// The class of this error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. }
            | Self::File { source, .. }
            | Self::Reference { source, .. } => match source.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::Failed,
            },
            Self::Corrupt(_) | Self::Parent { .. } => ErrorKind::Corrupt,
            Self::Limit { .. } => ErrorKind::Limit,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::Key { .. } => ErrorKind::Key,
            Self::ReadOnly { .. } => ErrorKind::ReadOnly,
            Self::Refused(_) | Self::Dependents { .. } => ErrorKind::Refused,
            Self::Locked { .. } | Self::Busy { .. } => ErrorKind::Locked,
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::Invalid { .. } | Self::Guessed { .. } | Self::Unnamed { .. } => ErrorKind::Usage,
            Self::Interrupted => ErrorKind::Interrupted,
        }
    }

    /// The file that the error is about, as the user named it.
    pub fn file(&self) -> Option<&str> {
        match self {
            Self::Io { file, .. }
            | Self::File { file, .. }
            | Self::Reference { file, .. }
            | Self::Unsupported { file, .. }
            | Self::Key { file, .. }
            | Self::Dependents { file, .. }
            | Self::Parent { file, .. }
            | Self::Locked { file, .. }
            | Self::Busy { file, .. }
            | Self::NoSpace { file, .. }
            | Self::Limit { file, .. }
            | Self::Guessed { file, .. }
            | Self::Unnamed { file, .. }
            | Self::ReadOnly { file } => Some(file),
            Self::Corrupt(fault) => Some(&fault.file),
            Self::Refused(refusal) => Some(&refusal.file),
            Self::Invalid { file, .. } => file.as_deref(),
            Self::Interrupted => None,
        }
    }

    /// The byte offset in that file at which a request failed or damage was found.
    pub fn offset(&self) -> Option<u64> {
        match self {
            Self::Io { offset, .. } => Some(*offset),
            Self::Corrupt(fault) => Some(fault.offset),
            _ => None,
        }
    }

    /// The number of the system's error, if one was the cause.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. }
            | Self::File { source, .. }
            | Self::Reference { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// An invalid request that is about no file.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid { file: None, what: what.into(), remedy: None }
    }

    /// An invalid request for `file`.
    pub fn invalid_for(file: &(impl fmt::Display + ?Sized), what: impl Into<String>) -> Self {
        Self::Invalid { file: Some(file.to_string()), what: what.into(), remedy: None }
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
            remedy: None,
        }))
    }

    /// This error with what the user can do about it. Errors without a place for it stay as they
    /// are.
    pub fn with_remedy(mut self, new: impl Into<Remedy>) -> Self {
        match &mut self {
            Self::Corrupt(fault) => fault.remedy = Some(new.into()),
            Self::Invalid { remedy, .. } => *remedy = Some(Box::new(new.into())),
            Self::Unsupported { remedy, .. } | Self::Key { remedy, .. } => **remedy = new.into(),
            _ => {}
        }
        self
    }

    /// What the user can do about it, if that is known.
    pub fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Corrupt(fault) => fault.remedy.clone(),
            Self::Unsupported { remedy, .. }
            | Self::Key { remedy, .. }
            | Self::Dependents { remedy, .. }
            | Self::Reference { remedy, .. } => Some((**remedy).clone()),
            Self::Invalid { remedy, .. } => remedy.as_deref().cloned(),
            Self::Refused(refusal) => Some(refusal.remedy.clone()),
            Self::Parent { file, name, .. } => Some(Remedy::StoreReference {
                overlay: file.clone(),
                backing: Some(name.clone()),
                format: None,
            }),
            Self::Unnamed { file, overlay } => Some(Remedy::StoreReference {
                overlay: overlay.clone(),
                backing: Some(file.clone()),
                format: Some("raw".to_owned()),
            }),
            _ => None,
        }
    }

    /// More of something than its limit.
    pub fn limit(file: &str, what: &'static str, found: u64, limit: u64) -> Self {
        Self::Limit { file: file.to_owned(), what, found, limit }
    }

    /// No space left for something.
    pub fn no_space(file: &str, what: impl Into<String>) -> Self {
        Self::NoSpace { file: file.to_owned(), what: what.into() }
    }

    /// An I/O error at an offset.
    pub fn io(file: &str, action: IoAction, offset: u64, len: u64, source: io::Error) -> Self {
        Self::Io { file: file.to_owned(), action, offset, len, source }
    }

    /// A failed file-level request.
    pub fn file_io(file: &str, action: IoAction, source: impl Into<io::Error>) -> Self {
        Self::File { file: file.to_owned(), action, source: source.into() }
    }

    /// An encrypted image that was opened without a key.
    pub fn no_key(file: &str, method: &str) -> Self {
        Self::Key {
            file: file.to_owned(),
            what: format!("is encrypted ({method}), and no key is given"),
            remedy: Box::new(Remedy::GiveKey),
        }
    }

    /// A commit of an image that stands alone.
    pub fn no_backing(file: &str) -> Self {
        Self::invalid_for(file, "has no backing image, so there is nothing to commit to")
    }

    /// Encryption of a new image was requested without a key.
    pub fn no_new_key(file: &str) -> Self {
        Self::Key {
            file: file.to_owned(),
            what: "shall be encrypted, and no key is given for it".to_owned(),
            remedy: Box::new(Remedy::GiveNewKey),
        }
    }

    /// A feature that vdkit does not support.
    pub fn unsupported(file: &str, what: impl Into<String>, remedy: impl Into<Remedy>) -> Self {
        Self::Unsupported {
            file: file.to_owned(),
            what: what.into(),
            remedy: Box::new(remedy.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs distinguish a limit, a key and a missing file from damage and from each other.
    #[test]
    fn each_cause_has_a_kind_of_its_own() {
        let file = || "a".to_owned();
        let open = |code| Error::file_io("a", IoAction::Open, io::Error::from_raw_os_error(code));
        let limit = Error::Limit { file: file(), what: "size", found: 2, limit: 1 };
        for (error, kind) in [
            (Error::corrupt("a", 0, "field", "1", "2"), ErrorKind::Corrupt),
            (limit, ErrorKind::Limit),
            (Error::unsupported("a", "LUKS", "decrypt it"), ErrorKind::Unsupported),
            (Error::no_key("a", "LUKS"), ErrorKind::Key),
            (Error::ReadOnly { file: file() }, ErrorKind::ReadOnly),
            (open(2), ErrorKind::NotFound),
            (open(5), ErrorKind::Failed),
            (open(28), ErrorKind::NoSpace),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
    }
}
