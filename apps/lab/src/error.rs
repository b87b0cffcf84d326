//! Errors of the lab.

use std::fmt;

use crate::peers::Skip;
use crate::place::device::Refusal;

/// A result of the lab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the lab could not do what it was asked. `{}` prints the outermost message, `{:#}` also the
/// causes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The disk engine failed.
    #[error(transparent)]
    Engine(#[from] vdkit_block::Error),
    /// The lab refused a place before anything was done to it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// This way of storing a disk does not exist on this host.
    #[error(transparent)]
    Skipped(#[from] Skip),
    /// A system call or a library failed.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// A fault that the lab itself found.
    #[error("{0}")]
    Message(String),
    /// What was being done when `cause` happened.
    #[error(fmt = with_cause)]
    Context {
        /// What was being done.
        doing: String,
        /// Why it failed.
        #[source]
        cause: Box<Error>,
    },
}

fn with_cause(
    doing: &impl fmt::Display,
    cause: &impl fmt::Display,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    if f.alternate() { write!(f, "{doing}: {cause:#}") } else { write!(f, "{doing}") }
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
