//! File attributes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use parking_lot::Mutex;
use vdkit_chain::Disk;

/// The unit of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Owner and permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Permission bits.
    pub permissions: u16,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// Attributes that do not come from the disk. They last as long as the mount.
#[derive(Debug)]
pub struct Attributes {
    owner: Mutex<Owner>,
    /// Nanoseconds since 1970.
    accessed: AtomicU64,
    modified: AtomicU64,
    changed: AtomicU64,
}

/// A change of attributes; `None` keeps the old value.
#[derive(Debug, Default)]
pub struct NewAttributes {
    /// Permission bits.
    pub mode: Option<u32>,
    /// User.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Last read.
    pub atime: Option<TimeOrNow>,
    /// Last write.
    pub mtime: Option<TimeOrNow>,
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn now() -> u64 {
    nanos(SystemTime::now())
}

impl Attributes {
    /// Attributes of a file created now.
    pub fn new(owner: Owner) -> Self {
        let now = now();
        Self {
            owner: Mutex::new(owner),
            accessed: now.into(),
            modified: now.into(),
            changed: now.into(),
        }
    }

    /// Updates the times after a write.
    pub fn touch(&self) {
        let now = now();
        self.modified.store(now, Ordering::Relaxed);
        self.changed.store(now, Ordering::Relaxed);
    }

    /// Applies a change.
    pub fn set(&self, new: &NewAttributes) {
        let time = |given: &TimeOrNow| match given {
            TimeOrNow::SpecificTime(time) => nanos(*time),
            TimeOrNow::Now => now(),
        };
        if let Some(given) = &new.atime {
            self.accessed.store(time(given), Ordering::Relaxed);
        }
        if let Some(given) = &new.mtime {
            self.modified.store(time(given), Ordering::Relaxed);
        }
        self.changed.store(now(), Ordering::Relaxed);
        let mut owner = self.owner.lock();
        if let Some(mode) = new.mode {
            owner.permissions = (mode & 0o777) as u16;
        }
        owner.uid = new.uid.unwrap_or(owner.uid);
        owner.gid = new.gid.unwrap_or(owner.gid);
    }

    /// The attributes for this disk.
    pub fn of(&self, disk: &Disk) -> FileAttr {
        let size = disk.guest_bytes();
        let owner = *self.owner.lock();
        let time =
            |field: &AtomicU64| UNIX_EPOCH + Duration::from_nanos(field.load(Ordering::Relaxed));
        FileAttr {
            ino: INodeNo::ROOT,
            size,
            blocks: allocated_bytes(disk).div_ceil(BLOCK_BYTES),
            atime: time(&self.accessed),
            mtime: time(&self.modified),
            ctime: time(&self.changed),
            crtime: UNIX_EPOCH,
            kind: FileType::RegularFile,
            perm: owner.permissions,
            nlink: 1,
            uid: owner.uid,
            gid: owner.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// Host space of all files of the chain, at most the disk's size: a cheap estimate of the data
/// bytes. Programs that find less than the size search for holes.
pub fn allocated_bytes(disk: &Disk) -> u64 {
    let size = disk.guest_bytes();
    let mut sum = 0u64;
    for layer in disk.layers() {
        let format = layer.format();
        for file in [format.storage().clone()].into_iter().chain(format.other_files()) {
            // Unknown counts as fully allocated: programs then do not rely on holes.
            sum = sum.saturating_add(file.allocated_bytes().unwrap_or(size));
        }
    }
    sum.min(size)
}
