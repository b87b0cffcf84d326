//! Numbers of bytes.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::errors::misuse;

/// An offset, a length or a size. One that is negative or too large is an error of vdkit, as a range
/// beyond the disk is, and no `OverflowError`.
pub(crate) struct Number<T>(pub(crate) T);

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(number: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let py = number.py();
        number.extract().map(Self).map_err(|error: T::Error| match error.into() {
            error if error.is_instance_of::<PyOverflowError>(py) => {
                misuse(py, format!("{} is no number of bytes of a disk", *number))
            }
            error => error,
        })
    }
}
