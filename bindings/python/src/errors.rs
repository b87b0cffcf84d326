//! vdkit's errors as exceptions of `vdkit.errors`.

use std::io;

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
    let system = std::error::Error::source(error)?.downcast_ref::<io::Error>()?;
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

/// Message, file, offset, hint and number.
type Parts<'a> = (String, Option<&'a str>, Option<u64>, Option<String>, Option<i32>);

/// An exception for an error.
fn exception(py: Python<'_>, error: &Error) -> PyErr {
    let hint = error.remedy().map(|remedy| remedy.to_string());
    let parts = (error.to_string(), error.file(), error.offset(), hint, error.errno());
    made_of(py, class(error), parts)
}

/// The exception where no thread can be started.
pub(crate) fn no_thread(py: Python<'_>, error: &io::Error) -> PyErr {
    let text = format!("cannot start a thread: {}", vdkit::plain(error));
    made_of(py, "SystemCallError", (text, None, None, None, error.raw_os_error()))
}

/// An exception of a class in `vdkit.errors`.
fn made_of(py: Python<'_>, class: &str, parts: Parts<'_>) -> PyErr {
    let made = py.import("vdkit.errors").and_then(|module| module.getattr(class)?.call1(parts));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(other) => other,
    }
}

/// An exception for a call that makes no sense.
pub(crate) fn misuse(py: Python<'_>, text: impl Into<String>) -> PyErr {
    raise(py, &Error::invalid(text))
}
