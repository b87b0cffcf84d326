//! Zeroing, discarding, allocating, resizing, and finding data and holes.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{
    Error, HostOffset, IoAction, Result, Storage, StorageExtent, ZeroMode, align_down, align_up,
    is_aligned,
};

use crate::file::FileStorage;
use crate::open::FileKind;
use crate::sys;

/// Zeroes to write, aligned for direct I/O.
#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);
static ZEROES: Zeroes = Zeroes([0; 64 << 10]);

/// [`ZEROES`] pieces per system call: 2 MiB from memory that stays in the cache.
const ZERO_PIECES: usize = 32;

/// For files in memory, shorter requests do not search for the end of data.
const HOLE_SEARCH_MIN: u64 = 1 << 20;

/// Step for unaligned edges if the alignment is smaller.
const ZERO_EDGE: u64 = 4096;

/// Operations that the file turned out not to support; each is tried once.
#[derive(Debug, Default)]
pub struct Lacks {
    pub punch: AtomicBool,
    pub zero_range: AtomicBool,
    pub fallocate: AtomicBool,
    pub discard: AtomicBool,
}

/// Whether an errno means that the file system or device does not support the operation.
fn unsupported(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY | Errno::PERM)
}

/// Runs `call` unless it is known to be unsupported. Returns `false` if unsupported.
fn try_once(lack: &AtomicBool, mut call: impl FnMut() -> Result<(), Errno>) -> Result<bool, Errno> {
    if lack.load(Ordering::Relaxed) {
        return Ok(false);
    }
    match retry_on_intr(&mut call) {
        Ok(()) => Ok(true),
        Err(errno) if unsupported(errno) => {
            lack.store(true, Ordering::Relaxed);
            Ok(false)
        }
        Err(errno) => Err(errno),
    }
}

impl FileStorage {
    pub(crate) fn zero_range(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.check_writable()?;
        if len == 0 {
            return Ok(());
        }
        let end = self.end_of(IoAction::WriteZeroes, offset, len)?;
        let zeroed = match self.kind() {
            FileKind::Regular => self.zero_file(offset.0, end, mode),
            FileKind::BlockDevice => self.zero_device(offset.0, end, mode),
        };
        zeroed.map_err(|errno| self.error(IoAction::WriteZeroes, offset.0, len, errno))
    }

    fn zero_file(&self, start: u64, end: u64, mode: ZeroMode) -> Result<(), Errno> {
        let len = end - start;
        match mode {
            ZeroMode::MayUnmap => {
                // Punch the part within the file; growing makes the part beyond it a hole.
                let there = self.raw_len()?.min(end).saturating_sub(start);
                if there == 0 || self.punch(start, there)? {
                    return self.grow_to(end);
                }
                if self.zero_allocated(start, len)? {
                    return Ok(());
                }
            }
            ZeroMode::KeepAllocated => {
                if self.zero_allocated(start, len)? {
                    return Ok(());
                }
                // tmpfs can punch and allocate, but not zero a range in one step.
                if !self.lacks.fallocate.load(Ordering::Relaxed) && self.punch(start, len)? {
                    return match self.allocate_blocks(start, len)? {
                        true => Ok(()),
                        false => self.write_zero_bytes(start, end),
                    };
                }
            }
        }
        self.write_zero_bytes(start, end)
    }

    fn punch(&self, start: u64, len: u64) -> Result<bool, Errno> {
        let _range = self.hold_range(start, len);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        try_once(&self.lacks.punch, || rustix::fs::fallocate(self.file(), flags, start, len))
    }

    fn zero_allocated(&self, start: u64, len: u64) -> Result<bool, Errno> {
        let _range = self.hold_range(start, len);
        let _length = self.hold_length();
        let flags = FallocateFlags::ZERO_RANGE;
        try_once(&self.lacks.zero_range, || rustix::fs::fallocate(self.file(), flags, start, len))
    }

    /// Returns `false` if the file system cannot.
    pub(crate) fn allocate_blocks(&self, start: u64, len: u64) -> Result<bool, Errno> {
        let _length = self.hold_length();
        let flags = FallocateFlags::empty();
        try_once(&self.lacks.fallocate, || rustix::fs::fallocate(self.file(), flags, start, len))
    }

    /// Devices zero whole logical blocks; the edges are written.
    fn zero_device(&self, start: u64, end: u64, mode: ZeroMode) -> Result<(), Errno> {
        let device_end = self.raw_len()?;
        if end > device_end {
            return Err(Errno::NOSPC);
        }
        let block = u64::from(self.caps().block_bytes);
        let from = align_up(start, block).unwrap_or(end).min(end);
        let to = align_down(end, block).max(from);
        let mut done = from == to;
        if !done && mode == ZeroMode::MayUnmap {
            done = self.punch(from, to - from)?;
        }
        if !done {
            let _range = self.hold_range(from, to - from);
            let flags = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            done = try_once(&self.lacks.zero_range, || {
                rustix::fs::fallocate(self.file(), flags, from, to - from)
            })?;
        }
        if !done {
            self.write_zero_bytes(from, to)?;
        }
        self.write_zero_bytes(start, from)?;
        self.write_zero_bytes(to, end)
    }

    /// Alignment of direct I/O; 1 without it.
    fn alignment(&self) -> u64 {
        u64::from(self.caps().alignment)
    }

    /// The fallback: writes zeroes.
    fn write_zero_bytes(&self, start: u64, end: u64) -> Result<(), Errno> {
        let align = self.alignment();
        let memory_fits = is_aligned(ZEROES.0.as_ptr().addr() as u64, align);
        let mut at = start;
        while at < end {
            let whole = align_down(end - at, align);
            if is_aligned(at, align) && whole != 0 && memory_fits {
                at += self.write_zero_pieces(at, whole)?;
                continue;
            }
            // An edge within a block, which direct I/O takes through its bounce buffer.
            let block_end = align_down(at, align).saturating_add(align.max(ZERO_EDGE));
            let n = (end - at).min(block_end - at);
            self.write_bytes(&ZEROES.0[..n as usize], at)?;
            at += n;
        }
        Ok(())
    }

    /// Writes up to [`ZERO_PIECES`] pieces with one call and returns the bytes written.
    fn write_zero_pieces(&self, at: u64, len: u64) -> Result<u64, Errno> {
        let mut pieces = [IoSlice::new(&[]); ZERO_PIECES];
        let mut count = 0;
        let mut rest = len;
        while rest > 0 && count < ZERO_PIECES {
            let n = rest.min(ZEROES.0.len() as u64);
            pieces[count] = IoSlice::new(&ZEROES.0[..n as usize]);
            count += 1;
            rest -= n;
        }
        let _range = self.hold_range(at, len - rest);
        let _length = self.hold_length();
        match retry_on_intr(|| rustix::io::pwritev(self.file(), &pieces[..count], at))? {
            0 => Err(Errno::IO),
            n => Ok(n as u64),
        }
    }

    /// Discards a range; with `undefined`, also by means that leave the bytes undefined.
    pub(crate) fn discard_range(
        &self,
        offset: HostOffset,
        len: u64,
        undefined: bool,
    ) -> Result<()> {
        self.check_writable()?;
        let fail = |errno| self.error(IoAction::Discard, offset.0, len, errno);
        let end_of_file = self.raw_len().map_err(fail)?;
        // Whole blocks only: punching a part of one means to read and write it.
        let block = u64::from(self.caps().block_bytes);
        let end = offset.0.saturating_add(len).min(end_of_file);
        let Some(start) = align_up(offset.0, block) else { return Ok(()) };
        let end = match self.kind() {
            FileKind::Regular if end == end_of_file => end,
            _ => align_down(end, block),
        };
        if start >= end {
            return Ok(());
        }
        if self.punch(start, end - start).map_err(fail)? {
            return Ok(());
        }
        // BLKDISCARD leaves the content undefined, but some devices support nothing else.
        if undefined && self.kind() == FileKind::BlockDevice {
            let _range = self.hold_range(start, end - start);
            try_once(&self.lacks.discard, || {
                sys::device_discard(self.file().as_fd(), start, end - start)
            })
            .map_err(fail)?;
        }
        Ok(())
    }

    pub(crate) fn allocate_range(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        if len == 0 {
            return Ok(());
        }
        let end = self.end_of(IoAction::Allocate, offset, len)?;
        let allocated = match self.kind() {
            FileKind::BlockDevice => match self.raw_len() {
                Ok(device_end) if end <= device_end => return Ok(()),
                Ok(_) => Err(Errno::NOSPC),
                Err(errno) => Err(errno),
            },
            FileKind::Regular => self
                .allocate_blocks(offset.0, len)
                .and_then(|done| if done { Ok(()) } else { self.fill_holes(offset.0, end) }),
        };
        allocated.map_err(|errno| self.error(IoAction::Allocate, offset.0, len, errno))
    }

    /// Writes zeroes wherever there is no data. Other writes must be excluded, or their data could
    /// be taken for a hole.
    fn fill_holes(&self, start: u64, end: u64) -> Result<(), Errno> {
        let _alone = self.growth.write();
        let file_end = self.raw_len()?;
        let mut at = start;
        while at < end.min(file_end) {
            let extent = self.find_extent(HostOffset(at), end.min(file_end) - at);
            if !extent.data {
                self.fill_hole(at, at + extent.len, file_end)?;
            }
            at += extent.len;
        }
        if end > file_end {
            // The block with the old end is allocated, or was a hole that was filled above.
            let from = align_up(file_end, self.alignment()).unwrap_or(end);
            self.fill_hole(from.max(start), end, file_end)?;
        }
        // Whole blocks were written: restore the length, or extend it if nothing was left to write.
        retry_on_intr(|| rustix::fs::ftruncate(self.file(), end.max(file_end)))
    }

    /// Fills a hole; the caller holds the length lock exclusively. In direct mode it fills whole
    /// blocks, including edge blocks that are entirely hole.
    fn fill_hole(&self, start: u64, end: u64, file_end: u64) -> Result<(), Errno> {
        let align = self.alignment();
        let hole = |from: u64, to: u64| {
            let to = to.min(file_end);
            let extent = self.find_extent(HostOffset(from), to.saturating_sub(from));
            from >= to || (!extent.data && extent.len >= to - from)
        };
        let mut at = align_down(start, align);
        if !hole(at, start) {
            at = align_up(start, align).unwrap_or(end);
        }
        let mut to = align_up(end, align).unwrap_or(end);
        if !hole(end, to) {
            to = align_down(end, align);
        }
        while at < to {
            let n = (to - at).min(ZEROES.0.len() as u64);
            self.write_raw(&ZEROES.0[..n as usize], at)?;
            at += n;
        }
        Ok(())
    }

    /// Makes a regular file at least this long.
    fn grow_to(&self, end: u64) -> Result<(), Errno> {
        // As in `len`: an unaligned direct write may pass the end for a moment.
        let exact = self.direct.is_some().then(|| self.hold_length());
        if self.raw_len()? >= end {
            return Ok(());
        }
        drop(exact);
        let _alone = self.growth.write();
        if self.raw_len()? >= end {
            return Ok(());
        }
        retry_on_intr(|| rustix::fs::ftruncate(self.file(), end))
    }

    pub(crate) fn resize(&self, len: u64) -> Result<()> {
        self.check_writable()?;
        let fail = |errno| Error::file_io(self.name(), IoAction::Resize, errno);
        if self.kind() == FileKind::BlockDevice {
            let there = self.raw_len().map_err(fail)?;
            if len == there {
                return Ok(());
            }
            return Err(Error::unsupported(
                self.name(),
                format!("a device of {there} bytes cannot be made {len} bytes long"),
                "resize the device itself",
            ));
        }
        let _alone = self.growth.write();
        retry_on_intr(|| rustix::fs::ftruncate(self.file(), len)).map_err(fail)
    }

    /// Data or hole, and its length. Anything uncertain is data: that costs a read, while a wrong
    /// hole costs the user's data.
    pub(crate) fn find_extent(&self, offset: HostOffset, len: u64) -> StorageExtent {
        let len = len.max(1);
        let all_data = StorageExtent { data: true, len };
        if self.kind() == FileKind::BlockDevice {
            return all_data;
        }
        let start = offset.0;
        if i64::try_from(start).is_err() {
            return StorageExtent { data: false, len };
        }
        // A walk asks next for the data that ends a hole, so the start of data is cached. If that
        // data was removed meanwhile, SEEK_HOLE returns its start.
        if start > 0 && start == self.data_at.load(Ordering::Relaxed) && !self.in_memory {
            match rustix::fs::seek(self.file(), SeekFrom::Hole(start)) {
                Ok(hole) if hole > start => {
                    return StorageExtent { data: true, len: len.min(hole - start) };
                }
                _ => {}
            }
        }
        match rustix::fs::seek(self.file(), SeekFrom::Data(start)) {
            // No data from here to the end.
            Err(Errno::NXIO) => StorageExtent { data: false, len },
            Ok(data) if data > start => {
                self.data_at.store(data, Ordering::Relaxed);
                StorageExtent { data: false, len: len.min(data - start) }
            }
            // SEEK_HOLE would examine the file page by page up to its end.
            Ok(data) if data == start && self.in_memory && len <= HOLE_SEARCH_MIN => all_data,
            Ok(data) if data == start => {
                match rustix::fs::seek(self.file(), SeekFrom::Hole(start)) {
                    Ok(hole) if hole > start => {
                        StorageExtent { data: true, len: len.min(hole - start) }
                    }
                    _ => all_data,
                }
            }
            _ => all_data,
        }
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
