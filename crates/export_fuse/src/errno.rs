//! The system's numbers for errors.

use fuser::Errno;
use vdkit_block::{Error, ErrorKind};

/// What a program is told of an error.
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
