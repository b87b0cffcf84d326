//! Deferred removal of a file.

use std::path::{Path, PathBuf};

use vdkit_block::Result;

use crate::file::is_at;
use crate::lock::LockMode;
use crate::pending::Replaced;

/// A file to be removed once another step is done. Until then it is locked as by a writer: neither
/// other processes nor this one can use it.
#[derive(Debug)]
pub struct PendingRemoval {
    path: PathBuf,
    held: Replaced,
}

impl PendingRemoval {
    /// Locks a file. `None` if there is no regular file (a symbolic link is none).
    ///
    /// # Errors
    /// [`vdkit_block::Error::Locked`] if it is in use; [`vdkit_block::Error::File`].
    pub fn prepare(path: &Path, lock: LockMode) -> Result<Option<Self>> {
        if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
            return Ok(None);
        }
        let held = Replaced::open(path, lock, false)?;
        Ok(held.map(|held| Self { path: path.to_owned(), held }))
    }

    /// Removes the file, unless its name leads to another file by now.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn remove(self) -> std::io::Result<()> {
        if is_at(&self.held.file, rustix::fs::lstat(&self.path)) {
            std::fs::remove_file(&self.path)?;
        }
        Ok(())
    }
}
