//! How a request fails.

use std::io;
use std::sync::Arc;

use vdkit_block::{Error, IoAction};

use crate::wire::errno;

/// Error numbers of the protocol, and what they mean.
const ERRORS: &[(u32, io::ErrorKind, &str)] = &[
    (errno::PERM, io::ErrorKind::PermissionDenied, "operation not permitted"),
    (errno::IO, io::ErrorKind::Other, "input/output error"),
    (errno::NOMEM, io::ErrorKind::OutOfMemory, "out of memory"),
    (errno::INVAL, io::ErrorKind::InvalidInput, "invalid request"),
    (errno::NOSPC, io::ErrorKind::StorageFull, "no space left"),
    (errno::OVERFLOW, io::ErrorKind::Other, "value too large"),
    (errno::NOTSUP, io::ErrorKind::Unsupported, "not supported"),
    (errno::SHUTDOWN, io::ErrorKind::Other, "the server is shutting down"),
];

/// Failure of a request.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The server answered with an error.
    Refused {
        /// Error number of the protocol.
        errno: u32,
        /// The server's message, if it sent one.
        message: Option<String>,
    },
    /// The connection is unusable.
    Broken(Broken),
}

/// Why a connection is unusable.
#[derive(Clone, Debug)]
pub(crate) struct Broken {
    /// The reason, to follow "the server" or a name.
    pub(crate) why: Arc<str>,
    /// A new connection may do better. Not if the server broke the protocol.
    pub(crate) lost: bool,
}

impl Broken {
    pub(crate) fn lost(why: impl AsRef<str>) -> Self {
        Self { why: why.as_ref().into(), lost: true }
    }

    /// The server broke the protocol.
    pub(crate) fn protocol(why: impl AsRef<str>) -> Self {
        Self { why: format!("the server broke the protocol: {}", why.as_ref()).into(), lost: false }
    }

    /// From an error of the socket.
    pub(crate) fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self { why: error.to_string().into(), lost: false },
            io::ErrorKind::UnexpectedEof => Self::lost("the server closed the connection"),
            // Sent again, the request could run twice, at times that nobody knows.
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                Self { why: "the server does not answer any more".into(), lost: false }
            }
            _ => Self::lost(format!("the connection was lost: {}", vdkit_block::plain(error))),
        }
    }
}

impl Failure {
    pub(crate) fn protocol(why: impl AsRef<str>) -> Self {
        Self::Broken(Broken::protocol(why))
    }

    /// Whether the server does not support the request.
    pub(crate) fn is_unsupported(&self) -> bool {
        matches!(self, Self::Refused { errno: errno::NOTSUP | errno::INVAL, .. })
    }

    /// The error for the caller.
    pub(crate) fn into_error(self, name: &str, action: IoAction, offset: u64, len: u64) -> Error {
        let source = match self {
            Self::Broken(broken) => io::Error::other(&*broken.why),
            Self::Refused { errno, message } => {
                let (kind, what) = match ERRORS.iter().find(|(number, ..)| *number == errno) {
                    Some((_, kind, what)) => (*kind, (*what).to_owned()),
                    None => (io::ErrorKind::Other, format!("error {errno}")),
                };
                let message = message.map(|message| format!(" ({message})")).unwrap_or_default();
                io::Error::new(kind, format!("the server answers: {what}{message}"))
            }
        };
        Error::io(name, action, offset, len, source)
    }
}

impl From<Broken> for Failure {
    fn from(broken: Broken) -> Self {
        Self::Broken(broken)
    }
}

/// A server's message as one printable line.
pub(crate) fn message_of(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let clean: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(512).collect();
    let clean = clean.trim();
    (!clean.is_empty()).then(|| clean.to_owned())
}
