//! Options and key slots of existing images.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;

use vdkit::{Secret, jobs};

use crate::border::{self, call};
use crate::jobs::{VDKIT_FORCE, Watch, json_of, run, vdkit_monitor};
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
        let opening = self::opening(opening).writable(true);
        run(monitor, report, |registry, monitor| {
            jobs::amend(registry, path, &opening, [options], monitor)
        })
    })
}

/// Lists the key slots of an encrypted image, and those that the keys of `opening` open, as JSON for
/// vdkit_free(). `monitor` hears of slots that were tried, here and in the functions below; it may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_keys(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    monitor: Option<&vdkit_monitor>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = border::place_of(json)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let (opening, watch) = (self::opening(opening), Watch::new(monitor)?);
        let listed = jobs::list_keys(&vdkit::registry(), path, &opening, &watch.monitor())?;
        place.write(border::new_text(&json_of(&listed)));
        Ok(())
    })
}

/// For vdkit_key_add(): the key of `opening` goes, once the new one opens the image.
pub const VDKIT_KEY_REPLACE: u32 = 1;

/// Adds a key of `len` bytes to an encrypted image that a key of `opening` opens; durable on return.
/// `milliseconds`: how long trying the new key shall take on this machine; 0 takes 2000. `flags`:
/// VDKIT_KEY_REPLACE, or 0. If `monitor` ends it, the keys are as before. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_key_add(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    key: *const c_void,
    len: usize,
    milliseconds: u32,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        border::known(flags, VDKIT_KEY_REPLACE)?;
        // SAFETY: the header's promise.
        let (path, key) = unsafe { (border::path(path, "path")?, border::bytes(key, len)?) };
        let (opening, key) = (self::opening(opening), Secret::new(key.to_vec()));
        let time = if milliseconds == 0 { MILLISECONDS } else { milliseconds.into() };
        let replace = flags & VDKIT_KEY_REPLACE != 0;
        let add = if replace { jobs::change_key } else { jobs::add_key };
        run(monitor, report, |registry, monitor| {
            add(registry, path, &opening, &key, None, time, monitor)
        })
    })
}

/// Wipes a key slot. Without VDKIT_FORCE in `flags`, a key of `opening` must open another slot. If `monitor`
/// ends it, nothing is wiped. `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_key_remove(
    path: *const c_char,
    opening: Option<&vdkit_open_options>,
    slot: u32,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        border::known(flags, VDKIT_FORCE)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let (opening, force) = (self::opening(opening), flags & VDKIT_FORCE != 0);
        run(monitor, report, |registry, monitor| {
            jobs::remove_key(registry, path, &opening, slot, force, monitor)
        })
    })
}
