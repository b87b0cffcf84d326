//! vdkit's errors as exceptions of `vdkit.errors`.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use vdkit::{Error, ErrorKind};

use crate::source::Raised;

/// The class in `vdkit.errors`.
fn class(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Failed if error.errno().is_some() => "SystemCallError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::Usage => "UsageError",
        ErrorKind::ReadOnly => "ReadOnlyError",
        ErrorKind::Corrupt => "CorruptError",
        ErrorKind::Limit => "LimitError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Key => "EncryptionKeyError",
        ErrorKind::Refused => "RefusedError",
        ErrorKind::Locked => "LockedError",
        ErrorKind::NoSpace => "NoSpaceError",
        ErrorKind::Interrupted => "CancelledError",
        _ => "Error",
    }
}

/// What a file object raised, if that is the error's cause.
fn cause(py: Python<'_>, error: &Error) -> Option<PyErr> {
    let system = std::error::Error::source(error)?.downcast_ref::<std::io::Error>()?;
    let raised = system.get_ref()?.downcast_ref::<Raised>()?;
    Some(raised.exception.clone_ref(py))
}

/// An exception for an error. If a file object raised something, that is its cause; what is no
/// `Exception`, such as `KeyboardInterrupt`, is raised itself.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    match cause(py, error) {
        Some(cause) if !cause.is_instance_of::<PyException>(py) => cause,
        cause => {
            let raised = exception(py, error);
            if cause.is_some() {
                raised.set_cause(py, cause);
            }
            raised
        }
    }
}

/// An exception with the error's message, file, offset, hint and number.
fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let made = py.import("vdkit.errors").and_then(|module| {
        module.getattr(class(error))?.call1((
            error.to_string(),
            error.file(),
            error.offset(),
            error.remedy().map(|remedy| remedy.to_string()),
            error.errno(),
        ))
    });
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(other) => other,
    }
}

/// An exception for a call that makes no sense.
pub(crate) fn misuse(py: Python<'_>, text: impl Into<String>) -> PyErr {
    raise(py, &Error::Invalid(text.into()))
}
