//! Following a symbolic link to a file that is to be replaced, without being led astray.
//!
//! In a folder that everybody may write to and whose files only their owners may remove (`/tmp`),
//! anybody can put a link under the name that somebody else is about to write to. The kernel refuses
//! to follow such a link where `fs.protected_symlinks` is set, and to write to a stranger's file there
//! where `fs.protected_regular` is. A program that reads a link by itself goes round the first, and one
//! that renames a new file over an old one goes round the second. So both rules are kept here, whatever
//! the kernel is set to.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use vdkit_block::{Error, IoAction, Result};

use crate::open::{file_error, retry};

/// Links that lead to links, at most: as many as the kernel follows.
const LINKS_MAX: usize = 40;

/// A name, and the folder that it is looked up in.
struct Place<'a> {
    folder: &'a Path,
    name: &'a OsStr,
}

impl<'a> Place<'a> {
    fn of(path: &'a Path) -> Option<Self> {
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        Some(Self { folder, name: path.file_name()? })
    }

    fn open_folder(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        retry(|| rustix::fs::openat(CWD, self.folder, flags, Mode::empty()))
    }
}

/// Whether a folder is one where everybody may make files and only owners may remove them.
fn is_shared(folder: &Stat) -> bool {
    let mode = Mode::from_raw_mode(folder.st_mode);
    mode.contains(Mode::SVTX | Mode::WOTH)
}

/// Whether what lies in a shared folder was put there by somebody who is neither the folder's owner nor
/// this process's user.
fn is_strangers(folder: &Stat, found: &Stat) -> bool {
    let own = rustix::process::geteuid().as_raw();
    is_shared(folder) && found.st_uid != folder.st_uid && found.st_uid != own
}

fn refused(path: &Path, what: &str, owner: u32) -> Error {
    let why = format!(
        "{what} of user {owner} in a folder that everybody may write to; remove it first, or choose \
         another name"
    );
    file_error(
        &path.display().to_string(),
        IoAction::Open,
        io::Error::new(io::ErrorKind::PermissionDenied, why),
    )
}

/// The name that a path leads to, which is no symbolic link: the path itself, or what it points to.
/// Nothing need be there.
///
/// # Errors
/// [`Error::File`] for a link that a stranger put into a folder that everybody may write to, and for
/// links that go in circles.
pub(crate) fn follow(path: &Path) -> Result<PathBuf> {
    let fail = |errno: Errno| file_error(&path.display().to_string(), IoAction::Open, errno);
    let mut at = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Some(place) = Place::of(&at) else { return Ok(at) };
        let folder = match place.open_folder() {
            Ok(folder) => folder,
            // What is there or not is said by who opens the file.
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(at),
            Err(errno) => return Err(fail(errno)),
        };
        // Opened once, so that its owner and where it points are those of one and the same link.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = match retry(|| rustix::fs::openat(&folder, place.name, flags, Mode::empty())) {
            Ok(link) => link,
            Err(Errno::NOENT) => return Ok(at),
            Err(errno) => return Err(fail(errno)),
        };
        let found = rustix::fs::fstat(&link).map_err(fail)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Symlink {
            return Ok(at);
        }
        if is_strangers(&rustix::fs::fstat(&folder).map_err(fail)?, &found) {
            return Err(refused(path, "is a symbolic link", found.st_uid));
        }
        let target = rustix::fs::readlinkat(&link, "", Vec::new()).map_err(fail)?;
        at = place.folder.join(OsStr::from_bytes(target.as_bytes()));
    }
    Err(fail(Errno::LOOP))
}

/// Refuses to take the place of a file that a stranger put into a folder that everybody may write to:
/// the new file would be the stranger's, and its bytes with it.
///
/// # Errors
/// [`Error::File`].
pub(crate) fn check_owner(path: &Path, found: &Stat) -> Result<()> {
    let fail = |errno: Errno| file_error(&path.display().to_string(), IoAction::Open, errno);
    let Some(place) = Place::of(path) else { return Ok(()) };
    let folder = rustix::fs::fstat(place.open_folder().map_err(fail)?).map_err(fail)?;
    if is_strangers(&folder, found) {
        return Err(refused(path, "is a file", found.st_uid));
    }
    Ok(())
}
