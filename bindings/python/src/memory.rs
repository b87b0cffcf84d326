//! Memory of Python objects: reads go straight into it, and writes come straight from it.
//!
//! The functions for this are exported by every Python from 3.0 on, and `Py_buffer` has been the same
//! since then, but only Python 3.11 made them part of its stable interface. PyO3 therefore leaves them out
//! of modules that also load in 3.9 and 3.10, so they are declared here. (A copy through a `bytes` object,
//! which the stable interface of 3.9 has, takes longer than the read itself.)

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::ffi::{Py_ssize_t, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// `Py_buffer`.
#[repr(C)]
struct RawView {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: Py_ssize_t,
    itemsize: Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut Py_ssize_t,
    strides: *mut Py_ssize_t,
    suboffsets: *mut Py_ssize_t,
    internal: *mut c_void,
}

/// One run of bytes.
const SIMPLE: c_int = 0;
const WRITABLE: c_int = 1;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut RawView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawView);
}

/// Memory that its object neither moves nor frees until this is dropped. The view may point into itself,
/// so it does not move either.
struct View<'py> {
    raw: Box<RawView>,
    /// Whoever drops it holds the interpreter's lock.
    _py: Python<'py>,
}

impl<'py> View<'py> {
    fn new(object: &Bound<'py, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut raw = Box::new(MaybeUninit::<RawView>::uninit());
        // SAFETY: the object is one, there is room for a view, and the lock is held.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), raw.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: the call above has filled it.
        Ok(Self { raw: unsafe { raw.assume_init() }, _py: object.py() })
    }

    fn len(&self) -> usize {
        self.raw.len.try_into().unwrap_or(0)
    }
}

impl Drop for View<'_> {
    fn drop(&mut self) {
        // SAFETY: it was filled, is released once, and the lock is held.
        unsafe { PyBuffer_Release(&mut *self.raw) };
    }
}

/// Calls `act` with the bytes of an object, such as `bytes`, a `bytearray`, a `memoryview` or an array.
pub(crate) fn with_bytes<T>(
    object: &Bound<'_, PyAny>,
    act: impl FnOnce(&[u8]) -> T,
) -> PyResult<T> {
    let view = View::new(object, SIMPLE)?;
    if view.len() == 0 {
        return Ok(act(&[]));
    }
    // SAFETY: the object keeps so many bytes there while the view lives. Another thread of the program
    // that changes them meanwhile gets some mixture written, as with Python's own files.
    Ok(act(unsafe { std::slice::from_raw_parts(view.raw.buf.cast(), view.len()) }))
}

/// As [`with_bytes`], for an object whose bytes `act` changes.
pub(crate) fn with_bytes_mut<T>(
    object: &Bound<'_, PyAny>,
    act: impl FnOnce(&mut [u8]) -> T,
) -> PyResult<T> {
    let view = View::new(object, WRITABLE)?;
    if view.len() == 0 {
        return Ok(act(&mut []));
    }
    // SAFETY: as above, and the object lets its bytes be changed.
    Ok(act(unsafe { std::slice::from_raw_parts_mut(view.raw.buf.cast(), view.len()) }))
}

/// A `bytes` object of `len` bytes, which `fill` must all set. [`PyBytes::new_with`] would set them to zero
/// before.
pub(crate) fn new_bytes<'py>(
    py: Python<'py>,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> PyResult<()>,
) -> PyResult<Bound<'py, PyBytes>> {
    if len < 2 {
        // Python has one object for each of them, which nobody may change.
        let mut one = [0; 1];
        fill(&mut one[..len])?;
        return Ok(PyBytes::new(py, &one[..len]));
    }
    let size = Py_ssize_t::try_from(len)?;
    // SAFETY: the lock is held; the result is a new object, or NULL and an exception.
    let made = unsafe {
        let made = pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), size);
        Bound::from_owned_ptr_or_err(py, made)?.cast_into_unchecked::<PyBytes>()
    };
    // SAFETY: nobody else has seen the object, so its bytes may be set. The interpreter's allocator
    // returned them, so for the compiler they have some value, if none that means anything.
    let place = unsafe {
        let start = pyo3::ffi::PyBytes_AsString(made.as_ptr());
        std::slice::from_raw_parts_mut(start.cast::<u8>(), len)
    };
    fill(place)?;
    Ok(made)
}
