//! vdkit's errors as exceptions of `vdkit.errors`.

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use vdkit::{Error, ErrorKind};

/// The class in `vdkit.errors`.
fn class(error: &Error) -> &'static str {
    match error.kind() {
        ErrorKind::Failed if is_missing(error) => "NotFoundError",
        ErrorKind::Failed if error.errno().is_some() => "SystemCallError",
        ErrorKind::Usage => "UsageError",
        ErrorKind::Corrupt => "CorruptError",
        ErrorKind::Refused => "RefusedError",
        ErrorKind::Locked => "LockedError",
        ErrorKind::NoSpace => "NoSpaceError",
        ErrorKind::Interrupted => "CancelledError",
        _ => "Error",
    }
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::File { source, .. } | Error::Reference { source, .. }
        if source.kind() == std::io::ErrorKind::NotFound)
}

/// As [`raise`], for an error whose cause is what a file object raised. What is no `Exception`, such as
/// `KeyboardInterrupt`, is raised itself.
pub(crate) fn raise_from(py: Python<'_>, error: &Error, cause: Option<PyErr>) -> PyErr {
    match cause {
        Some(cause) if !cause.is_instance_of::<PyException>(py) => cause,
        Some(cause) => {
            let raised = raise(py, error);
            raised.set_cause(py, Some(cause));
            raised
        }
        None => raise(py, error),
    }
}

/// An exception with the error's message, file, offset, hint and number.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
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
