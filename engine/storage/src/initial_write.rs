//! Large first writes by several threads, as in a conversion, on ext4.
//!
//! A buffered write holds the inode lock from its first page to its last, so threads that write one
//! file wait for each other. ext4 reserves space and looks up an extent for each block of a delayed
//! allocation; `fallocate` does so for all blocks at once. So the range is allocated before it is
//! written, and the lock is held for a shorter time.
//!
//! # Pieces
//! The page cache takes as large a folio as one write covers, and ext4 keeps a list of a folio's
//! blocks that each later write walks from its beginning (`ext4_block_write_begin`). So after
//! writes of 1 MiB, small writes are slow for as long as the folios stay. Writes are therefore split
//! into pieces, which make smaller folios. This holds for kernels with large folios on ext4, since
//! Linux 6.16. The environment variable `VDKIT_EXT4_PIECES=off` leaves the writes whole.

use std::sync::LazyLock;

use rustix::io::Errno;

use crate::file::FileStorage;
use crate::open::FileKind;

/// Below this size a write does not hold the lock for long.
pub const LARGE_BYTES_MIN: usize = 128 << 10;

/// Maximum bytes per system call on ext4 with large folios.
const PIECE_BYTES: usize = 64 << 10;

/// [`PIECE_BYTES`], or no limit if this kernel or the user wants none.
static EXT_PIECE_BYTES: LazyLock<usize> = LazyLock::new(|| {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let off = std::env::var_os("VDKIT_EXT4_PIECES").is_some_and(|value| value == "off");
    if has_large_folios(&release) && !off { PIECE_BYTES } else { usize::MAX }
});

/// Whether ext4 of a kernel release (`6.16.3-arch1`) has large folios.
fn has_large_folios(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(16))
}

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
pub struct InitialWrite {
    /// Allocate first, unless the file system cannot.
    allocates: bool,
    /// Maximum bytes per system call, of any write.
    pub piece_bytes: usize,
}

impl InitialWrite {
    /// The method for a file system.
    pub fn new(file_system: FileSystem) -> Self {
        let ext = file_system == FileSystem::Ext;
        let piece_bytes = if ext { *EXT_PIECE_BYTES } else { usize::MAX };
        Self { allocates: ext, piece_bytes }
    }
}

impl FileStorage {
    /// Writes all of `buf` to a range that was never written.
    pub(crate) fn write_initial(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        match self.cache_overflow(buf.len()) {
            Some(past) => past.write(self, buf, offset),
            None => self.write_initial_cached(buf, offset),
        }
    }

    /// Allocates a range that will be written, if worthwhile.
    pub(crate) fn allocate_initial(&self, offset: u64, len: u64) {
        if self.initial_write.allocates {
            // The write reports errors, such as no space.
            let _ = self.allocate_blocks(offset, len);
        }
    }

    /// [`Self::write_initial`] through the page cache, or as the cache mode says.
    pub(crate) fn write_initial_cached(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        self.allocate_initial(offset, buf.len() as u64);
        self.write_bytes(buf, offset)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vdkit_block::{CacheMode, HostOffset, InitialWrites, SpaceMap, Storage, StorageExt};

    use super::*;
    use crate::open::FileOptions;

    /// Several threads write pieces of odd sizes; all bytes arrive.
    fn pieces_arrive(folder: &Path) {
        let options = FileOptions::read_write().cache(CacheMode::Unsafe);
        let file = FileStorage::create(folder.join("initial"), &options).unwrap();
        let (piece, count) = (LARGE_BYTES_MIN + 4096 + 13, 48_u64);
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
    fn a_device_is_no_memory_though_its_name_lies_there() {
        let Some(device) = vdkit_testbase::fs::loop_device(1 << 20, 512) else { return };
        let device = FileStorage::open(device.path(), &FileOptions::read_write()).unwrap();
        assert!(!device.in_memory);
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = FileStorage::create(folder.path().join("file"), &FileOptions::read_write());
        assert!(file.unwrap().in_memory);
    }

    /// Number of write system calls of this thread.
    fn writes() -> u64 {
        let counts = std::fs::read_to_string("/proc/thread-self/io").unwrap();
        let line = counts.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap();
        line.parse().unwrap()
    }

    #[test]
    fn large_folios_begin_with_6_16() {
        for old in ["6.15.9-rc6", "5.19.0", "6.9", "6", "", "unknown"] {
            assert!(!has_large_folios(old), "{old}");
        }
        for new in ["6.16.0", "6.18.44-fc-v657", "7.0-rc1"] {
            assert!(has_large_folios(new), "{new}");
        }
    }

    #[test]
    fn pieces_are_small_on_ext4_alone() {
        for (kind, pieced) in [("ext4", true), ("xfs", false)] {
            let Some(folder) = vdkit_testbase::fs::mounted(kind, 320 << 20) else { return };
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
                let pieces = pieced && *EXT_PIECE_BYTES == PIECE_BYTES;
                let wanted = if pieces { (16, 16) } else { (1, 1) };
                assert_eq!(found, wanted, "{cache:?} on {kind}");
                std::fs::remove_file(folder.path().join("pieces")).unwrap();
            }
        }
    }
}
