//! A file that is going to be removed.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vdkit_block::{IoAction, Result};

use crate::lock::{ImageLock, LockMode};
use crate::open::{FileKind, file_error, kind_of_file, retry};

/// A file that is removed once something else is done. It is locked until then, as a writer
/// locks it: nobody else uses it, and neither does this process.
#[derive(Debug)]
pub struct PendingRemoval {
    path: PathBuf,
    file: File,
    lock: Option<ImageLock>,
}

impl PendingRemoval {
    /// Locks a file. Nothing where there is none, or no regular file.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Locked`] where somebody uses it; [`vdkit_block::Error::File`].
    pub fn prepare(path: &Path, lock: LockMode) -> Result<Option<Self>> {
        let name = path.display().to_string();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = match retry(|| rustix::fs::open(path, flags, Mode::empty())) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(file_error(&name, IoAction::Open, errno)),
        };
        if !matches!(kind_of_file(&name, &file), Ok(FileKind::Regular)) {
            return Ok(None);
        }
        let lock = match lock {
            LockMode::Auto => Some(ImageLock::take(&name, &file, true)?),
            LockMode::Off => None,
        };
        Ok(Some(Self { path: path.to_owned(), file, lock }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless its name leads to another one by now.
    ///
    /// # Errors
    /// What the system says.
    pub fn remove(self) -> std::io::Result<()> {
        let (ours, named) = (rustix::fs::fstat(self.file.as_fd())?, rustix::fs::stat(&self.path)?);
        if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino) {
            std::fs::remove_file(&self.path)?;
        }
        Ok(())
    }
}

impl Drop for PendingRemoval {
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            lock.release(&self.file);
        }
    }
}
