//! Direct I/O: bypasses the page cache, in whole blocks.

use std::fs::File;

use parking_lot::{RwLockReadGuard, RwLockWriteGuard};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{CacheMode, Result, align_down, align_up, is_aligned};

use crate::buffer::{BOUNCE_BYTES_MAX, BufferPool};
use crate::file::{FileStorage, within_offsets};
use crate::open::{FileKind, no_direct};
use crate::range_lock::{RangeGuard, RangeLocks};

/// Works on all devices and file systems in use; for when the kernel does not report an alignment.
const ALIGNMENT_USUAL: u32 = 4096;
/// Most times that one block is read again because a read ended within it.
const SHORT_READS_MAX: u32 = 16;

/// Direct I/O of a [`FileStorage`].
#[derive(Debug)]
pub struct Direct {
    /// A power of two.
    align: u64,
    pool: BufferPool,
    ranges: RangeLocks,
}

/// Keeps the length of a file stable during a write.
enum Length<'a> {
    /// The write does not change it.
    Kept { _guard: RwLockReadGuard<'a, ()> },
    /// The length before a write that passes it.
    Passed { _guard: RwLockWriteGuard<'a, ()>, before: u64 },
}

impl Direct {
    pub fn new(name: &str, file: &File, kind: FileKind, cache: CacheMode) -> Result<Self> {
        let Some(align) = alignment(file, kind) else {
            return Err(no_direct(name, cache));
        };
        Ok(Self {
            align: u64::from(align),
            pool: BufferPool::new(align.max(ALIGNMENT_USUAL) as usize),
            ranges: RangeLocks::default(),
        })
    }

    pub fn alignment(&self) -> u32 {
        self.align as u32
    }

    pub fn hold_shared(&self, offset: u64, len: u64) -> RangeGuard<'_> {
        self.ranges.hold(offset..offset.saturating_add(len), false)
    }

    /// Whether a request is aligned for the device.
    pub fn fits(&self, address: *const u8, offset: u64, len: usize) -> bool {
        is_aligned(address.addr() as u64 | offset | len as u64, self.align)
    }

    /// Reads until `buf` is full or the file ends.
    pub fn read(&self, of: &FileStorage, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        if self.fits(buf.as_ptr(), offset, buf.len()) {
            return self.read_whole(of, buf, offset);
        }
        // Whole blocks at the front go directly to the caller's memory.
        let mut done = 0;
        if self.fits(buf.as_ptr(), offset, 0) {
            let front = align_down(buf.len() as u64, self.align) as usize;
            done = self.read_whole(of, &mut buf[..front], offset)?;
            if done < front {
                return Ok(done);
            }
        }
        while done < buf.len() {
            let at = offset.saturating_add(done as u64);
            let start = align_down(at, self.align);
            let skip = (at - start) as usize;
            let wanted = (skip + buf.len() - done).min(BOUNCE_BYTES_MAX);
            let padded = wanted.next_multiple_of(self.align as usize);
            let mut bounce = self.pool.take(padded);
            let got = self.read_whole(of, &mut bounce[..padded], start)?;
            if got <= skip {
                break;
            }
            let n = (got - skip).min(buf.len() - done);
            buf[done..done + n].copy_from_slice(&bounce[skip..skip + n]);
            done += n;
            if got < padded {
                break;
            }
        }
        Ok(done)
    }

    /// Reads whole blocks until `buf` is full or the file ends.
    fn read_whole(&self, of: &FileStorage, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let (mut done, mut again) = (0, 0);
        // Whole blocks: the highest possible offset lies in a block that no file can have.
        let there = within_offsets(buf, offset).len();
        let buf = &mut buf[..align_down(there as u64, self.align) as usize];
        while done < buf.len() {
            let at = offset + done as u64;
            let n = match retry_on_intr(|| rustix::io::pread(of.file(), &mut buf[done..], at))? {
                0 => break,
                n => n,
            };
            done += n;
            if is_aligned(done as u64, self.align) {
                continue;
            }
            // Within a block: the end of the file, or a short read to resume at the block.
            if offset + done as u64 >= of.raw_len()? {
                break;
            }
            // The file may have grown since: then the same block is read once more.
            let whole = align_down(n as u64, self.align) as usize;
            again = if whole == 0 { again + 1 } else { 0 };
            if again > SHORT_READS_MAX {
                return Err(Errno::IO);
            }
            done -= n - whole;
        }
        Ok(done)
    }

    /// Writes all of `buf`.
    pub fn write(&self, of: &FileStorage, buf: &[u8], offset: u64) -> Result<(), Errno> {
        if self.fits(buf.as_ptr(), offset, buf.len()) {
            let _range = self.hold_shared(offset, buf.len() as u64);
            let _length = of.hold_length();
            return of.write_raw(buf, offset);
        }
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let skip = (at - align_down(at, self.align)) as usize;
            let n = (buf.len() - done).min(BOUNCE_BYTES_MAX - skip);
            self.write_bounced(of, &buf[done..done + n], at)?;
            done += n;
        }
        Ok(())
    }

    /// Writes one piece through a bounce buffer; with its edges it is at most [`BOUNCE_BYTES_MAX`].
    fn write_bounced(&self, of: &FileStorage, buf: &[u8], offset: u64) -> Result<(), Errno> {
        let end = offset + buf.len() as u64;
        let start = align_down(offset, self.align);
        let padded = align_up(end, self.align).ok_or(Errno::FBIG)?;
        let skip = (offset - start) as usize;
        let partial = skip != 0 || padded != end;

        let _range = self.ranges.hold(start..padded, partial);
        let length = self.hold_length_for(of, padded)?;
        let mut bounce = self.pool.take((padded - start) as usize);
        let blocks = &mut bounce[..(padded - start) as usize];
        if partial {
            self.read_edges(of, blocks, start, skip, (end - start) as usize)?;
        }
        blocks[skip..skip + buf.len()].copy_from_slice(buf);
        of.write_raw(blocks, start)?;

        let Length::Passed { before, .. } = length else { return Ok(()) };
        if padded > end.max(before) {
            retry_on_intr(|| rustix::fs::ftruncate(of.file(), end.max(before)))?;
        }
        Ok(())
    }

    /// Reads the first and last block if the request covers them only partly.
    fn read_edges(
        &self,
        of: &FileStorage,
        blocks: &mut [u8],
        start: u64,
        skip: usize,
        end: usize,
    ) -> Result<(), Errno> {
        let block = self.align as usize;
        let last = blocks.len() - block;
        let head = skip != 0;
        let tail = end != blocks.len();
        if head || (tail && last == 0) {
            let got = self.read_whole(of, &mut blocks[..block], start)?;
            blocks[got..block].fill(0);
        }
        if tail && last != 0 {
            let got = self.read_whole(of, &mut blocks[last..], start + last as u64)?;
            blocks[last + got..].fill(0);
        }
        Ok(())
    }

    /// Locks the length for a write that ends at `padded`, exclusively if the write passes the end.
    fn hold_length_for<'a>(&self, of: &'a FileStorage, padded: u64) -> Result<Length<'a>, Errno> {
        let guard = of.hold_length();
        if of.kind() == FileKind::BlockDevice || padded <= of.raw_len()? {
            return Ok(Length::Kept { _guard: guard });
        }
        drop(guard);
        let guard = of.growth.write();
        Ok(Length::Passed { before: of.raw_len()?, _guard: guard })
    }
}

/// Required alignment of offsets, lengths and memory; `None` if the file does not support direct
/// I/O.
pub fn alignment(file: &File, kind: FileKind) -> Option<u32> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    if let Some(stat) = stat.filter(|s| s.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
        let align = stat.stx_dio_mem_align.max(stat.stx_dio_offset_align);
        if stat.stx_dio_offset_align == 0 {
            return None;
        }
        if align.is_power_of_two() && align <= BOUNCE_BYTES_MAX as u32 / 2 {
            return Some(align);
        }
    }
    let device = match kind {
        FileKind::BlockDevice => rustix::fs::ioctl_blksszget(file).ok(),
        FileKind::Regular => None,
    };
    Some(device.filter(|size| size.is_power_of_two()).unwrap_or(ALIGNMENT_USUAL))
}
