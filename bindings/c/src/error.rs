//! The last error of each thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};

use vdkit::{Error, ErrorKind};

use crate::border;

/// Any other error, such as an I/O error.
pub const VDKIT_E_FAILED: c_int = -1;
/// The call makes no sense: a NULL pointer, an unknown name, a range beyond the disk.
pub const VDKIT_E_USAGE: c_int = -2;
/// The image is damaged, or its chain is incomplete.
pub const VDKIT_E_CORRUPT: c_int = -3;
/// The policy for references forbids it, or other images would be damaged.
pub const VDKIT_E_REFUSED: c_int = -4;
/// Another process uses the file.
pub const VDKIT_E_LOCKED: c_int = -5;
/// No space is left.
pub const VDKIT_E_NO_SPACE: c_int = -6;
/// A callback ended the work.
pub const VDKIT_E_INTERRUPTED: c_int = -7;
/// A bug in libvdkit; the message is for its authors.
pub const VDKIT_E_PANIC: c_int = -8;
/// It needs more memory or work than the limits allow; the image may be sound.
pub const VDKIT_E_LIMIT: c_int = -9;
/// The image is encrypted, and there is no key for it or a wrong one.
pub const VDKIT_E_KEY: c_int = -10;
/// The image uses a feature that is not supported, or its format lacks one.
pub const VDKIT_E_UNSUPPORTED: c_int = -11;
/// It was opened for reading only.
pub const VDKIT_E_READ_ONLY: c_int = -12;
/// A file is not there.
pub const VDKIT_E_NOT_FOUND: c_int = -13;

#[derive(Default)]
struct Last {
    code: c_int,
    message: CString,
    file: Option<CString>,
    offset: Option<u64>,
    hint: Option<CString>,
    errno: c_int,
}

thread_local! {
    static LAST: RefCell<Last> = RefCell::default();
}

/// A string for C; a NUL in it becomes U+FFFD.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// A text without control characters: a file's name may have some.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
    }
    escaped
}

/// A message as one line, and the lines that follow it, such as a list of the options that there are.
fn lines_of(text: &str, file: Option<&str>) -> (String, Option<String>) {
    // A line break in the file's name ends no line.
    let text = match file.filter(|file| file.contains(char::is_control)) {
        Some(file) => text.replace(file, &escaped(file)),
        None => text.to_owned(),
    };
    match text.split_once('\n') {
        Some((first, rest)) => (escaped(first), Some(rest.to_owned())),
        None => (escaped(&text), None),
    }
}

/// The code of an error.
pub(crate) fn code_of(error: &Error) -> c_int {
    match error.kind() {
        ErrorKind::Usage => VDKIT_E_USAGE,
        ErrorKind::Corrupt => VDKIT_E_CORRUPT,
        ErrorKind::Refused => VDKIT_E_REFUSED,
        ErrorKind::Locked => VDKIT_E_LOCKED,
        ErrorKind::NoSpace => VDKIT_E_NO_SPACE,
        ErrorKind::Interrupted => VDKIT_E_INTERRUPTED,
        ErrorKind::Limit => VDKIT_E_LIMIT,
        ErrorKind::Key => VDKIT_E_KEY,
        ErrorKind::Unsupported => VDKIT_E_UNSUPPORTED,
        ErrorKind::ReadOnly => VDKIT_E_READ_ONLY,
        ErrorKind::NotFound => VDKIT_E_NOT_FOUND,
        _ => VDKIT_E_FAILED,
    }
}

/// Keeps an error as the thread's last one; returns its code.
pub(crate) fn note(error: &Error) -> c_int {
    let code = code_of(error);
    let (message, more) = lines_of(&error.to_string(), error.file());
    let hints = [more, error.remedy().map(|remedy| remedy.to_string())];
    let hints: Vec<String> = hints.into_iter().flatten().collect();
    let last = Last {
        code,
        message: c_text(&message),
        file: error.file().map(c_text),
        offset: error.offset(),
        hint: (!hints.is_empty()).then(|| c_text(&hints.join("\n"))),
        errno: error.errno().unwrap_or(0),
    };
    keep(last);
    code
}

/// As [`note`], for an error that is only a text.
pub(crate) fn note_text(code: c_int, text: &str) -> c_int {
    let (message, more) = lines_of(text, None);
    let hint = more.map(|more| c_text(&more));
    keep(Last { code, message: c_text(&message), hint, ..Last::default() });
    code
}

/// A thread that ends may have lost its place already; its error is then only a code.
fn keep(last: Last) {
    let _ = LAST.try_with(|place| place.replace(last));
}

/// The thread's last call did not fail.
pub(crate) fn clear() {
    if look(|last| last.code, 0) != 0 {
        keep(Last::default());
    }
}

fn look<T>(at: impl FnOnce(&Last) -> T, nothing: T) -> T {
    LAST.try_with(|last| at(&last.borrow())).unwrap_or(nothing)
}

fn pointer(text: Option<&CString>) -> *const c_char {
    text.map_or(std::ptr::null(), |text| text.as_ptr())
}

/// The result of this thread's last call: 0, or a code.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_code() -> c_int {
    look(|last| last.code, 0)
}

/// The message of this thread's last call, in one line (control characters, such as a line break in a file's
/// name, are escaped); empty if that did not fail. Valid until the thread's next call; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_message() -> *const c_char {
    look(|last| last.message.as_ptr(), c"".as_ptr())
}

/// The file that the error of this thread's last call is about, or NULL. Valid until the thread's
/// next call; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_file() -> *const c_char {
    look(|last| pointer(last.file.as_ref()), std::ptr::null())
}

/// The byte offset in that file, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_offset() -> i64 {
    look(|last| last.offset.and_then(|offset| i64::try_from(offset).ok()).unwrap_or(-1), -1)
}

/// What can be done about the error of this thread's last call, or NULL. It may have several lines, such as a
/// list of the options that there are. Valid until the thread's next call; do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_hint() -> *const c_char {
    look(|last| pointer(last.hint.as_ref()), std::ptr::null())
}

/// The number of the system's error behind the error of this thread's last call, such as ENOENT or EIO;
/// 0 if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_error_errno() -> c_int {
    look(|last| last.errno, 0)
}

/// The VDKIT_API_VERSION of the library that is loaded.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_api_version() -> c_int {
    1
}

/// The version of the library, such as "0.1.0". Do not free it.
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Frees a string that a function handed out. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: `border::new_text` made it, says the header.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// The formats' names with a comma between them, as a string for vdkit_free().
#[unsafe(no_mangle)]
pub extern "C" fn vdkit_formats() -> *mut c_char {
    let names: Vec<&str> = vdkit::FORMATS.iter().map(|driver| driver.name()).collect();
    border::new_text(&names.join(","))
}
