//! Large first writes by several threads, as in a conversion.
//!
//! A buffered write holds the inode lock from its first page to its last, so threads that write one
//! file wait for each other. Throughput depends on how long one write holds the lock:
//!
//! - ext4 reserves space and looks up an extent for each block of a delayed allocation; `fallocate`
//!   does so for all blocks at once. The range is allocated before it is written.
//! - tmpfs allocates and fills one page after the other under the lock; a page fault on a mapping
//!   does the same without it, at more processor time. One thread writes; threads that would have
//!   to wait copy into a mapping.
//!
//! # Pieces on ext4
//! The page cache takes as large a folio as one write covers (ext4: since Linux 6.16), and ext4
//! keeps a list of a folio's blocks that each later write walks from its beginning
//! (`ext4_block_write_begin`). So after writes of 1 MiB, later small writes and allocating writes
//! are slow. Writes are split into smaller pieces, which make smaller folios.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::file::FileStorage;
use crate::open::FileKind;
use crate::sys;

/// Below this size a write does not hold the lock for long.
pub const BULK_BYTES_MIN: usize = 128 << 10;

/// Maximum bytes per system call on ext4: for writes to a disk in use, and to a new file.
const PIECE_BYTES: usize = 16 << 10;
const NEW_PIECE_BYTES: usize = 64 << 10;

/// `f_type` of statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
/// Also ext2 and ext3, which do not support `fallocate`: the first attempt detects that.
const EXT4_MAGIC: u64 = 0xef53;
const XFS_MAGIC: u64 = 0x5846_5342;

/// File system type, as far as it affects reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// tmpfs or ramfs: reads never wait for a device.
    Memory,
    /// ext2, ext3 or ext4.
    Ext,
    /// XFS.
    Xfs,
    /// Any other.
    Other,
}

impl FileSystem {
    /// Queries the kernel. For a block device this is `Other`: statfs would describe the file
    /// system of the device node, a tmpfs.
    pub fn of(file: &std::fs::File, kind: FileKind) -> Self {
        if kind == FileKind::BlockDevice {
            return Self::Other;
        }
        match rustix::fs::fstatfs(file).map_or(0, |stat| stat.f_type as u64 & 0xffff_ffff) {
            TMPFS_MAGIC | RAMFS_MAGIC => Self::Memory,
            EXT4_MAGIC => Self::Ext,
            XFS_MAGIC => Self::Xfs,
            _ => Self::Other,
        }
    }
}

/// How large first writes reach a file.
#[derive(Debug)]
pub enum InitialWrite {
    /// As any other write.
    Plain,
    /// Allocate first, until that fails.
    Allocate(AtomicBool),
    /// The lock holder writes; others copy into a mapping, until that fails.
    Lanes(Mutex<()>, AtomicBool),
}

impl InitialWrite {
    /// The method for a file system.
    pub fn new(file_system: FileSystem) -> Self {
        match file_system {
            FileSystem::Ext => Self::Allocate(AtomicBool::new(true)),
            FileSystem::Memory => Self::Lanes(Mutex::new(()), AtomicBool::new(true)),
            FileSystem::Xfs | FileSystem::Other => Self::Plain,
        }
    }

    /// Maximum bytes per system call.
    pub fn piece_bytes(&self) -> usize {
        match self {
            Self::Allocate(_) => PIECE_BYTES,
            Self::Plain | Self::Lanes(..) => usize::MAX,
        }
    }

    /// Whether it works only within the file's length.
    pub fn wants_len(&self) -> bool {
        matches!(self, Self::Lanes(..))
    }
}

impl FileStorage {
    /// Writes all of `buf` to a range that was never written.
    pub(crate) fn write_bulk(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        match self.cache_overflow(buf.len()) {
            Some(past) => past.write(self, buf, offset),
            None => self.write_bulk_cached(buf, offset),
        }
    }

    /// Allocates a range that will be written, if worthwhile.
    pub(crate) fn allocate_bulk(&self, offset: u64, len: u64) {
        let InitialWrite::Allocate(works) = self.initial_write() else { return };
        if works.load(Ordering::Relaxed) {
            let allocated =
                rustix::fs::fallocate(self.file(), FallocateFlags::empty(), offset, len);
            // The write reports any other error (no space, a signal).
            if let Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) = allocated {
                works.store(false, Ordering::Relaxed);
            }
        }
    }

    /// [`Self::write_bulk`] through the page cache, or as the cache mode says.
    pub(crate) fn write_bulk_cached(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        match self.initial_write() {
            InitialWrite::Plain => self.write_bytes(buf, offset),
            InitialWrite::Allocate(_) => {
                let _length = self.hold_length();
                self.allocate_bulk(offset, buf.len() as u64);
                self.write_in_pieces(buf, offset, NEW_PIECE_BYTES)
            }
            InitialWrite::Lanes(lane, works) => {
                if let Some(_mine) = lane.try_lock() {
                    return self.write_bytes(buf, offset);
                }
                if works.load(Ordering::Relaxed) {
                    let _length = self.hold_length();
                    let inside = offset + buf.len() as u64 <= self.raw_len()?;
                    match inside.then(|| sys::copy_to_mapping(self.file().as_fd(), offset, buf)) {
                        Some(Ok(())) => return Ok(()),
                        // No space, or a concurrently truncated file: the write returns the real
                        // error.
                        None | Some(Err(Errno::FAULT)) => {}
                        Some(Err(_)) => works.store(false, Ordering::Relaxed),
                    }
                }
                self.write_bytes(buf, offset)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vdkit_block::{CacheMode, HostOffset, InitialWrites, SpaceMap, Storage, StorageExt};

    use super::*;
    use crate::open::FileOptions;

    /// Several threads write pieces of odd sizes, some past the end; all bytes arrive.
    fn pieces_arrive(folder: &Path) {
        let options = FileOptions::read_write().cache(CacheMode::Unsafe);
        let file = FileStorage::create(folder.join("bulk"), &options).unwrap();
        let (piece, count) = (BULK_BYTES_MIN + 4096 + 13, 48_u64);
        file.expect_len(piece as u64 * count / 2).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let file = &file;
                scope.spawn(move || {
                    for index in (thread..count).step_by(4) {
                        let buf = vec![index as u8 + 1; piece];
                        file.write_new(&buf, HostOffset(index * piece as u64)).unwrap();
                    }
                });
            }
        });
        assert_eq!(file.len().unwrap(), piece as u64 * count);
        let mut buf = vec![0; piece];
        for index in 0..count {
            file.read_at(&mut buf, HostOffset(index * piece as u64)).unwrap();
            assert!(buf.iter().all(|&b| b == index as u8 + 1), "piece {index}");
        }
        assert!(file.allocated_bytes().unwrap() >= piece as u64 * count);
    }

    #[test]
    fn pieces_arrive_on_the_scratch_file_system() {
        pieces_arrive(tempfile::tempdir().unwrap().path());
    }

    #[test]
    fn pieces_arrive_in_memory() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        pieces_arrive(folder.path());
    }

    #[test]
    fn a_busy_lane_is_gone_around() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let options = FileOptions::read_write().cache(CacheMode::Unsafe);
        let file = FileStorage::create(folder.path().join("bulk"), &options).unwrap();
        let InitialWrite::Lanes(lane, works) = file.initial_write() else {
            panic!("/dev/shm is no tmpfs")
        };
        let buf = vec![7; BULK_BYTES_MIN + 5];
        let _busy = lane.lock();
        // Beyond the end there is nothing to map, so the write falls back.
        file.write_new(&buf, HostOffset(3)).unwrap();
        assert_eq!(file.len().unwrap(), buf.len() as u64 + 3);
        file.expect_len(1 << 20).unwrap();
        file.write_new(&buf, HostOffset(300_001)).unwrap();
        assert!(works.load(Ordering::Relaxed), "copying to a mapping was refused here");
        let mut all = vec![0; 1 << 20];
        file.read_at(&mut all, HostOffset(0)).unwrap();
        for (at, &byte) in all.iter().enumerate() {
            let in_one = |from: usize| (from..from + buf.len()).contains(&at);
            assert_eq!(byte == 7, in_one(3) || in_one(300_001), "byte {at}");
        }
    }

    #[test]
    fn a_full_file_system_is_an_error_on_each_lane() {
        // The mapping is longer than the file system, so its pages cannot be allocated.
        let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 1 << 20) else { return };
        let options = FileOptions::read_write().cache(CacheMode::Unsafe);
        let file = FileStorage::create(small.path().join("bulk"), &options).unwrap();
        file.expect_len(8 << 20).unwrap();
        let InitialWrite::Lanes(lane, _) = file.initial_write() else { panic!("no tmpfs") };
        let _busy = lane.lock();
        let failed = file.write_new(&vec![1; 2 << 20], HostOffset(0)).unwrap_err();
        assert!(failed.to_string().contains("space"), "{failed}");
    }

    #[test]
    fn a_device_is_no_memory_though_its_name_lies_there() {
        let Some(device) = vdkit_testkit::fs::loop_device(1 << 20, 512) else { return };
        let device = FileStorage::open(device.path(), &FileOptions::read_write()).unwrap();
        assert!(!device.reads_never_wait());
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = FileStorage::create(folder.path().join("file"), &FileOptions::read_write());
        assert!(file.unwrap().reads_never_wait());
    }

    /// Number of write system calls of this thread.
    fn writes() -> u64 {
        let counts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        let line = counts.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap();
        line.parse().unwrap()
    }

    #[test]
    fn pieces_are_small_on_ext4_alone() {
        let folder = tempfile::tempdir().unwrap();
        for cache in [CacheMode::Writeback, CacheMode::Writethrough] {
            let options = FileOptions::read_write().cache(cache);
            let file = FileStorage::create(folder.path().join("pieces"), &options).unwrap();
            let of = |act: &dyn Fn()| {
                let before = writes();
                act();
                writes() - before
            };
            let buf = vec![7; 1 << 20];
            let found = (
                of(&|| file.write_at(&buf, HostOffset(0)).unwrap()),
                of(&|| file.write_new(&buf, HostOffset(1 << 20)).unwrap()),
            );
            let ext = FileSystem::of(file.file(), FileKind::Regular);
            let wanted = if ext == FileSystem::Ext { (64, 16) } else { (1, 1) };
            assert_eq!(found, wanted, "{cache:?} on {ext:?}");
            std::fs::remove_file(folder.path().join("pieces")).unwrap();
        }
    }
}
