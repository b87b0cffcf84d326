//! An open disk.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{Disk, DiskExtent, DiskPlace, Error, GuestOffset, jobs};

use crate::border::{self, Result, call, given, misuse};
use crate::error;
use crate::jobs::{Watch, vdkit_monitor};
use crate::options::{opening, vdkit_open_options};

/// An open disk: an image with the images that it stands on. May be used from many threads at once.
pub struct vdkit_disk(pub(crate) Arc<Disk>);

impl vdkit_disk {
    pub(crate) fn new(disk: Disk) -> *mut Self {
        Box::into_raw(Box::new(Self(Arc::new(disk))))
    }

    /// The disk of a handle, which is freed; nothing changes if a queue uses the disk.
    ///
    /// # Safety
    /// As [`border::take`].
    pub(crate) unsafe fn take(handle: *mut Self) -> Result<Disk> {
        let used = || misuse("a queue of this disk is not freed");
        // SAFETY: the caller's promise.
        if Arc::strong_count(&given(unsafe { handle.as_ref() }, "disk")?.0) > 1 {
            return Err(used());
        }
        // SAFETY: as above.
        let handle = given(unsafe { border::take(handle) }, "disk")?;
        Arc::into_inner(handle.0).ok_or_else(used)
    }
}

/// Opens an image and what it stands on. `options` may be NULL. NBD URIs are paths too. Closed by
/// vdkit_close().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open(
    path: *const c_char,
    options: Option<&vdkit_open_options>,
    disk: Option<&mut MaybeUninit<*mut vdkit_disk>>,
) -> c_int {
    call(|| {
        let place = border::place_of(disk)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let opened = Disk::open(&vdkit::registry(), path, &opening(options))?;
        place.write(vdkit_disk::new(opened));
        Ok(())
    })
}

/// Opens an image by a file descriptor. A file or block device is opened again where the system allows it, and
/// the descriptor duplicated elsewhere (two disks by one descriptor then share their locks); the caller
/// closes its own. `name` is for messages. References within the image reach only folders that the options allow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_open_fd(
    fd: c_int,
    name: *const c_char,
    options: Option<&vdkit_open_options>,
    disk: Option<&mut MaybeUninit<*mut vdkit_disk>>,
) -> c_int {
    call(|| {
        let place = border::place_of(disk)?;
        // SAFETY: the header's promise.
        let name = unsafe { border::text(name, "name") }?;
        let options = opening(options);
        let lock = if options.lock { LockMode::Auto } else { LockMode::Off };
        let file = reopen(fd, options.writable)?;
        let how = FileOptions::default().writable(options.writable).cache(options.cache).lock(lock);
        let storage = Arc::new(FileStorage::from_file(file, name, &how)?);
        let opened = Disk::open_storage(&vdkit::registry(), storage, &options)?;
        place.write(vdkit_disk::new(opened));
        Ok(())
    })
}

/// The file by a description of its own, which has its own locks; or else by the caller's.
fn reopen(fd: RawFd, writable: bool) -> Result<File> {
    if fd < 0 {
        return Err(misuse(format!("{fd} is no file descriptor")));
    }
    let path = format!("/proc/self/fd/{fd}");
    // To open a pipe would wait for its other end, and to open other devices may change their state.
    let kind = std::fs::metadata(&path).map(|found| found.file_type());
    if kind.is_ok_and(|kind| kind.is_file() || kind.is_block_device())
        && let Ok(file) = File::options().read(true).write(writable).open(&path)
    {
        return Ok(file);
    }
    // SAFETY: it is only duplicated, and the caller keeps it open meanwhile, says the header.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    fd.try_clone_to_owned()
        .map(File::from)
        .map_err(|error| misuse(format!("the file descriptor cannot be duplicated: {error}")))
}

/// Flushes and closes a disk; it is freed also after an error. No other call may use it any more. If one
/// of its queues is not freed, the result is VDKIT_E_USAGE, and the disk stays open. NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_close(disk: *mut vdkit_disk) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        match unsafe { disk.as_ref() } {
            None => Ok(()),
            // The threads of its queues are the parent's, and still count as users.
            Some(open) if open.0.is_inherited() => {
                // SAFETY: as above.
                given(unsafe { border::take(disk) }, "disk")?.0.close()
            }
            // SAFETY: as above.
            Some(_) => unsafe { vdkit_disk::take(disk) }?.close(),
        }
    })
}

/// The size of the disk in bytes; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_size(disk: Option<&vdkit_disk>) -> u64 {
    disk.map_or(0, |disk| disk.0.guest_bytes())
}

/// 1 if the disk can be written, 0 if not, and for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_is_writable(disk: Option<&vdkit_disk>) -> c_int {
    disk.is_some_and(|disk| disk.0.writable()).into()
}

/// Reads exactly `len` bytes at `offset`; a range beyond the end is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_pread(
    disk: Option<&vdkit_disk>,
    buf: *mut c_void,
    len: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let buf = unsafe { border::bytes_mut(buf, len) }?;
        given(disk, "disk")?.0.read_at(buf, GuestOffset(offset))
    })
}

/// Writes exactly `len` bytes at `offset`; a range beyond the end is an error. Durable after the next
/// vdkit_flush(), or at once in the cache modes that say so.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_pwrite(
    disk: Option<&vdkit_disk>,
    buf: *const c_void,
    len: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: the header's promise.
        let buf = unsafe { border::bytes(buf, len) }?;
        given(disk, "disk")?.0.write_at(buf, GuestOffset(offset))
    })
}

/// A piece of memory: laid out as struct iovec of <sys/uio.h>, which may be passed for it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_iovec {
    /// Where it begins.
    pub base: *mut c_void,
    /// Bytes.
    pub len: usize,
}

/// The pieces with their guest offsets, if they are within the disk.
///
/// # Safety
/// As [`border::list`].
unsafe fn placed<'a>(
    disk: &Disk,
    pieces: *const vdkit_iovec,
    count: c_int,
    offset: u64,
) -> Result<Vec<(&'a vdkit_iovec, GuestOffset)>> {
    let mut end = offset;
    let mut placed = Vec::new();
    // SAFETY: the caller's promise.
    for piece in unsafe { border::list(pieces, count) }? {
        if piece.base.is_null() && piece.len > 0 {
            return Err(misuse("the buffer of a piece is NULL"));
        }
        placed.push((piece, GuestOffset(end)));
        end = end.checked_add(piece.len as u64).ok_or_else(|| misuse("the pieces are too long"))?;
    }
    let bytes = disk.guest_bytes();
    if end > bytes {
        return Err(misuse(format!("the pieces end at {end}, beyond the disk of {bytes} bytes")));
    }
    Ok(placed)
}

/// Reads into several pieces of memory in turn, which are one range of the disk; if it ends beyond the disk,
/// nothing is read. After an error what the pieces hold is undefined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_preadv(
    disk: Option<&vdkit_disk>,
    pieces: *const vdkit_iovec,
    count: c_int,
    offset: u64,
) -> c_int {
    call(|| {
        let disk = &given(disk, "disk")?.0;
        // SAFETY: the header's promise.
        for (piece, at) in unsafe { placed(disk, pieces, count, offset) }? {
            // SAFETY: the header's promise.
            disk.read_at(unsafe { border::bytes_mut(piece.base, piece.len) }?, at)?;
        }
        Ok(())
    })
}

/// Writes several pieces of memory in turn, which are one range of the disk; if it ends beyond the disk,
/// nothing is written. After another error each byte of the range is old or new. In the cache modes in
/// which a write is durable at once, one flush at the end serves all pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_pwritev(
    disk: Option<&vdkit_disk>,
    pieces: *const vdkit_iovec,
    count: c_int,
    offset: u64,
) -> c_int {
    call(|| {
        let disk = &given(disk, "disk")?.0;
        // SAFETY: the header's promise.
        for (piece, at) in unsafe { placed(disk, pieces, count, offset) }? {
            // SAFETY: the header's promise.
            disk.write_unsettled(unsafe { border::bytes(piece.base, piece.len) }?, at)?;
        }
        if disk.cache().write_durable() { disk.flush() } else { Ok(()) }
    })
}

/// For vdkit_write_zeroes(): the space may be freed.
pub const VDKIT_MAY_UNMAP: u32 = 1;
/// For vdkit_resize(): the disk may become smaller, and what lies beyond is lost.
pub const VDKIT_SHRINK: u32 = 1;

/// Makes `len` bytes at `offset` read as zero, without writing them where the format can say so.
/// `flags`: VDKIT_MAY_UNMAP, or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_write_zeroes(
    disk: Option<&vdkit_disk>,
    len: u64,
    offset: u64,
    flags: u32,
) -> c_int {
    call(|| {
        border::known(flags, VDKIT_MAY_UNMAP)?;
        let may_unmap = flags & VDKIT_MAY_UNMAP != 0;
        given(disk, "disk")?.0.write_zeroes(GuestOffset(offset), len, may_unmap)
    })
}

/// Frees space, as a hint: the bytes then read as zero or as before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_discard(disk: Option<&vdkit_disk>, len: u64, offset: u64) -> c_int {
    call(|| given(disk, "disk")?.0.discard(GuestOffset(offset), len))
}

/// Makes every write that has returned durable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_flush(disk: Option<&vdkit_disk>) -> c_int {
    call(|| given(disk, "disk")?.0.flush())
}

/// Changes the size; durable on return. Other threads and queues may use the disk meanwhile: some formats
/// let their requests wait. Those beyond a smaller size fail. `flags`: VDKIT_SHRINK, or 0. `monitor` hears of
/// zeroes that are written (to encrypted disks), and may be NULL; a disk that was to grow and is ended so has its
/// old size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_resize(
    disk: Option<&vdkit_disk>,
    size: u64,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
) -> c_int {
    call(|| {
        border::known(flags, VDKIT_SHRINK)?;
        let mut options = jobs::ResizeOptions::default();
        options.shrink = flags & VDKIT_SHRINK != 0;
        let watch = Watch::new(monitor)?;
        jobs::resize(&given(disk, "disk")?.0, size, &options, &watch.monitor())
    })
}

/// In vdkit_extent: the bytes read as zero.
pub const VDKIT_EXTENT_ZERO: u32 = 1;
/// In vdkit_extent: space is allocated for the bytes.
pub const VDKIT_EXTENT_ALLOCATED: u32 = 2;
/// In vdkit_extent: the bytes are compressed.
pub const VDKIT_EXTENT_COMPRESSED: u32 = 4;
/// In vdkit_extent: `host_file` and `host_offset` say where the bytes lie.
pub const VDKIT_EXTENT_HOST: u32 = 8;

/// A run of bytes of a disk.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_extent {
    /// Bytes of this struct in the library that is loaded. Later versions add members at the end: what
    /// lies beyond this size is not there.
    pub struct_size: usize,
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Bytes; never 0.
    pub length: u64,
    /// Offset in `host_file`, for a compressed run that of its cluster.
    pub host_offset: u64,
    /// The file that holds the bytes, or NULL; valid during the callback.
    pub host_file: *const c_char,
    /// The image that holds the bytes: 0 for the one that was opened, 1 for its backing image, ...
    pub depth: u32,
    /// VDKIT_EXTENT_ZERO, ...
    pub flags: u32,
}

/// Called for each extent, by the thread that walks; a result other than 0 ends the walk. It may use the disk,
/// but not close it.
pub type vdkit_extent_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, extent: *const vdkit_extent) -> c_int>;

/// Calls `each` for all extents of a range, in order. If `each` ends the walk, the result is
/// VDKIT_E_INTERRUPTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_extents(
    disk: Option<&vdkit_disk>,
    len: u64,
    offset: u64,
    each: vdkit_extent_fn,
    user: *mut c_void,
) -> c_int {
    call(|| {
        let (disk, each) = (&given(disk, "disk")?.0, given(each, "the callback")?);
        for extent in disk.extents(GuestOffset(offset), len)? {
            let (extent, _file) = shown(&extent?);
            // SAFETY: the program's own function with its own pointer.
            if unsafe { each(user, &raw const extent) } != 0 {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    })
}

/// An extent for C, and the string that it points to.
fn shown(extent: &DiskExtent<'_>) -> (vdkit_extent, Option<CString>) {
    let (flags, host) = match &extent.place {
        DiskPlace::Data { storage, offset } => {
            (VDKIT_EXTENT_ALLOCATED | VDKIT_EXTENT_HOST, Some((storage.name(), *offset)))
        }
        DiskPlace::Compressed { storage, compressed } => (
            VDKIT_EXTENT_ALLOCATED | VDKIT_EXTENT_COMPRESSED | VDKIT_EXTENT_HOST,
            Some((storage.name(), compressed.offset)),
        ),
        DiskPlace::Zero { allocated: true } => (VDKIT_EXTENT_ZERO | VDKIT_EXTENT_ALLOCATED, None),
        DiskPlace::Zero { allocated: false } | DiskPlace::Hole => (VDKIT_EXTENT_ZERO, None),
    };
    let file = host.map(|(name, _)| error::c_text(name));
    let extent = vdkit_extent {
        struct_size: size_of::<vdkit_extent>(),
        offset: extent.at.0,
        length: extent.len,
        host_offset: host.map_or(0, |(_, offset)| offset.0),
        host_file: file.as_ref().map_or(std::ptr::null(), |file| file.as_ptr()),
        depth: u32::try_from(extent.depth).unwrap_or(u32::MAX),
        flags,
    };
    (extent, file)
}

/// What `vdkit info --chain --json` says: an array with an image and those beneath it, their snapshots and
/// bitmaps, as a string for vdkit_free(). No data is read. `options` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_info(
    path: *const c_char,
    options: Option<&vdkit_open_options>,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = border::place_of(json)?;
        // SAFETY: the header's promise.
        let path = unsafe { border::path(path, "path") }?;
        let report = vdkit::describe_chain(&vdkit::registry(), path, &opening(options))?;
        if let Some(broken) = report.broken {
            return Err(broken);
        }
        let chain: Vec<_> = report.links.iter().map(jobs::Described::from).collect();
        place.write(border::new_text(&crate::jobs::json_of(&chain)));
        Ok(())
    })
}
