//! The file under the mount.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use vdkit_block::OwnerProcess;

use crate::attributes::Owner;

/// Permissions of a created mount point.
const NEW_PERMISSIONS: u32 = 0o600;

/// Why a disk could not be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// A server ended without unmounting.
    #[error("{}: is still mounted, but the program that served it is gone", file.display())]
    Stale {
        /// The mount point.
        file: PathBuf,
    },
    /// There is a mount already.
    #[error("{}: something is mounted there already", file.display())]
    Mounted {
        /// The mount point.
        file: PathBuf,
    },
    /// The mount point is not a regular file.
    #[error("{}: is no regular file, and the disk is mounted as one", file.display())]
    NotAFile {
        /// The mount point.
        file: PathBuf,
    },
    /// The mount point cannot be examined or created.
    #[error("{}: cannot {action} the mount point: {source}", file.display())]
    Point {
        /// The mount point.
        file: PathBuf,
        /// The failed operation.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel has no FUSE.
    #[error("/dev/fuse: {source}")]
    NoFuse {
        /// The system's error.
        source: io::Error,
    },
    /// The helper for unprivileged mounts (fusermount) is missing.
    #[error("{}: cannot be mounted over: fusermount3 is not installed", file.display())]
    NoHelper {
        /// The mount point.
        file: PathBuf,
    },
    /// Mounting failed.
    #[error("{}: cannot be mounted over: {source}", file.display())]
    Mount {
        /// The mount point.
        file: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl MountError {
    /// A remedy, if known.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Stale { file } | Self::Mounted { file } => {
                let file = file.display();
                format!("umount {file} (or, as the user who mounted it: fusermount3 -u {file})")
            }
            Self::NotAFile { .. } => {
                "name a regular file, or one that does not exist: it is made, and removed at the end"
                    .to_owned()
            }
            Self::NoFuse { .. } => "modprobe fuse".to_owned(),
            Self::NoHelper { .. } => "apt-get install fuse3, or do it as root".to_owned(),
            Self::Point { .. } | Self::Mount { .. } => return None,
        })
    }
}

/// A regular file to be mounted over. A file created for the mount is removed on drop, unless
/// something is still mounted there, or this is a child of `fork`.
#[derive(Debug)]
pub struct MountPoint {
    path: PathBuf,
    owner: Owner,
    /// Device and inode, if the file was created.
    made: Option<(u64, u64)>,
    creator: OwnerProcess,
}

/// Result of unmounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmounted {
    /// Unmounted.
    Gone,
    /// Detached from its path; open files stay usable.
    Detached,
    /// Needs a privileged helper.
    NotAllowed,
}

impl MountPoint {
    /// Finds or creates the file.
    pub fn prepare(path: &Path) -> Result<Self, MountError> {
        let fail =
            |action, source: io::Error| MountError::Point { file: path.to_owned(), action, source };
        let made = match look(path) {
            Err(Errno::NOENT) => {
                OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .mode(NEW_PERMISSIONS)
                    .open(path)
                    .map_err(|error| fail("make", error))?;
                true
            }
            Err(Errno::NOTCONN) => return Err(MountError::Stale { file: path.to_owned() }),
            Err(errno) => return Err(fail("look at", errno.into())),
            Ok(found) if found.kind != FileType::RegularFile => {
                return Err(MountError::NotAFile { file: path.to_owned() });
            }
            Ok(found) if found.mounted => {
                return Err(MountError::Mounted { file: path.to_owned() });
            }
            Ok(_) => false,
        };
        let absolute = path.canonicalize().map_err(|error| fail("find", error))?;
        let found = look(&absolute).map_err(|errno| fail("look at", errno.into()))?;
        let (made, creator) = (made.then_some(found.identity), OwnerProcess::current());
        Ok(Self { path: absolute, owner: found.owner, made, creator })
    }

    /// Its absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its owner.
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// Unmounts; if in use, only detaches the mount from its path.
    pub fn unmount(&self) -> io::Result<Unmounted> {
        let unmount = |how| rustix::mount::unmount(&self.path, how | UnmountFlags::NOFOLLOW);
        match unmount(UnmountFlags::empty()) {
            // Another process unmounted it meanwhile.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(Unmounted::Gone),
            Err(Errno::PERM) => Ok(Unmounted::NotAllowed),
            Err(Errno::BUSY) => {
                unmount(UnmountFlags::DETACH)?;
                Ok(Unmounted::Detached)
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let Some(identity) = self.made.filter(|_| self.creator.is_current()) else { return };
        if look(&self.path).is_ok_and(|found| found.identity == identity && found.bytes == 0)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("{}: cannot be removed: {error}", self.path.display());
        }
    }
}

/// The file at a path, links followed.
struct Found {
    kind: FileType,
    /// Something is mounted there.
    mounted: bool,
    owner: Owner,
    identity: (u64, u64),
    bytes: u64,
}

fn look(path: &Path) -> Result<Found, Errno> {
    // The kernel could answer from its cache for a dead server.
    let ask = AtFlags::STATX_FORCE_SYNC;
    let stat = rustix::fs::statx(CWD, path, ask, StatxFlags::BASIC_STATS)?;
    Ok(Found {
        kind: FileType::from_raw_mode(stat.stx_mode.into()),
        mounted: stat.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT)
            && stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
        owner: Owner { permissions: stat.stx_mode & 0o777, uid: stat.stx_uid, gid: stat.stx_gid },
        identity: (
            u64::from(stat.stx_dev_major) << 32 | u64::from(stat.stx_dev_minor),
            stat.stx_ino,
        ),
        bytes: stat.stx_size,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_made_goes_away_again_and_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("made");
        let point = MountPoint::prepare(&made).unwrap();
        assert!(made.exists());
        assert_eq!(point.owner().permissions, 0o600);
        drop(point);
        assert!(!made.exists());

        let there = dir.path().join("there");
        std::fs::write(&there, b"kept").unwrap();
        drop(MountPoint::prepare(&there).unwrap());
        assert_eq!(std::fs::read(&there).unwrap(), b"kept");
    }

    #[test]
    fn a_child_of_fork_removes_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("made");
        let mut point = Some(MountPoint::prepare(&made).unwrap());
        assert!(vdkit_testkit::in_child(|| (), || point.take().is_some()));
        assert!(made.exists());
        drop(point);
        assert!(!made.exists());
    }

    #[test]
    fn what_somebody_wrote_into_it_meanwhile_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("made");
        let point = MountPoint::prepare(&made).unwrap();
        std::fs::write(&made, b"by somebody else").unwrap();
        drop(point);
        assert!(made.exists());
    }

    #[test]
    fn folders_devices_and_what_cannot_be_made_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path(), Path::new("/dev/null")] {
            let error = MountPoint::prepare(path).unwrap_err();
            assert!(matches!(error, MountError::NotAFile { .. }), "{error}");
            assert!(error.hint().is_some());
        }
        let error = MountPoint::prepare(&dir.path().join("no/such")).unwrap_err();
        assert!(error.to_string().contains("cannot make"), "{error}");
    }
}
