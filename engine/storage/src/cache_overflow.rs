//! Direct writes of large jobs, beyond a share of the page cache.
//!
//! A conversion ends when its last byte is in the page cache, not on the disk. While the kernel
//! takes bytes without writing them back, that is the fastest path. Once the writer waits for the
//! disk, the page cache only costs time: each page is allocated, filled, written and evicted again,
//! and other processes' pages with it. So the first bytes of a file go through the page cache and
//! the others directly to the disk (`O_DIRECT`).
//!
//! # Two paths into one file
//! Only whole pages are written directly, so that no page gets bytes on both paths: the kernel
//! would have to write it out before the direct write and read it again after it. If the kernel
//! nevertheless has a page of the range (readahead), the direct write drops it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{align_down, align_up, is_aligned};

use crate::buffer::{BOUNCE_BYTES_MAX, BufferPool};
use crate::direct;
use crate::file::FileStorage;
use crate::initial_write::FileSystem;
use crate::open::{CacheShare, FileKind};

/// Counts the large writes of a file, and directs those beyond its share past the page cache.
#[derive(Debug)]
pub struct CacheOverflow {
    share: u64,
    given: AtomicU64,
    /// `None` inside if the file does not support it.
    lane: OnceLock<Option<Lane>>,
}

/// A second, direct open of the same file.
#[derive(Debug)]
pub struct Lane {
    file: File,
    /// Memory alignment.
    align: u64,
    /// Offset alignment: a page, or more.
    unit: u64,
    pool: BufferPool,
    works: AtomicBool,
    /// Bytes written directly.
    written: AtomicU64,
}

impl CacheOverflow {
    /// `None` if everything goes through the page cache.
    pub fn new(share: CacheShare, file_system: FileSystem) -> Option<Self> {
        let CacheShare::Bytes(share) = share else { return None };
        matches!(file_system, FileSystem::Ext | FileSystem::Xfs).then(|| Self {
            share,
            given: AtomicU64::new(0),
            lane: OnceLock::new(),
        })
    }

    /// The direct lane for a write of `len` bytes; `None` while the page cache takes it.
    pub fn lane_for(&self, len: usize, file: &File) -> Option<&Lane> {
        let given = self.given.load(Ordering::Relaxed) + len as u64;
        let lane = match given > self.share {
            true => self.lane.get_or_init(|| Lane::open(file)).as_ref(),
            false => None,
        };
        let lane = lane.filter(|lane| lane.works.load(Ordering::Relaxed));
        if lane.is_none() {
            self.given.fetch_add(len as u64, Ordering::Relaxed);
        }
        lane
    }

    /// Bytes written past the page cache.
    #[cfg(test)]
    pub fn passed(&self) -> u64 {
        let lane = self.lane.get().and_then(Option::as_ref);
        lane.map_or(0, |lane| lane.written.load(Ordering::Relaxed))
    }
}

impl Lane {
    fn open(file: &File) -> Option<Self> {
        // The same inode, independent of its name.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC;
        let file =
            File::from(retry_on_intr(|| rustix::fs::open(&path, flags, Mode::empty())).ok()?);
        let align = u64::from(direct::alignment(&file, FileKind::Regular)?);
        let unit = align.max(rustix::param::page_size() as u64);
        let (works, written) = (AtomicBool::new(true), AtomicU64::new(0));
        Some(Self { file, align, unit, pool: BufferPool::new(unit as usize), works, written })
    }

    /// Writes all of `buf`, its whole pages directly.
    pub fn write(&self, of: &FileStorage, buf: &[u8], offset: u64) -> Result<(), Errno> {
        let end = offset + buf.len() as u64;
        let (from, to) = match align_up(offset, self.unit) {
            Some(from) if from < end => (from, align_down(end, self.unit).max(from)),
            _ => (end, end),
        };
        let (head, rest) = buf.split_at((from - offset) as usize);
        let (pages, tail) = rest.split_at((to - from) as usize);
        let cached = |part: &[u8], at| match part.is_empty() {
            true => Ok(()),
            false => of.write_initial_cached(part, at),
        };
        cached(head, offset)?;
        let done = self.write_pages(of, pages, from)?;
        cached(&pages[done..], from + done as u64)?;
        cached(tail, to)
    }

    /// Returns the bytes written. That is fewer than all, in whole pages, if the file turns out not
    /// to support direct writes.
    fn write_pages(&self, of: &FileStorage, pages: &[u8], offset: u64) -> Result<usize, Errno> {
        if pages.is_empty() {
            return Ok(0);
        }
        // ext4 writes in parallel only within the file's length, and only to allocated blocks.
        of.allocate_initial(offset, pages.len() as u64);
        let _length = of.hold_length();
        let mut done = 0;
        let fits = is_aligned(pages.as_ptr().addr() as u64, self.align);
        while done < pages.len() {
            let at = offset + done as u64;
            let n = if fits {
                retry_on_intr(|| rustix::io::pwrite(&self.file, &pages[done..], at))
            } else {
                let piece = &pages[done..pages.len().min(done + BOUNCE_BYTES_MAX)];
                let mut bounce = self.pool.take(piece.len());
                bounce[..piece.len()].copy_from_slice(piece);
                retry_on_intr(|| rustix::io::pwrite(&self.file, &bounce[..piece.len()], at))
            };
            match n {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => done += n,
                // The file does not support direct writes, contrary to what open reported.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                    self.works.store(false, Ordering::Relaxed);
                    break;
                }
                Err(errno) => return Err(errno),
            }
            if !is_aligned(done as u64, self.unit) {
                // A short write, as before the last block of a full disk: the rest of this page
                // takes the same path as the rest of the buffer.
                done = align_down(done as u64, self.unit) as usize;
                break;
            }
        }
        self.written.fetch_add(done as u64, Ordering::Relaxed);
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vdkit_block::{CacheMode, HostOffset, InitialWrites, Storage, StorageExt};
    use vdkit_testbase::fs::{Mounted, mounted};

    use super::*;
    use crate::buffer::AlignedBuf;
    use crate::open::FileOptions;

    const MIB: u64 = 1 << 20;

    fn create(folder: &Path, share: CacheShare) -> FileStorage {
        let options = FileOptions::read_write().cache(CacheMode::Unsafe).share(share);
        FileStorage::create(folder.join("past"), &options).unwrap()
    }

    /// Mounted file systems that support direct writes; empty if they cannot be made here.
    fn able(bytes: u64) -> impl Iterator<Item = Mounted> {
        ["ext4", "xfs"].into_iter().filter_map(move |kind| mounted(kind, bytes))
    }

    #[test]
    fn what_comes_after_the_share_goes_past_the_cache() {
        for folder in able(512 * MIB) {
            for (share, passed) in [
                (CacheShare::All, 0),
                (CacheShare::FILLED_ONCE, 0),
                (CacheShare::Bytes(MIB), 3 * MIB),
                (CacheShare::Bytes(MIB + 1), 3 * MIB),
                (CacheShare::Bytes(0), 4 * MIB),
            ] {
                let file = create(folder.path(), share);
                let buf = AlignedBuf::new(MIB as usize, 4096);
                for index in 0..4 {
                    file.write_new(&buf, HostOffset(index * MIB)).unwrap();
                }
                // Small writes and overwrites do not use the direct lane.
                file.write_new(&buf[..8192], HostOffset(0)).unwrap();
                file.write_at(&buf, HostOffset(0)).unwrap();
                let found = file.past.as_ref().map_or(0, CacheOverflow::passed);
                assert_eq!(found, passed, "{share:?} on {}", folder.path().display());
                std::fs::remove_file(folder.path().join("past")).unwrap();
            }
        }
    }

    #[test]
    fn only_whole_pages_go_past_the_cache() {
        for folder in able(512 * MIB) {
            let file = create(folder.path(), CacheShare::Bytes(0));
            // From 77 to 140078: 33 pages between 4096 and 139264.
            file.write_new(&[7; 140_001], HostOffset(77)).unwrap();
            assert_eq!(file.past.as_ref().unwrap().passed(), 33 * 4096);
            assert_eq!(file.len().unwrap(), 140_078);
            // 32 whole pages.
            file.write_new(&[7; 131_072], HostOffset(MIB)).unwrap();
            assert_eq!(file.past.as_ref().unwrap().passed(), 65 * 4096);
        }
    }

    #[test]
    fn a_file_that_refuses_after_all_is_written_the_ordinary_way() {
        for folder in able(512 * MIB) {
            let file = create(folder.path(), CacheShare::Bytes(0));
            let mut lane = Lane::open(file.file()).unwrap();
            // The lane reports a wrong alignment, or fails at the first byte or behind the first
            // piece.
            let aligned = lane.align;
            for (align, len, from) in [(1, 200_000, 5), (aligned, MIB as usize + 5, 8192)] {
                (lane.align, lane.unit) = (align, 1);
                lane.works.store(true, Ordering::Relaxed);
                let bytes: Vec<u8> = (0..=len).map(|at| (at / 3 % 251) as u8).collect();
                let bytes = &bytes[1..];
                lane.write(&file, bytes, from).unwrap();
                assert!(!lane.works.load(Ordering::Relaxed));
                let mut found = vec![0; len];
                file.read_at(&mut found, HostOffset(from)).unwrap();
                assert!(found == bytes, "from {from}");
                assert_eq!(file.len().unwrap(), from + len as u64);
            }
            assert_eq!(lane.written.into_inner(), MIB);
        }
    }

    /// Four threads write pieces that share pages, aligned pieces from aligned and unaligned
    /// memory, and metadata in between.
    #[test]
    fn both_ways_into_one_file_leave_each_other_alone() {
        const ODD: usize = 140_001;
        const SLOT: u64 = 512 << 10;
        const SLOTS: u64 = 48;
        let odd_from = SLOT * SLOTS + 77;
        let byte = |index: u64, salt: u8| (index as u8).wrapping_mul(5) ^ salt;
        for folder in able(512 * MIB) {
            let file = create(folder.path(), CacheShare::Bytes(MIB));
            let put = |index: u64| {
                let (slot, odd) = (index * SLOT, odd_from + index * ODD as u64);
                let mut pages = AlignedBuf::new(200 << 10, 4096);
                pages.fill(byte(index, 1));
                file.write_new(&pages, HostOffset(slot)).unwrap();
                for (at, bytes) in
                    [(200, &[byte(index, 2); 4096][..]), (508, &[byte(index, 5); 512])]
                {
                    file.write_at(bytes, HostOffset(slot + (at << 10))).unwrap();
                }
                let elsewhere = vec![byte(index, 3); (200 << 10) + 1];
                file.write_new(&elsewhere[1..], HostOffset(slot + (204 << 10))).unwrap();
                file.write_new(&[byte(index, 4); ODD], HostOffset(odd)).unwrap();
            };
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    scope.spawn(move || (thread..SLOTS).step_by(4).for_each(put));
                }
            });
            let mut expected = vec![0; (odd_from + SLOTS * ODD as u64) as usize];
            for index in 0..SLOTS {
                let slot = (index * SLOT) as usize;
                let odd = odd_from as usize + index as usize * ODD;
                expected[slot..][..200 << 10].fill(byte(index, 1));
                expected[slot + (200 << 10)..][..4096].fill(byte(index, 2));
                expected[slot + (508 << 10)..][..512].fill(byte(index, 5));
                expected[slot + (204 << 10)..][..200 << 10].fill(byte(index, 3));
                expected[odd..][..ODD].fill(byte(index, 4));
            }
            assert!(file.past.as_ref().unwrap().passed() > 15 * MIB);
            file.sync_always().unwrap();
            let found = std::fs::read(folder.path().join("past")).unwrap();
            assert_eq!(found.len(), expected.len());
            let wrong = found.iter().zip(&expected).position(|(found, wanted)| found != wanted);
            assert_eq!(wrong, None, "on {}", folder.path().display());
        }
    }

    #[test]
    fn a_full_disk_is_an_error_this_way_too() {
        let Some(folder) = mounted("ext4", 16 * MIB) else { return };
        let file = create(folder.path(), CacheShare::Bytes(0));
        let buf = AlignedBuf::new(MIB as usize, 4096);
        let failed = (0..16).find_map(|at| file.write_new(&buf, HostOffset(at * MIB)).err());
        let failed = failed.expect("16 MiB do not fit");
        assert!(failed.to_string().contains("space"), "{failed}");
        assert!(file.past.as_ref().unwrap().passed() > 0);
    }

    #[test]
    fn memory_has_no_way_past_itself() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = create(folder.path(), CacheShare::Bytes(0));
        assert!(file.past.is_none());
        file.write_new(&vec![7; MIB as usize], HostOffset(5)).unwrap();
        assert_eq!(file.len().unwrap(), MIB + 5);
    }
}
