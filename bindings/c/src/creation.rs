//! New images.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;

use vdkit::jobs::{self, Backing, CreateOptions, NewBacking};
use vdkit::{BackingRef, FormatDriver, OpenOptions, Options, Secret};

use crate::border::{self, Result, call, given, misuse};
use crate::jobs::{Watch, vdkit_monitor};
use crate::options::{opening, vdkit_open_options};

/// What a new image shall be, beside its format and size. New ones have no options of the format, no key
/// and no backing image. One may be used by many threads at once, but not while another thread changes it.
#[derive(Default)]
pub struct vdkit_create_options {
    texts: Vec<String>,
    key: Option<Secret>,
    backing: Option<NewBacking>,
    /// How the backing image is opened.
    opening: OpenOptions,
}

/// Makes options. Freed by vdkit_create_options_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create_options_new(
    options: Option<&mut MaybeUninit<*mut vdkit_create_options>>,
) -> c_int {
    call(|| {
        border::place_of(options)?.write(Box::into_raw(Box::default()));
        Ok(())
    })
}

/// Frees options. They may be freed as soon as the functions that took them have returned. NULL is
/// allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create_options_free(options: *mut vdkit_create_options) {
    // SAFETY: the header's promise.
    drop(unsafe { border::take(options) });
}

/// Adds options of the format: "key=value,..." (as `vdkit create -o`). Of several values of a key the
/// last one counts. An option that the format does not have is an error of the function that makes the
/// image.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create_options_add(
    options: Option<&mut vdkit_create_options>,
    text: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let text = unsafe { border::text(text, "text") }?.to_owned();
        given(options, "options")?.texts.push(text);
        Ok(())
    })
}

/// Sets the passphrase or key of a new image that is encrypted, such as a qcow2 image with
/// "encrypt.format=luks": `len` bytes, which are copied, and wiped when the options and all that uses
/// them are freed. For any other image a key is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create_options_key(
    options: Option<&mut vdkit_create_options>,
    key: *const c_void,
    len: usize,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let key = unsafe { border::bytes(key, len) }?;
        given(options, "options")?.key = Some(Secret::new(key.to_vec()));
        Ok(())
    })
}

/// Sets the image that the new one stands on, as a name from the new one's folder; NULL for none. `format`
/// may be NULL: it is found then, and must not be raw. `opening` says how the backing image is opened: its
/// keys, references and locks; it is copied, and may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create_options_backing(
    options: Option<&mut vdkit_create_options>,
    backing: *const c_char,
    format: *const c_char,
    opening: Option<&vdkit_open_options>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (backing, format) =
            unsafe { (border::maybe_text(backing)?, border::maybe_text(format)?) };
        let options = given(options, "options")?;
        options.backing = backing.map(|name| NewBacking::new(name, format.map(str::to_owned)));
        options.opening = self::opening(opening);
        Ok(())
    })
}

impl vdkit_create_options {
    /// The options of the format, with the key.
    pub(crate) fn of_format(&self, driver: &dyn FormatDriver) -> Result<Options> {
        let texts = self.texts.iter().map(String::as_str);
        let mut options = Options::parse(driver.name(), driver.options(), texts)?;
        if self.key.is_some() && !driver.encrypts(&options) {
            return Err(misuse(format!("a {} image with these options has no key", driver.name())));
        }
        options.set_key(self.key.clone());
        Ok(options)
    }

    /// The image that a converted one at `path` stands on.
    pub(crate) fn backing_of(&self, path: &Path) -> Result<Option<(BackingRef, Backing)>> {
        let Some(backing) = &self.backing else { return Ok(None) };
        let found = backing.find(&vdkit::registry(), path, &self.opening)?;
        let opening = self.opening.of_other(found.reference.format.clone());
        Ok(Some((found.reference, Backing::new(found.path, opening))))
    }

    /// The key alone, for an image that exists.
    pub(crate) fn only_key(&self) -> Result<Option<Secret>> {
        if self.texts.is_empty() && self.backing.is_none() {
            Ok(self.key.clone())
        } else {
            Err(misuse("an image that exists keeps its options and its backing image"))
        }
    }
}

/// For vdkit_create(): an existing file is replaced.
pub const VDKIT_CREATE_REPLACE: u32 = 1;

/// Makes a new image. `size`: bytes of its disk; 0 takes those of the backing image. `options` may be
/// NULL. `flags`: VDKIT_CREATE_REPLACE, or 0. `monitor` hears of images that are written whole (the option
/// "preallocation=full"), and may be NULL. Nothing is left behind after an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_create(
    path: *const c_char,
    format: *const c_char,
    size: u64,
    options: Option<&vdkit_create_options>,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (path, format) =
            unsafe { (border::path(path, "path")?, border::text(format, "format")?) };
        border::known(flags, VDKIT_CREATE_REPLACE)?;
        let (driver, none) = (vdkit::format(format)?, vdkit_create_options::default());
        let options = options.unwrap_or(&none);
        let image = CreateOptions::new(path, driver)
            .guest_bytes((size > 0 || options.backing.is_none()).then_some(size))
            .options(options.of_format(driver)?)
            .backing(options.backing.clone())
            .opening(options.opening.clone())
            .replace(flags & VDKIT_CREATE_REPLACE != 0);
        let watch = Watch::new(monitor)?;
        jobs::create(&vdkit::registry(), &image, &watch.monitor()).map(|_| ())
    })
}
