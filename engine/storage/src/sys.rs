//! System calls without a safe wrapper. All `unsafe` of this crate's plain I/O is here.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{self, Getter, Setter, Updater, opcode};

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct FileCloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

/// Shares `len` bytes of `source` at `from` with `target` at `to`. `len` is not 0: the kernel
/// would take that as "to the end".
pub fn clone_range(
    target: BorrowedFd<'_>,
    to: u64,
    source: BorrowedFd<'_>,
    from: u64,
    len: u64,
) -> Result<(), Errno> {
    debug_assert!(len != 0);
    let range = FileCloneRange {
        src_fd: i64::from(source.as_raw_fd()),
        src_offset: from,
        src_length: len,
        dest_offset: to,
    };
    const FICLONERANGE: ioctl::Opcode = opcode::write::<FileCloneRange>(0x94, 13);
    // SAFETY: FICLONERANGE reads one `struct file_clone_range`, which `Setter` passes by address;
    // the layout is the kernel's. Both descriptors are borrowed, so they are open.
    unsafe { ioctl::ioctl(target, Setter::<FICLONERANGE, FileCloneRange>::new(range)) }
}

/// Length in bytes of a block device.
pub fn device_bytes(device: BorrowedFd<'_>) -> Result<u64, Errno> {
    const BLKGETSIZE64: ioctl::Opcode = opcode::read::<usize>(0x12, 114);
    // SAFETY: BLKGETSIZE64 writes one u64, which is what `Getter` provides room for. (Its number
    // is encoded with the size of a `size_t`, hence the type of the opcode.)
    unsafe { ioctl::ioctl(device, Getter::<BLKGETSIZE64, u64>::new()) }
}

/// Whether a block device is set read-only; opening it for writing succeeds nevertheless.
pub fn device_read_only(device: BorrowedFd<'_>) -> Result<bool, Errno> {
    const BLKROGET: ioctl::Opcode = opcode::none(0x12, 94);
    // SAFETY: BLKROGET writes one int, which is what `Getter` provides room for.
    let flag: i32 = unsafe { ioctl::ioctl(device, Getter::<BLKROGET, i32>::new()) }?;
    Ok(flag != 0)
}

/// Discards bytes of a block device. Offset and length are whole logical blocks.
pub fn device_discard(device: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    const BLKDISCARD: ioctl::Opcode = opcode::none(0x12, 119);
    // SAFETY: BLKDISCARD reads two u64 (start and length) from the address that `Setter` passes.
    unsafe { ioctl::ioctl(device, Setter::<BLKDISCARD, [u64; 2]>::new([offset, len])) }
}

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FsXattr {
    flags: u32,
    extent_bytes: u32,
    extents: u32,
    project: u32,
    cow_extent_bytes: u32,
    reserved: [u8; 8],
}

/// Asks for allocation in multiples of `bytes` (`FS_XFLAG_EXTSIZE`); 0 takes the wish back.
pub fn set_extent_bytes(file: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    const FS_IOC_FSGETXATTR: ioctl::Opcode = opcode::read::<FsXattr>(b'X', 31);
    const FS_IOC_FSSETXATTR: ioctl::Opcode = opcode::write::<FsXattr>(b'X', 32);
    const FS_XFLAG_EXTSIZE: u32 = 0x800;
    // SAFETY: FS_IOC_FSGETXATTR writes one `struct fsxattr`, for which `Getter` provides room; the
    // layout is the kernel's, and every value of its integers is one.
    let mut attributes: FsXattr =
        unsafe { ioctl::ioctl(file, Getter::<FS_IOC_FSGETXATTR, FsXattr>::new()) }?;
    match bytes {
        0 => attributes.flags &= !FS_XFLAG_EXTSIZE,
        _ => attributes.flags |= FS_XFLAG_EXTSIZE,
    }
    attributes.extent_bytes = bytes;
    // SAFETY: FS_IOC_FSSETXATTR reads one `struct fsxattr`, which `Setter` passes by address.
    unsafe { ioctl::ioctl(file, Setter::<FS_IOC_FSSETXATTR, FsXattr>::new(attributes)) }
}

/// Lock state of a byte; see [`ofd_set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OfdLock {
    /// Shared lock.
    Shared,
    /// No lock.
    None,
}

fn flock(kind: libc::c_int, start: u64, len: u64) -> libc::flock {
    // SAFETY: `struct flock` is plain integers, for which all zero bytes are a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = len as libc::off_t;
    lock
}

/// Sets or drops this open file's lock on bytes, without waiting.
pub fn ofd_set(file: BorrowedFd<'_>, lock: OfdLock, start: u64, len: u64) -> io::Result<()> {
    let kind = match lock {
        OfdLock::Shared => libc::F_RDLCK,
        OfdLock::None => libc::F_UNLCK,
    };
    let lock = flock(kind, start, len);
    loop {
        // SAFETY: F_OFD_SETLK reads one `struct flock`, which lives across the call; the
        // descriptor is borrowed, so it is open.
        let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) };
        if answer == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A conflicting lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The process, if known: OFD locks belong to an open file and have none.
    pub pid: Option<u32>,
}

/// Whether an exclusive lock on these bytes would conflict with another open file. Takes none.
pub fn ofd_test(file: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<Option<Conflict>> {
    let mut lock = flock(libc::F_WRLCK, start, len);
    // SAFETY: F_OFD_GETLK reads and writes one `struct flock`, which lives across the call; the
    // descriptor is borrowed, so it is open.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    if lock.l_type == libc::F_UNLCK as libc::c_short {
        return Ok(None);
    }
    Ok(Some(Conflict { pid: u32::try_from(lock.l_pid).ok().filter(|pid| *pid > 0) }))
}

/// Maximum extents per call of [`fiemap`].
pub const FIEMAP_EXTENTS: usize = 256;

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct FiemapExtent {
    /// Offset within the file, in bytes.
    pub logical: u64,
    /// Offset within the device, in bytes.
    pub physical: u64,
    /// Bytes.
    pub length: u64,
    /// Reserved.
    pub reserved: [u64; 2],
    /// `FIEMAP_EXTENT_*`.
    pub flags: u32,
    /// Reserved.
    pub reserved_too: [u32; 3],
}

/// `struct fiemap` of linux/fiemap.h, followed by room for extents.
#[repr(C)]
pub struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    reserved: u32,
    extents: [FiemapExtent; FIEMAP_EXTENTS],
}

impl Fiemap {
    /// The extents of the last call, in file order.
    pub fn found(&self) -> &[FiemapExtent] {
        &self.extents[..(self.mapped as usize).min(FIEMAP_EXTENTS)]
    }
}

/// Queries the extents from `start`; nothing is written back first.
pub fn fiemap(file: BorrowedFd<'_>, start: u64) -> Result<Fiemap, Errno> {
    // The number is encoded with the size of the structure without its extents: 32 bytes.
    const FS_IOC_FIEMAP: ioctl::Opcode = opcode::read_write::<[u64; 4]>(b'f', 11);
    let mut map = Fiemap {
        start,
        length: u64::MAX - start,
        flags: 0,
        mapped: 0,
        room: FIEMAP_EXTENTS as u32,
        reserved: 0,
        extents: [FiemapExtent::default(); FIEMAP_EXTENTS],
    };
    // SAFETY: the ioctl reads the head of the structure and writes it, and as many extents behind it
    // as `room` says, which is how many there are; the layout is the kernel's.
    unsafe { ioctl::ioctl(file, Updater::<FS_IOC_FIEMAP, Fiemap>::new(&mut map)) }?;
    Ok(map)
}
