//! Safe resolution of a symbolic link to a file that will be replaced.
//!
//! In a sticky world-writable folder (`/tmp`), any user can put a link under a name that another
//! user is about to write to. The kernel refuses to follow such a link if `fs.protected_symlinks`
//! is set, and to write to another user's file there if `fs.protected_regular` is set. A program
//! that resolves a link itself bypasses the first rule; one that renames a new file over an old one
//! bypasses the second. So this module enforces both rules, whatever the kernel's settings.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{Error, IoAction, Result};

/// Maximum links followed, as in the kernel.
const LINKS_MAX: usize = 40;

/// The folder of a path: `.` for a name alone.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn open_folder(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    retry_on_intr(|| rustix::fs::open(folder_of(path), flags, Mode::empty()))
}

/// Whether a folder is world-writable and sticky.
fn is_shared(folder: &Stat) -> bool {
    let mode = Mode::from_raw_mode(folder.st_mode);
    mode.contains(Mode::SVTX | Mode::WOTH)
}

/// Whether a file in a shared folder belongs neither to the folder's owner nor to this process's
/// user.
fn is_strangers(folder: &Stat, found: &Stat) -> bool {
    let own = rustix::process::geteuid().as_raw();
    is_shared(folder) && found.st_uid != folder.st_uid && found.st_uid != own
}

fn refused(path: &Path, what: &str, owner: u32) -> Error {
    let why = format!(
        "{what} of user {owner} in a folder that everybody may write to; remove it first, or choose \
         another name"
    );
    Error::file_io(
        &path.display().to_string(),
        IoAction::Open,
        io::Error::new(io::ErrorKind::PermissionDenied, why),
    )
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Followed {
    /// A path that is no symbolic link, or that of a descriptor. The target need not exist.
    pub(crate) path: PathBuf,
    /// It is an open descriptor (`/proc/self/fd/3`, `/dev/fd/3`). The text of this link is no path to
    /// what is open: that may have no name, or another file may have its name by now.
    pub(crate) descriptor: bool,
}

/// Resolves a path to one that is no symbolic link, or to an open descriptor.
///
/// # Errors
/// [`Error::File`] for another user's link in a world-writable sticky folder, and for link loops.
pub(crate) fn follow(path: &Path) -> Result<Followed> {
    let named = |path| Ok(Followed { path, descriptor: false });
    let fail = |errno: Errno| Error::file_io(&path.display().to_string(), IoAction::Open, errno);
    let mut at = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Some(name) = at.file_name() else { return named(at) };
        let folder = match open_folder(&at) {
            Ok(folder) => folder,
            // Opening the file reports whether it exists.
            Err(Errno::NOENT | Errno::NOTDIR) => return named(at),
            Err(errno) => return Err(fail(errno)),
        };
        // Opened once, so that owner and target are read from the same link.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = match retry_on_intr(|| rustix::fs::openat(&folder, name, flags, Mode::empty())) {
            Ok(link) => link,
            Err(Errno::NOENT) => return named(at),
            Err(errno) => return Err(fail(errno)),
        };
        let found = rustix::fs::fstat(&link).map_err(fail)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            return named(at);
        }
        if rustix::fs::fstatfs(&folder).map_err(fail)?.f_type == PROC_SUPER_MAGIC {
            return Ok(Followed { path: at, descriptor: true });
        }
        if is_strangers(&rustix::fs::fstat(&folder).map_err(fail)?, &found) {
            return Err(refused(path, "is a symbolic link", found.st_uid));
        }
        let target = rustix::fs::readlinkat(&link, "", Vec::new()).map_err(fail)?;
        at = folder_of(&at).join(OsStr::from_bytes(target.as_bytes()));
    }
    Err(fail(Errno::LOOP))
}

/// Refuses to replace another user's file in a world-writable sticky folder: the new file, with its
/// data, would belong to that user.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn check_owner(path: &Path, found: &Stat) -> Result<()> {
    let fail = |errno: Errno| Error::file_io(&path.display().to_string(), IoAction::Open, errno);
    if path.file_name().is_none() {
        return Ok(());
    }
    let folder = rustix::fs::fstat(open_folder(path).map_err(fail)?).map_err(fail)?;
    if is_strangers(&folder, found) {
        return Err(refused(path, "is a file", found.st_uid));
    }
    Ok(())
}
