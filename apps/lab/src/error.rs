//! Errors of the lab.

use std::fmt;

use crate::peers::Skip;
use crate::place::device::Refusal;

/// A result of the lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the lab could not do what it was asked. `{}` prints the outermost message, `{:#}` also the
/// causes.
#[derive(Debug)]
pub enum Error {
    /// The disk engine failed.
    Engine(vdkit_block::Error),
    /// The lab refused a place before anything was done to it.
    Refused(Refusal),
    /// This way of storing a disk does not exist on this host.
    Skipped(Skip),
    /// A system call or a library failed.
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A fault that the lab itself found.
    Message(String),
    /// What was being done when `cause` happened.
    Context {
        /// What was being done.
        doing: String,
        /// Why it failed.
        cause: Box<Error>,
    },
}

impl Error {
    /// An error with only this text.
    pub fn msg(text: impl fmt::Display) -> Self {
        Self::Message(text.to_string())
    }

    /// The innermost error.
    pub fn root(&self) -> &Self {
        match self {
            Self::Context { cause, .. } => cause.root(),
            other => other,
        }
    }

    /// The disk engine's error, if that is the cause.
    pub fn engine(&self) -> Option<&vdkit_block::Error> {
        if let Self::Engine(error) = self.root() { Some(error) } else { None }
    }

    /// The refusal, if that is the cause.
    pub fn refusal(&self) -> Option<&Refusal> {
        if let Self::Refused(refusal) = self.root() { Some(refusal) } else { None }
    }

    /// Why a cell cannot be measured here, if that is the cause.
    pub fn skipped(&self) -> Option<&Skip> {
        if let Self::Skipped(skip) = self.root() { Some(skip) } else { None }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Skipped(skip) => skip.fmt(f),
            Self::Other(error) => error.fmt(f),
            Self::Message(text) => f.write_str(text),
            Self::Context { doing, cause } if f.alternate() => write!(f, "{doing}: {cause:#}"),
            Self::Context { doing, .. } => f.write_str(doing),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Context { cause, .. } = self { Some(cause.as_ref()) } else { None }
    }
}

impl From<vdkit_block::Error> for Error {
    fn from(error: vdkit_block::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Skip> for Error {
    fn from(skip: Skip) -> Self {
        Self::Skipped(skip)
    }
}

macro_rules! other {
    ($($cause:ty),*) => {$(
        impl From<$cause> for Error {
            fn from(error: $cause) -> Self {
                Self::Other(Box::new(error))
            }
        }
    )*};
}

other!(
    std::io::Error,
    rustix::io::Errno,
    rusqlite::Error,
    serde_json::Error,
    std::num::ParseIntError
);

/// Adds what was being done to an error.
pub(crate) trait Context<T> {
    /// Adds `doing` to an error.
    fn context(self, doing: impl fmt::Display) -> Result<T>;

    /// As [`Context::context`], but builds the text only for an error.
    fn with_context<S: fmt::Display>(self, doing: impl FnOnce() -> S) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T> {
        self.with_context(|| doing)
    }

    fn with_context<S: fmt::Display>(self, doing: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|cause| Error::Context {
            doing: doing().to_string(),
            cause: Box::new(cause.into()),
        })
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, doing: impl fmt::Display) -> Result<T> {
        self.ok_or_else(|| Error::msg(doing))
    }

    fn with_context<S: fmt::Display>(self, doing: impl FnOnce() -> S) -> Result<T> {
        self.ok_or_else(|| Error::msg(doing()))
    }
}

/// Returns an [`Error::Message`] with the formatted text.
macro_rules! bail {
    ($($text:tt)*) => {
        return Err($crate::error::Error::Message(format!($($text)*)))
    };
}
pub(crate) use bail;
