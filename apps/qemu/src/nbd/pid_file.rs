//! `--pid-file`: a file with the server's process id, locked while the server runs.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::FlockOperation;

use crate::failure::{Failure, system_words};

/// Writes the file. It is locked until what is returned is dropped.
///
/// # Errors
/// Another server has it locked; it cannot be written.
pub fn write(path: &Path) -> Result<File, Failure> {
    let failed = |error| {
        Failure::new(format!("Could not create '{}': {}", path.display(), system_words(&error)))
    };
    let mut options = OpenOptions::new();
    // Not emptied before it is locked: it may be another server's.
    options.create(true).truncate(false).write(true).mode(0o600);
    let mut file = options.open(path).map_err(failed)?;
    rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| {
        Failure::new(format!("Cannot lock pid file: {}", system_words(&errno.into())))
    })?;
    let text = format!("{}\n", std::process::id());
    let written = file.set_len(0).and_then(|()| file.write_all(text.as_bytes()));
    written.map(|()| file).map_err(failed)
}
