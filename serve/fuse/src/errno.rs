//! Maps errors to errno.

use fuser::Errno;
use vdkit_block::{Error, ErrorKind};

/// The errno of an error.
pub fn errno_of(error: &Error) -> Errno {
    match error {
        Error::ReadOnly { .. } => Errno::EROFS,
        Error::Unsupported { .. } => Errno::EOPNOTSUPP,
        _ => match error.kind() {
            ErrorKind::NoSpace => Errno::ENOSPC,
            ErrorKind::Usage => Errno::EINVAL,
            _ => Errno::EIO,
        },
    }
}
