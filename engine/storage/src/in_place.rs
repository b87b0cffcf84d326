//! Writing an existing file in place, where a new file cannot replace it.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{Error, IoAction, Result};

use crate::file::{FileStorage, is_at};
use crate::links;
use crate::open::{CreateMode, FileOptions};

/// Whether a new file that took the file's name would not be the one that others look at: another
/// name leads to the file too, or it is mounted at its name (as containers do it).
pub(crate) fn is_needed(file: &File, target: &Path) -> bool {
    let names = rustix::fs::fstat(file).map_or(1, |found| found.st_nlink);
    let mount = |path, flags| {
        let found = rustix::fs::statx(CWD, path, flags, StatxFlags::MNT_ID).ok()?;
        (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
    };
    // The target's own link was resolved before; its folder may be a link to another mount.
    let folder = mount(links::folder_of(target), AtFlags::empty());
    let mounts = mount(target, AtFlags::SYMLINK_NOFOLLOW).zip(folder);
    names > 1 || mounts.is_some_and(|(own, folder)| own != folder)
}

/// Whether an error means that no new file can be made beside a target, or take its name.
pub(crate) fn is_barred(errno: Option<Errno>) -> bool {
    use Errno as E;
    matches!(errno, Some(E::ACCESS | E::PERM | E::ROFS | E::BUSY | E::XDEV))
}

/// The system's error within an error.
pub(crate) fn errno_of(error: &Error) -> Option<Errno> {
    match error {
        Error::File { source, .. } => Errno::from_io_error(source),
        _ => None,
    }
}

/// Opens the file that was found at the target. Its lock must have been released.
pub(crate) fn open_found(
    target: &Path,
    found: &File,
    options: &FileOptions,
) -> Result<FileStorage> {
    let options = FileOptions { writable: true, create: CreateMode::None, ..*options };
    let storage = FileStorage::open(target, &options)?;
    if !is_at(found, rustix::fs::fstat(storage.file())) {
        return Err(taken(target));
    }
    Ok(storage)
}

/// The error for a target whose name leads to another file by now.
pub(crate) fn taken(target: &Path) -> Error {
    let what = "another file has taken its name meanwhile, and stays".to_owned();
    Error::Busy { file: target.display().to_string(), what }
}

/// Copies a finished file over the one that it cannot replace, `found` at `target`, and syncs that.
/// After a failure that one is empty.
pub(crate) fn write_back(finished: &Path, target: &Path, found: &File) -> Result<()> {
    let fail = |source| Error::file_io(&target.display().to_string(), IoAction::Rename, source);
    // As in `Replaced::open`: links were resolved before.
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let to =
        retry_on_intr(|| rustix::fs::open(target, flags, Mode::empty())).map_err(io::Error::from);
    let to = File::from(to.map_err(fail)?);
    if !is_at(found, rustix::fs::fstat(&to)) {
        return Err(taken(target));
    }
    copy(finished, &to).map_err(|source| {
        // Report the first error.
        let _ = to.set_len(0);
        fail(source)
    })
}

/// Copies the data of a file; its holes become holes.
fn copy(from: &Path, mut to: &File) -> io::Result<()> {
    use std::io::{Read, Seek};
    let mut from = File::open(from)?;
    let len = from.metadata()?.len();
    to.set_len(0)?;
    to.set_len(len)?;
    let mut at = 0;
    while at < len {
        at = match rustix::fs::seek(&from, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break,
            // A file system without holes.
            Err(Errno::INVAL) => at,
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(&from, SeekFrom::Hole(at)).unwrap_or(len);
        from.seek(io::SeekFrom::Start(at))?;
        to.seek(io::SeekFrom::Start(at))?;
        at += io::copy(&mut (&mut from).take(end - at), &mut to)?;
        if at < end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    to.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn a_failed_copy_leaves_an_empty_file() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("to");
        std::fs::write(&to, "what was there").unwrap();
        let found = File::open(&to).unwrap();
        // A folder can be opened, but not read.
        write_back(folder.path(), &to, &found).unwrap_err();
        assert_eq!(found.metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_folder_that_is_a_link_to_another_mount_holds_files_that_can_be_replaced() {
        let (here, there) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        std::os::unix::fs::symlink(there.path(), here.path().join("link")).unwrap();
        let target = here.path().join("link/image");
        let file = File::create(&target).unwrap();
        assert!(!is_needed(&file, &target));
        std::fs::hard_link(&target, there.path().join("other")).unwrap();
        assert!(is_needed(&file, &target));
    }

    #[test]
    fn a_copy_has_the_data_and_the_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        for at in [0, 10 << 20, (64 << 20) - 4096] {
            file.write_all_at(&[7; 4096], at).unwrap();
        }
        std::fs::write(&to, vec![1; 100 << 20]).unwrap();
        let found = File::open(&to).unwrap();
        write_back(&from, &to, &found).unwrap();
        assert!(std::fs::read(&from).unwrap() == std::fs::read(&to).unwrap());
        assert!(found.metadata().unwrap().blocks() * 512 < 8 << 20, "the holes were filled");
        let other = File::open(&from).unwrap();
        assert!(matches!(write_back(&from, &to, &other), Err(Error::Busy { .. })));
    }
}
