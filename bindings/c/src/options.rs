//! How images are opened.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::PathBuf;

use vdkit::{BackingChoice, OpenOptions, RefJudge, RefPolicy, Secret};

use crate::border::{self, User, call, given, misuse};

/// How to open an image. New ones open for reading, with locks, with the format found in the file, and
/// follow references only within the image's own folder. One may be used to open from many threads at
/// once, but not while another thread changes it.
pub struct vdkit_open_options(pub(crate) OpenOptions);

/// Decides whether an image may open another file that it names: returns nonzero to allow it. `file`
/// is the image, `target` the name as it stands there. Called from the thread that opens the image.
pub type vdkit_reference_fn = Option<
    unsafe extern "C" fn(user: *mut c_void, file: *const c_char, target: *const c_char) -> c_int,
>;

/// Makes options. Freed by vdkit_open_options_free().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_new(
    options: Option<&mut MaybeUninit<*mut vdkit_open_options>>,
) -> c_int {
    call(|| {
        let new = Box::new(vdkit_open_options(OpenOptions::read_only()));
        border::place_of(options)?.write(Box::into_raw(new));
        Ok(())
    })
}

/// Frees options. They may be freed as soon as the functions that took them have returned. NULL is
/// allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_free(options: *mut vdkit_open_options) {
    // SAFETY: the header's promise.
    drop(unsafe { border::take(options) });
}

/// Opens the image for writing if `writable` is not 0. The format must then be named if the image is
/// raw.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_writable(
    options: Option<&mut vdkit_open_options>,
    writable: c_int,
) -> c_int {
    call(|| {
        given(options, "options")?.0.writable = writable != 0;
        Ok(())
    })
}

/// Names the format: one of vdkit_formats(); NULL finds it in the file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_format(
    options: Option<&mut vdkit_open_options>,
    format: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let format = unsafe { border::maybe_text(format) }?;
        given(options, "options")?.0.format = format.map(str::to_owned);
        Ok(())
    })
}

/// Sets the cache mode: "writeback" (the default), "none", "writethrough", "directsync" or "unsafe",
/// as in QEMU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_cache(
    options: Option<&mut vdkit_open_options>,
    cache: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let cache = unsafe { border::text(cache, "cache") }?.parse()?;
        given(options, "options")?.0.cache = cache;
        Ok(())
    })
}

/// Opens without QEMU's locks if `lock` is 0: for an image that another process writes, whose content
/// may then be inconsistent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_lock(
    options: Option<&mut vdkit_open_options>,
    lock: c_int,
) -> c_int {
    call(|| {
        given(options, "options")?.0.lock = lock != 0;
        Ok(())
    })
}

/// Opens an internal snapshot, by name or id; NULL opens the current disk.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_snapshot(
    options: Option<&mut vdkit_open_options>,
    snapshot: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let snapshot = unsafe { border::maybe_text(snapshot) }?;
        given(options, "options")?.0.snapshot = snapshot.map(str::to_owned);
        Ok(())
    })
}

/// Opens this file as the backing image; an empty name opens the image alone, and NULL the file that
/// the image names. `format` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_backing(
    options: Option<&mut vdkit_open_options>,
    backing: *const c_char,
    format: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let (backing, format) =
            unsafe { (border::maybe_text(backing)?, border::maybe_text(format)?) };
        given(options, "options")?.0.backing = match backing {
            None => BackingChoice::Follow,
            Some("") => BackingChoice::Ignore,
            Some(path) => BackingChoice::Override {
                path: PathBuf::from(path),
                format: format.map(str::to_owned),
            },
        };
        Ok(())
    })
}

/// Adds a passphrase or key for encrypted images: `len` bytes, which are copied, and wiped when the
/// options and all disks that use them are freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_add_key(
    options: Option<&mut vdkit_open_options>,
    key: *const c_void,
    len: usize,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let key = unsafe { border::bytes(key, len) }?;
        given(options, "options")?.0.keys.push(Secret::new(key.to_vec()));
        Ok(())
    })
}

/// Sets which files an image may name: "own-folder" (the default: beneath the image's folder),
/// "nothing", or "folder:PATH" (the own folder and this one; several calls add folders).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_references(
    options: Option<&mut vdkit_open_options>,
    policy: *const c_char,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let policy = unsafe { border::text(policy, "policy") }?;
        let refs = &mut given(options, "options")?.0.refs;
        *refs = match (policy, policy.strip_prefix("folder:")) {
            ("own-folder", _) => RefPolicy::OwnFolder,
            ("nothing", _) => RefPolicy::Nothing,
            (_, Some(folder)) => {
                let mut folders = match std::mem::take(refs) {
                    RefPolicy::Folders(folders) => folders,
                    _ => Vec::new(),
                };
                folders.push(PathBuf::from(folder));
                RefPolicy::Folders(folders)
            }
            _ => {
                return Err(misuse(format!(
                    "unknown policy '{policy}': use own-folder, nothing or folder:PATH"
                )));
            }
        };
        Ok(())
    })
}

/// Asks a function of the program about each reference.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_options_ask(
    options: Option<&mut vdkit_open_options>,
    decide: vdkit_reference_fn,
    user: *mut c_void,
) -> c_int {
    call(|| {
        let decide = given(decide, "decide")?;
        let user = User(user);
        let judge = RefJudge::new(move |file, target| {
            let user = &user;
            let (Ok(file), Ok(target)) =
                (std::ffi::CString::new(file), std::ffi::CString::new(target))
            else {
                return false;
            };
            // SAFETY: the program's own function with its own pointer; the strings live until it
            // returns.
            unsafe { decide(user.0, file.as_ptr(), target.as_ptr()) != 0 }
        });
        given(options, "options")?.0.refs = RefPolicy::Ask(judge);
        Ok(())
    })
}

/// The options, or the defaults for NULL.
pub(crate) fn opening(options: Option<&vdkit_open_options>) -> OpenOptions {
    options.map_or_else(OpenOptions::read_only, |options| options.0.clone())
}
