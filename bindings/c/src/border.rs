//! What crosses between C and Rust. Every dereference of a pointer that is not a parameter's own
//! type happens here.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr::NonNull;

use vdkit::Error;

use crate::error::{self, VDKIT_E_PANIC};

pub(crate) type Result<T> = std::result::Result<T, Error>;

/// Runs a call of the library: its error becomes the thread's last one, and no panic leaves it.
pub(crate) fn call(act: impl FnOnce() -> Result<()>) -> c_int {
    // The result is looked at where it is, since an error is large to move.
    let answered = catch_unwind(AssertUnwindSafe(|| match act() {
        Ok(()) => {
            error::clear();
            0
        }
        Err(found) => error::note(&found),
    }));
    answered.unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        error::note_text(VDKIT_E_PANIC, &format!("libvdkit has a bug: {text}"))
    })
}

/// An error in how a function was called.
pub(crate) fn misuse(text: impl Into<String>) -> Error {
    Error::invalid(text)
}

/// A parameter that must not be NULL.
pub(crate) fn given<T>(parameter: Option<T>, name: &str) -> Result<T> {
    parameter.ok_or_else(|| misuse(format!("{name} is NULL")))
}

/// The place for a result, which gets NULL or 0 until there is one.
pub(crate) fn place<T>(
    out: Option<&mut MaybeUninit<T>>,
    nothing: T,
) -> Result<&mut MaybeUninit<T>> {
    let out = given(out, "the place for the result")?;
    out.write(nothing);
    Ok(out)
}

/// The place for a handle or a string.
pub(crate) fn place_of<T>(
    out: Option<&mut MaybeUninit<*mut T>>,
) -> Result<&mut MaybeUninit<*mut T>> {
    place(out, std::ptr::null_mut())
}

/// Refuses flags that this version does not know.
pub(crate) fn known(flags: u32, all: u32) -> Result<()> {
    match flags & !all {
        0 => Ok(()),
        others => Err(misuse(format!("unknown flags {others:#x}"))),
    }
}

/// Stores a result for which the caller may not have asked.
pub(crate) fn put_if_asked<T>(out: Option<&mut MaybeUninit<T>>, value: impl FnOnce() -> T) {
    if let Some(out) = out {
        out.write(value());
    }
}

/// A new string that [`crate::error::vdkit_free`] frees.
pub(crate) fn new_text(text: &str) -> *mut c_char {
    error::c_text(text).into_raw()
}

/// A string; `None` for NULL.
///
/// # Safety
/// NULL, or a string that ends with a NUL and is not changed during the call.
pub(crate) unsafe fn maybe_text<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| misuse(format!("{text:?} is not UTF-8")))
}

/// A string.
///
/// # Safety
/// As [`maybe_text`].
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    given(unsafe { maybe_text(pointer) }?, name)
}

/// A path: any bytes but NUL.
///
/// # Safety
/// As [`maybe_text`].
pub(crate) unsafe fn path<'a>(path: *const c_char, name: &str) -> Result<&'a Path> {
    if path.is_null() {
        return Err(misuse(format!("{name} is NULL")));
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Memory that a slice can be made of: no longer than slices are, and NULL only if it is empty.
pub(crate) fn checked(memory: *const c_void, len: usize) -> Result<*mut u8> {
    if isize::try_from(len).is_err() {
        return Err(misuse(format!("a buffer of {len} bytes")));
    }
    match memory.is_null() {
        true if len > 0 => Err(misuse("the buffer is NULL")),
        true => Ok(NonNull::dangling().as_ptr()),
        false => Ok(memory.cast_mut().cast()),
    }
}

/// Memory to read from.
///
/// # Safety
/// `len` bytes at `bytes` are readable and not changed while the result is in use.
pub(crate) unsafe fn bytes<'a>(bytes: *const c_void, len: usize) -> Result<&'a [u8]> {
    // SAFETY: the caller's promise, and it is checked.
    Ok(unsafe { std::slice::from_raw_parts(checked(bytes, len)?, len) })
}

/// Memory to write to.
///
/// # Safety
/// `len` bytes at `bytes` are writable, and nobody else uses them while the result is in use.
pub(crate) unsafe fn bytes_mut<'a>(bytes: *mut c_void, len: usize) -> Result<&'a mut [u8]> {
    // SAFETY: the caller's promise, and it is checked.
    Ok(unsafe { std::slice::from_raw_parts_mut(checked(bytes, len)?, len) })
}

/// A list of `count` values.
///
/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn list<'a, T>(list: *const T, count: c_int) -> Result<&'a [T]> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        Ok(count) if !list.is_null() => {
            // SAFETY: the caller's promise.
            Ok(unsafe { std::slice::from_raw_parts(list, count) })
        }
        _ => Err(misuse(format!("{count} entries of a list that is NULL or negative in length"))),
    }
}

/// Frees what a function handed out.
///
/// # Safety
/// `pointer` is NULL or comes from `Box::into_raw`, and is not used again.
pub(crate) unsafe fn take<T>(pointer: *mut T) -> Option<Box<T>> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer) })
}

/// The program's own pointer, which is passed back to its callbacks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User(pub *mut c_void);

// SAFETY: libvdkit never looks at it; the header says from which threads callbacks are called.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        type Act = fn() -> Result<()>;
        let acts: [(Act, &str); 3] = [
            (|| panic!("as a text"), "as a text"),
            (|| panic!("of {} parts", 2), "of 2 parts"),
            (|| std::panic::panic_any(7), "no message"),
        ];
        for (act, text) in acts {
            let panic = call(act);
            assert_eq!(panic, VDKIT_E_PANIC);
            // SAFETY: the message lives until the thread's next call.
            let message = unsafe { CStr::from_ptr(error::vdkit_error_message()) };
            assert_eq!(message.to_str(), Ok(format!("libvdkit has a bug: {text}").as_str()));
        }
    }
}
