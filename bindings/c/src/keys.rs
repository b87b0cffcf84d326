//! Options and key slots of existing images.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use vdkit::{Secret, jobs};

use crate::border::{self, call};
use crate::jobs::{Watch, json_of, put_report, vdkit_monitor};
use crate::options::{opening, vdkit_open_options};

/// How long trying a key takes on this machine if nothing is said, as with `vdkit key`.
const MILLISECONDS: u64 = 2000;

/// Changes options of an existing image: `options` is "key=value,..." (as `vdkit amend -o`). After a crash it
/// can be repeated. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_amend(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    options: *const c_char,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (path, options) =
            unsafe { (border::path(path, "path")?, border::text(options, "options")?) };
        let watch = Watch::new(monitor)?;
        let opening = self::opening(opening).writable(true);
        let done = jobs::amend(&vdkit::registry(), path, &opening, [options], &watch.monitor())?;
        put_report(report, &done);
        Ok(())
    })
}

/// Lists the key slots of an encrypted image, and those that the keys of `opening` open, as JSON for
/// vdkit_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_keys(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = border::place_of(json)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let listed = jobs::list_keys(&vdkit::registry(), path, &self::opening(opening))?;
        place.write(border::new_text(&json_of(&listed)));
        Ok(())
    })
}

/// For vdkit_key_add(): the key of `opening` goes, once the new one opens the image.
pub const VDKIT_KEY_REPLACE: u32 = 1;

/// Adds a key of `len` bytes to an encrypted image that a key of `opening` opens; durable on return.
/// `milliseconds`: how long trying the new key shall take on this machine; 0 takes 2000. `flags`:
/// VDKIT_KEY_REPLACE, or 0. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_key_add(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    key: *const c_void,
    len: usize,
    milliseconds: u32,
    flags: u32,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        border::known(flags, VDKIT_KEY_REPLACE)?;
        // SAFETY: the header's promise.
        let (path, key) = unsafe { (border::path(path, "path")?, border::bytes(key, len)?) };
        let (opening, key) = (self::opening(opening), Secret::new(key.to_vec()));
        let registry = vdkit::registry();
        let time = if milliseconds == 0 { MILLISECONDS } else { milliseconds.into() };
        let done = if flags & VDKIT_KEY_REPLACE != 0 {
            jobs::change_key(&registry, path, &opening, &key, None, time)?
        } else {
            jobs::add_key(&registry, path, &opening, &key, None, time)?
        };
        put_report(report, &done);
        Ok(())
    })
}

/// Wipes a key slot. Without VDKIT_FORCE in `flags`, a key of `opening` must open another slot. `report` may
/// be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_key_remove(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    slot: u32,
    flags: u32,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        border::known(flags, crate::jobs::VDKIT_FORCE)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let force = flags & crate::jobs::VDKIT_FORCE != 0;
        let opening = self::opening(opening);
        let done = jobs::remove_key(&vdkit::registry(), path, &opening, slot, force)?;
        put_report(report, &done);
        Ok(())
    })
}
