//! Regular files and block devices.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::{Errno, ReadWriteFlags, retry_on_intr};
use rustix::process::Resource;
use vdkit_block::{
    AccessExchange, CacheMode, Error, GuestDiscard, HostOffset, InitialWrites, IoAction, ReadOp,
    ReadPaths, Result, SpaceMap, Storage, StorageCaps, StorageExt, StorageExtent, ZeroMode,
    read_and_discard, require_writable,
};
use vdkit_meta::{LANES_MAX, SyncError, Syncs};

use crate::cache_overflow::{CacheOverflow, Lane};
use crate::direct::Direct;
use crate::held::{Change, refuse_attached};
use crate::initial_write::{FileSystem, InitialWrite, LARGE_BYTES_MIN};
use crate::lock::{ImageLock, LockMode};
use crate::open::{self, CreateMode, FileKind, FileOptions};
use crate::range_lock::RangeGuard;
use crate::read_discard;
use crate::space::Lacks;
use crate::sys;

/// One more than the highest offset of a file.
const OFFSET_MAX: u64 = i64::MAX as u64;
/// Most times that a file is opened whose name leads to another one by then.
const OPENS_MAX: u32 = 50;

/// A regular file or a block device.
///
/// Requests use offsets, never the file position, so any number of threads may share it.
/// ([`SpaceMap::extent_at`] moves the position, as `SEEK_DATA` does; nothing here reads it.)
///
/// # Cache modes
/// | mode | reads and writes | a write is durable | `sync` |
/// |---|---|---|---|
/// | writeback, writethrough | page cache | after `sync` | fdatasync |
/// | none, directsync | O_DIRECT | after `sync` | fdatasync |
/// | unsafe | page cache | at the kernel's discretion | nothing |
///
/// `vdkit_chain::Disk` implements the durable writes of writethrough and directsync: it flushes
/// after each change, and one sync serves all changes that wait for one.
///
/// # Direct I/O
/// Requests may have any offset, length and memory. Those not aligned to [`StorageCaps::alignment`]
/// go through a bounce buffer; the file's length stays exact to the byte. (A crash during an
/// unaligned write that extends the file may leave it up to a block too long; the extra bytes are
/// zero.)
pub struct FileStorage {
    name: String,
    file: File,
    kind: FileKind,
    cache: CacheMode,
    caps: StorageCaps,
    pub(crate) lacks: Lacks,
    pub(crate) direct: Option<Direct>,
    /// Growing by `ftruncate` first queries the length; a concurrent write that extends the file
    /// further would be cut off. So that pair holds this lock for writing, and every single call
    /// that may extend the file holds it for reading.
    pub(crate) growth: RwLock<()>,
    /// One fdatasync for all callers that asked before it began.
    syncs: Syncs<Errno>,
    /// Opened when two syncs meet.
    sync_lanes: OnceLock<Vec<SyncLane>>,
    lock: Option<Mutex<ImageLock>>,
    /// It is a block device that no other program can mount or open exclusively meanwhile.
    claims: bool,
    /// The description that holds this claim, if not `file`.
    claim: Option<File>,
    /// Reads never wait.
    pub(crate) in_memory: bool,
    /// Where data begins, from the last hole lookup; see `find_extent`.
    pub(crate) data_at: AtomicU64,
    /// The file system does not support non-blocking reads.
    never_ready: AtomicBool,
    pub(crate) initial_write: InitialWrite,
    pub(crate) past: Option<CacheOverflow>,
}

impl fmt::Debug for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStorage")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("cache", &self.cache)
            .field("caps", &self.caps)
            .finish_non_exhaustive()
    }
}

impl FileStorage {
    /// Opens a file or block device.
    ///
    /// # Errors
    /// [`Error::Locked`] or [`Error::Busy`] if another process uses it; [`Error::Unsupported`] for
    /// other file types, and for direct I/O if the file system lacks it; [`Error::File`] for system
    /// errors.
    pub fn open(path: impl AsRef<Path>, options: &FileOptions) -> Result<Self> {
        let path = path.as_ref();
        let open = || {
            let (file, kind) = open::open_file(path, options)?;
            let opened = Self::build(file, kind, path.display().to_string(), options);
            if opened.is_err() && options.create.makes() {
                // It was just created and is not needed.
                let _ = std::fs::remove_file(path);
            }
            let mut opened = opened?;
            opened.claims =
                kind == FileKind::BlockDevice && opened.lock.is_some() && options.writable;
            Ok(opened)
        };
        let sure = options.create.makes() || options.lock == LockMode::Off;
        open_current(open, |opened| sure || opened.is_at(path))
    }

    /// Tests whether the file can be read while nobody writes to it, without locking it.
    ///
    /// # Errors
    /// [`Error::Locked`] if another process uses it for writing; [`Error::File`] for system errors.
    pub fn ask_for_writers(&self) -> Result<()> {
        ImageLock::ask_as_reader(&self.name, &self.file)
    }

    /// For a device that was opened for writing and exclusively: it can be opened for writing again.
    #[must_use]
    pub fn claiming(mut self) -> Self {
        self.claims = true;
        self
    }

    /// Whether a path leads to this file.
    pub fn is_at(&self, path: impl AsRef<Path>) -> bool {
        is_at(&self.file, rustix::fs::stat(path.as_ref()))
    }

    /// Creates a new file, for writing. It must not exist yet.
    ///
    /// # Errors
    /// As [`FileStorage::open`].
    pub fn create(path: impl AsRef<Path>, options: &FileOptions) -> Result<Self> {
        let create = if options.create.makes() { options.create } else { CreateMode::New };
        Self::open(path, &FileOptions { writable: true, create, ..*options })
    }

    /// Takes over an open file; `name` is for messages. Sets the status flags (O_APPEND,
    /// O_NONBLOCK, O_DIRECT) to what the cache mode needs, also for duplicates of the descriptor.
    ///
    /// # Errors
    /// As [`FileStorage::open`]; [`Error::Invalid`] if its access mode does not suffice.
    pub fn from_file(file: File, name: impl Into<String>, options: &FileOptions) -> Result<Self> {
        let name = name.into();
        let kind = open::kind_of_file(&name, &file)?;
        let flags = rustix::fs::fcntl_getfl(&file)
            .map_err(|errno| Error::file_io(&name, IoAction::Open, errno))?;
        let mode = flags & rustix::fs::OFlags::RWMODE;
        let fits = match mode {
            m if m == rustix::fs::OFlags::RDWR => true,
            m if m == rustix::fs::OFlags::RDONLY => !options.writable,
            _ => false,
        };
        if !fits || options.create.makes() {
            return Err(Error::invalid_for(
                &name,
                format!(
                    "the descriptor is not open for {}",
                    if options.writable { "reading and writing" } else { "reading" }
                ),
            ));
        }
        Self::build(file, kind, name, options)
    }

    /// Renames the storage, for messages.
    pub(crate) fn named(mut self, name: String) -> Self {
        self.name = name;
        self
    }

    fn build(file: File, kind: FileKind, name: String, options: &FileOptions) -> Result<Self> {
        if options.writable && !options.create.makes() && options.lock == LockMode::Auto {
            refuse_attached(&name, &file, Change::Write)?;
        }
        open::set_flags(&name, &file, options.cache)?;
        let direct = if options.cache.direct() {
            Some(Direct::new(&name, &file, kind, options.cache)?)
        } else {
            None
        };
        let lock = match options.lock {
            LockMode::Off => None,
            LockMode::Auto => Some(Mutex::new(ImageLock::take(&name, &file, options.writable)?)),
        };
        let caps = StorageCaps {
            writable: options.writable,
            growable: kind == FileKind::Regular,
            device: kind == FileKind::BlockDevice,
            alignment: direct.as_ref().map_or(1, Direct::alignment),
            block_bytes: block_bytes(&file, kind),
            volatile: options.cache == CacheMode::Unsafe,
            prompt_writes: direct.is_none(),
            ..StorageCaps::default()
        };
        let file_system = FileSystem::of(&file, kind);
        // Direct writes go as they are.
        let cached = if direct.is_none() { file_system } else { FileSystem::Other };
        Ok(Self {
            name,
            in_memory: file_system == FileSystem::Memory,
            data_at: AtomicU64::new(0),
            never_ready: AtomicBool::new(false),
            initial_write: InitialWrite::new(cached),
            past: CacheOverflow::new(options.share, cached),
            file,
            kind,
            cache: options.cache,
            caps,
            lacks: Lacks::default(),
            direct,
            growth: RwLock::new(()),
            syncs: Syncs::default(),
            sync_lanes: OnceLock::new(),
            lock,
            claims: false,
            claim: None,
        })
    }

    /// Reopens the same inode, independent of its name, for writing and without locks.
    fn open_again(&self) -> Result<Self> {
        let fail = |errno: Errno| Error::file_io(&self.name, IoAction::Open, errno);
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let exclusive = self.kind == FileKind::BlockDevice && self.lock.is_some();
        if exclusive && !self.claims {
            // Fails while the device is mounted or part of a volume.
            flags |= OFlags::EXCL;
        }
        let file = retry_on_intr(|| rustix::fs::open(&path, flags, Mode::empty())).map_err(fail)?;
        let options = FileOptions::read_write().cache(self.cache).lock(LockMode::Off);
        let mut again = Self::from_file(File::from(file), self.name.clone(), &options)?;
        again.claims = exclusive;
        if self.claims {
            // The claim ends with the description that was opened exclusively.
            let holder = self.claim.as_ref().unwrap_or(&self.file);
            let holder = holder
                .try_clone()
                .map_err(|source| Error::file_io(&self.name, IoAction::Open, source))?;
            again.claim = Some(holder);
        }
        Ok(again)
    }

    /// Reopens the file for syncs alone, as often as possible. The kernel reports to a newly opened
    /// description the errors that no other description has reported.
    fn open_lanes(&self) -> Vec<SyncLane> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        (1..LANES_MAX).map_while(|_| SyncLane::open(&path)).collect()
    }

    /// A regular file or a block device.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The cache mode.
    pub fn cache(&self) -> CacheMode {
        self.cache
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Locks the length against `ftruncate` pairs; see [`FileStorage::growth`].
    pub(crate) fn hold_length(&self) -> RwLockReadGuard<'_, ()> {
        self.growth.read()
    }

    /// Locks a range against read-modify-writes of direct I/O.
    pub(crate) fn hold_range(&self, offset: u64, len: u64) -> Option<RangeGuard<'_>> {
        self.direct.as_ref().map(|direct| direct.hold_shared(offset, len))
    }

    /// The direct lane for a large first write, once the page cache has its share.
    pub(crate) fn cache_overflow(&self, len: usize) -> Option<&Lane> {
        self.past.as_ref()?.lane_for(len, &self.file)
    }

    /// Whether a request is aligned for the kernel.
    pub(crate) fn fits_device(&self, address: *const u8, offset: u64, len: usize) -> bool {
        self.direct.as_ref().is_none_or(|direct| direct.fits(address, offset, len))
    }

    /// The length, without waiting for a concurrent resize.
    pub(crate) fn raw_len(&self) -> Result<u64, Errno> {
        match self.kind {
            FileKind::Regular => Ok(rustix::fs::fstat(&self.file)?.st_size as u64),
            FileKind::BlockDevice => sys::device_bytes(self.file.as_fd()),
        }
    }

    pub(crate) fn error(&self, action: IoAction, offset: u64, len: u64, errno: Errno) -> Error {
        Error::io(&self.name, action, offset, len, errno.into())
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        require_writable(self.caps.writable, &self.name)
    }

    /// The end of a range; fails beyond the maximum file offset.
    pub(crate) fn end_of(&self, action: IoAction, offset: HostOffset, len: u64) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if end.0 <= OFFSET_MAX => Ok(end.0),
            _ => Err(self.error(action, offset.0, len, Errno::FBIG)),
        }
    }

    /// Writes all of `buf`, whatever its alignment.
    pub(crate) fn write_bytes(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        match &self.direct {
            None => {
                let _length = self.hold_length();
                self.write_raw(buf, offset)
            }
            Some(direct) => direct.write(self, buf, offset),
        }
    }

    /// Writes all of `buf`, which is aligned if needed.
    pub(crate) fn write_raw(&self, buf: &[u8], offset: u64) -> Result<(), Errno> {
        let piece = self.initial_write.piece_bytes;
        let mut done = 0;
        while done < buf.len() {
            let end = buf.len().min(done.saturating_add(piece));
            match rustix::io::pwrite(&self.file, &buf[done..end], offset + done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => done += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Syncs, also in cache mode unsafe, for a file that is not visible yet: one sync serves all of
    /// its writes.
    ///
    /// # Errors
    /// [`Error::File`], also for an earlier failed sync.
    pub fn sync_always(&self) -> Result<()> {
        let lanes = || 1 + self.sync_lanes.get_or_init(|| self.open_lanes()).len();
        let fdatasync = |lane: usize| {
            let lanes = self.sync_lanes.get().map_or(&[][..], Vec::as_slice);
            let file = if lane == 0 { &self.file } else { &lanes[lane - 1].0 };
            retry_on_intr(|| rustix::fs::fdatasync(file))
        };
        let source = match self.syncs.sync(lanes, fdatasync) {
            Ok(()) => return Ok(()),
            Err(SyncError::Now(errno)) => errno.into(),
            Err(SyncError::Earlier(errno)) => {
                let cause = io::Error::from(errno);
                io::Error::new(cause.kind(), format!("an earlier one failed ({cause})"))
            }
        };
        Err(Error::file_io(&self.name, IoAction::Sync, source))
    }
}

/// A further description of a file, for concurrent syncs.
struct SyncLane(File);

/// Number of [`SyncLane`]s in this process.
static SYNC_LANES: AtomicUsize = AtomicUsize::new(0);

impl SyncLane {
    /// `None` if it cannot be opened, or if the lanes of all files take a quarter of the process's
    /// descriptors: the program needs some for its other files and its clients.
    fn open(path: &str) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let lane = Self(rustix::fs::open(path, flags, Mode::empty()).map(File::from).ok()?);
        let open = SYNC_LANES.fetch_add(1, Ordering::Relaxed) + 1;
        let descriptors = rustix::process::getrlimit(Resource::Nofile).current;
        descriptors.is_none_or(|most| open as u64 <= most / 4).then_some(lane)
    }
}

impl Drop for SyncLane {
    fn drop(&mut self) {
        SYNC_LANES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The part of `buf` at valid file offsets. The kernel refuses requests beyond them instead of
/// returning a short read.
pub(crate) fn within_offsets(buf: &mut [u8], offset: u64) -> &mut [u8] {
    let most = OFFSET_MAX.saturating_sub(offset).min(buf.len() as u64);
    &mut buf[..most as usize]
}

/// Reads until `buf` is full or the file ends.
pub(crate) fn read_raw(file: &File, buf: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut done = 0;
    let buf = within_offsets(buf, offset);
    while done < buf.len() {
        let at = offset + done as u64;
        match rustix::io::pread(file, &mut buf[done..], at) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Block size of holes and shared blocks.
fn block_bytes(file: &File, kind: FileKind) -> u32 {
    const USUAL: u32 = 4096;
    let bytes = match kind {
        FileKind::BlockDevice => rustix::fs::ioctl_blksszget(file).unwrap_or(USUAL),
        FileKind::Regular => rustix::fs::fstatvfs(file)
            .ok()
            .and_then(|stat| u32::try_from(stat.f_frsize).ok())
            .unwrap_or(USUAL),
    };
    // Network file systems report transfer sizes, or nothing.
    if bytes.is_power_of_two() && (512..=1 << 20).contains(&bytes) { bytes } else { USUAL }
}

impl Storage for FileStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        self.caps
    }

    /// Queried each time: an unlocked file may change, and a wrong length costs more than a system
    /// call.
    fn len(&self) -> Result<u64> {
        // An unaligned direct write may pass the end for a moment; see `direct`.
        let _exact = self.direct.is_some().then(|| self.hold_length());
        self.raw_len().map_err(|errno| Error::file_io(&self.name, IoAction::Resize, errno))
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let read = match &self.direct {
            None => read_raw(&self.file, buf, offset.0),
            Some(direct) => direct.read(self, buf, offset.0),
        };
        read.map_err(|errno| self.error(IoAction::Read, offset.0, buf.len() as u64, errno))
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.check_writable()?;
        if buf.is_empty() {
            return Ok(());
        }
        self.end_of(IoAction::Write, offset, buf.len() as u64)?;
        self.write_bytes(buf, offset.0)
            .map_err(|errno| self.error(IoAction::Write, offset.0, buf.len() as u64, errno))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.zero_range(offset, len, mode)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.discard_range(offset, len, false)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.allocate_range(offset, len)
    }

    fn sync(&self) -> Result<()> {
        if self.cache == CacheMode::Unsafe { Ok(()) } else { self.sync_always() }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.resize(len)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    vdkit_block::capabilities! {
        space_map: SpaceMap, read_paths: ReadPaths, initial_writes: InitialWrites,
        guest_discard: GuestDiscard, kernel_copy: KernelCopy, access_exchange: AccessExchange
    }
}

impl SpaceMap for FileStorage {
    fn may_have_holes(&self) -> Result<bool> {
        if self.kind == FileKind::BlockDevice {
            return Ok(false);
        }
        let failed = |errno| Error::file_io(&self.name, IoAction::Map, errno);
        let stat = rustix::fs::fstat(&self.file).map_err(failed)?;
        let (len, used) = (stat.st_size as u64, (stat.st_blocks as u64).saturating_mul(512));
        if used >= len {
            return Ok(false);
        }
        // tmpfs examines each page to find the next hole, so holes are searched only if a large part
        // of the file is unallocated.
        Ok(!self.in_memory || len - used >= len / 4)
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        Ok(self.find_extent(offset, len))
    }

    fn allocated_bytes(&self) -> Result<u64> {
        if self.kind == FileKind::BlockDevice {
            return self.len();
        }
        let stat = rustix::fs::fstat(&self.file)
            .map_err(|errno| Error::file_io(&self.name, IoAction::Map, errno))?;
        Ok((stat.st_blocks as u64).saturating_mul(512))
    }
}

impl ReadPaths for FileStorage {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        if self.direct.is_some() || self.never_ready.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if self.in_memory {
            return self.read_padded(buf, offset).map(|()| true);
        }
        let mut bufs = [io::IoSliceMut::new(within_offsets(buf, offset.0))];
        let wanted = bufs[0].len();
        match rustix::io::preadv2(&self.file, &mut bufs, offset.0, ReadWriteFlags::NOWAIT) {
            Ok(got) => Ok(got == wanted && got == buf.len()),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(Errno::OPNOTSUPP | Errno::INVAL) => {
                self.never_ready.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(errno) => Err(self.error(IoAction::Read, offset.0, buf.len() as u64, errno)),
        }
    }

    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        self.read_many(ops)
    }

    fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let len = len.min(self.len()?.saturating_sub(offset.0));
        match read_discard::read_discard(&self.file, offset.0, len) {
            Ok(done) if done >= len => Ok(()),
            // Splice does not work here: read through this process.
            Ok(done) => read_and_discard(self, offset + done, len - done),
            Err(errno) => Err(self.error(IoAction::Read, offset.0, len, errno)),
        }
    }
}

impl InitialWrites for FileStorage {
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        if buf.len() < LARGE_BYTES_MIN {
            return self.write_at(buf, offset);
        }
        self.check_writable()?;
        self.end_of(IoAction::Write, offset, buf.len() as u64)?;
        self.write_initial(buf, offset.0)
            .map_err(|errno| self.error(IoAction::Write, offset.0, buf.len() as u64, errno))
    }
}

impl GuestDiscard for FileStorage {
    fn forget(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.discard_range(offset, len, true)
    }
}

impl AccessExchange for FileStorage {
    fn downgrade_lock(&self) -> Result<()> {
        let Some(lock) = &self.lock else { return Ok(()) };
        lock.lock().become_reader(&self.name, &self.file)
    }

    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        let Some(lock) = &self.lock else { return Ok(Arc::new(self.open_again()?)) };
        refuse_attached(&self.name, &self.file, Change::Write)?;
        let mut lock = lock.lock();
        lock.become_writer(&self.name, &self.file)?;
        let opened = self.open_again().and_then(|mut again| {
            again.lock = Some(Mutex::new(ImageLock::take_beside(&self.name, &again.file)?));
            Ok(again)
        });
        if opened.is_err() {
            // Report the first error.
            let _ = lock.become_reader(&self.name, &self.file);
        }
        Ok(Arc::new(opened?))
    }
}

impl Drop for FileStorage {
    fn drop(&mut self) {
        // A duplicate of the descriptor elsewhere would keep the locks.
        if let Some(lock) = self.lock.take().map(Mutex::into_inner) {
            lock.release(&self.file);
        }
    }
}

/// Opens and locks a file again until it is `current`: its name leads to it. Between the open and
/// the lock, another process may have put a new file in its place. Some network file systems have no
/// stable inode numbers to tell that by; there, what was opened last is taken.
///
/// # Errors
/// Those of `open`.
pub fn open_current<T>(
    mut open: impl FnMut() -> Result<T>,
    current: impl Fn(&T) -> bool,
) -> Result<T> {
    for _ in 1..OPENS_MAX {
        let opened = open()?;
        if current(&opened) {
            return Ok(opened);
        }
    }
    open()
}

/// Whether this is the file that a name was found to lead to.
pub(crate) fn is_at(file: &File, found: Result<Stat, Errno>) -> bool {
    match (rustix::fs::fstat(file), found) {
        (Ok(own), Ok(found)) => (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{getrlimit, setrlimit};

    use super::*;

    #[test]
    fn syncs_of_many_files_leave_descriptors_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<_> = (0..8)
            .map(|i| {
                FileStorage::create(folder.path().join(format!("{i}")), &FileOptions::default())
            })
            .collect::<Result<_>>()
            .unwrap();
        let opens_more = || {
            let mut limit = getrlimit(Resource::Nofile);
            let next = File::open("/dev/null").unwrap().as_raw_fd() as u64;
            limit.current = Some(next + 100);
            setrlimit(Resource::Nofile, limit).unwrap();
            let _lanes: Vec<_> = files.iter().map(FileStorage::open_lanes).collect();
            File::open("/dev/null").is_ok()
        };
        assert!(vdkit_testbase::in_child(|| (), opens_more));
    }
}
