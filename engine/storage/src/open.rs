//! Opening host files, and rejecting those that cannot hold a disk.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use vdkit_block::{CacheMode, Error, FileHints, IoAction, Result};

use crate::held;
use crate::lock::LockMode;
use crate::sys;

/// Type of a host file that can hold a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
}

/// Whether to create a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CreateMode {
    /// Open an existing file.
    #[default]
    None,
    /// Create a file that must not exist yet.
    New,
    /// As [`CreateMode::New`], with mode 0600, whatever the umask.
    Private,
}

impl CreateMode {
    /// Whether it creates the file.
    pub(crate) fn makes(self) -> bool {
        self != Self::None
    }

    fn permissions(self) -> Mode {
        // As QEMU's programs: a group gets no right to change a guest's disk by a umask alone.
        Mode::from_raw_mode(if self == Self::Private { 0o600 } else { 0o644 })
    }
}

/// Bytes of large first writes that may use the page cache. Later ones bypass it, on file systems
/// known to do that well (ext4, XFS).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheShare {
    /// All.
    #[default]
    All,
    /// This many.
    Bytes(u64),
}

impl CacheShare {
    /// For a file that a job fills and does not read again: what most machines still take without
    /// making the writer wait for the disk.
    pub const FILLED_ONCE: Self = Self::Bytes(1 << 30);
}

/// Options for opening a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileOptions {
    /// Open for writing too.
    pub writable: bool,
    /// The cache mode.
    pub cache: CacheMode,
    /// Whether to create the file.
    pub create: CreateMode,
    /// Whether to lock it.
    pub lock: LockMode,
    /// For jobs that fill a file and do not read it again; applies to the cache modes writeback and
    /// unsafe.
    pub share: CacheShare,
    /// For a file that is created.
    pub hints: FileHints,
    /// For [`PendingFile`](crate::PendingFile): an existing file is written in place, as most
    /// programs do it, where a new one cannot take its name (a folder that takes no new files, a
    /// mount point) or would not be what another name of the file leads to. A symbolic link to a
    /// missing file creates that file. Otherwise these are errors, and other names keep the old
    /// file.
    pub in_place_if_needed: bool,
}

impl FileOptions {
    /// Read-only, through the page cache, locked.
    pub fn read_only() -> Self {
        Self::default()
    }

    /// Read-write, through the page cache, locked.
    pub fn read_write() -> Self {
        Self { writable: true, ..Self::default() }
    }

    vdkit_block::setters! {
        /// Sets whether it is opened for writing too.
        writable: bool,
        /// Sets whether the file is created.
        create: CreateMode,
        /// Sets the cache mode.
        cache: CacheMode,
        /// Sets the lock mode.
        lock: LockMode,
        /// Sets the hints for a file that is created.
        hints: FileHints,
        /// Sets the share of the page cache.
        share: CacheShare,
        /// Sets whether a file is written in place where it cannot be replaced.
        in_place_if_needed: bool,
    }
}

/// The type of the file at a path, following symbolic links.
///
/// # Errors
/// [`Error::File`] if there is none; [`Error::Unsupported`], naming the type, for directories,
/// pipes, sockets and character devices.
pub fn classify(path: &Path) -> Result<FileKind> {
    let name = path.display().to_string();
    let stat = rustix::fs::stat(path).map_err(|e| Error::file_io(&name, IoAction::Open, e))?;
    kind_of(&name, stat.st_mode)
}

pub(crate) fn kind_of_file(name: &str, file: &File) -> Result<FileKind> {
    let stat = rustix::fs::fstat(file).map_err(|e| Error::file_io(name, IoAction::Open, e))?;
    kind_of(name, stat.st_mode)
}

fn kind_of(name: &str, mode: u32) -> Result<FileKind> {
    let (what, hint) = match FileType::from_raw_mode(mode) {
        FileType::RegularFile => return Ok(FileKind::Regular),
        FileType::BlockDevice => return Ok(FileKind::BlockDevice),
        FileType::Directory => ("is a directory", "name an image file in it"),
        FileType::Fifo => ("is a pipe", "a disk needs random access: copy it to a file first"),
        FileType::Socket => ("is a socket", "name an image file or a block device"),
        FileType::CharacterDevice => (
            "is a character device",
            "name an image file or a block device, or 'null:' to write nothing",
        ),
        _ => ("is neither a file nor a block device", "name an image file or a block device"),
    };
    Err(Error::unsupported(name, what, hint))
}

/// Opens a path, without side effects on rejected files.
pub(crate) fn open_file(path: &Path, options: &FileOptions) -> Result<(File, FileKind)> {
    let name = path.display().to_string();
    let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    flags |= if options.writable { OFlags::RDWR } else { OFlags::RDONLY };
    match options.create {
        // Checked before opening: opening a tape rewinds it, opening a pipe blocks.
        CreateMode::None => {
            if classify(path)? == FileKind::BlockDevice
                && options.writable
                && options.lock == LockMode::Auto
            {
                // On a block device O_EXCL fails while the device is mounted or part of a volume.
                flags |= OFlags::EXCL;
            }
        }
        CreateMode::New | CreateMode::Private => flags |= OFlags::CREATE | OFlags::EXCL,
    }
    let mode = options.create.permissions();
    let file = retry_on_intr(|| rustix::fs::open(path, flags, mode)).map_err(|errno| {
        if flags.contains(OFlags::EXCL) && errno == Errno::BUSY {
            return Error::Busy {
                file: name.clone(),
                what: rustix::fs::stat(path)
                    .ok()
                    .and_then(|found| held::by_whom(found.st_rdev))
                    .unwrap_or_else(|| "mounted, or part of a volume or array".to_owned()),
            };
        }
        Error::file_io(&name, IoAction::Open, errno)
    })?;
    let file = File::from(file);
    if options.create.makes() {
        give_hints(&file, options.hints);
    }
    // Check the opened file again: the name may lead to another file by now.
    let kind = kind_of_file(&name, &file)?;
    if kind == FileKind::BlockDevice
        && options.writable
        && sys::device_read_only(file.as_fd()).unwrap_or(false)
    {
        return Err(Error::file_io(&name, IoAction::Open, Errno::ROFS));
    }
    Ok((file, kind))
}

/// Passes hints on, before the file has any bytes: later they have no effect, or none on the bytes
/// that are there.
fn give_hints(file: &File, hints: FileHints) {
    if hints.no_cow
        && let Ok(flags) = rustix::fs::ioctl_getflags(file)
    {
        let _ = rustix::fs::ioctl_setflags(file, flags | rustix::fs::IFlags::NOCOW);
    }
    if let Some(bytes) = hints.extent_bytes {
        let _ = sys::set_extent_bytes(file.as_fd(), bytes);
    }
}

/// Sets the status flags that this crate relies on: blocking, no O_APPEND (it would send every
/// write to the end), and O_DIRECT as the cache mode says.
pub(crate) fn set_flags(name: &str, file: &File, cache: CacheMode) -> Result<()> {
    let fail = |errno| Error::file_io(name, IoAction::Open, errno);
    let before = rustix::fs::fcntl_getfl(file).map_err(fail)?;
    let plain = before - (OFlags::NONBLOCK | OFlags::APPEND | OFlags::DIRECT);
    if !cache.direct() {
        if plain != before {
            rustix::fs::fcntl_setfl(file, plain).map_err(fail)?;
        }
        return Ok(());
    }
    rustix::fs::fcntl_setfl(file, plain | OFlags::DIRECT).map_err(|errno| {
        if errno == Errno::INVAL {
            return no_direct(name, cache);
        }
        fail(errno)
    })
}

/// The error for a file system without O_DIRECT.
pub(crate) fn no_direct(name: &str, cache: CacheMode) -> Error {
    let instead = if cache.write_durable() { "writethrough" } else { "writeback" };
    Error::unsupported(
        name,
        format!("cache mode {cache} needs direct I/O, which this file system does not have"),
        format!("use cache mode {instead}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_cannot_hold_a_disk_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .unwrap();
        let socket = dir.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        for (path, word) in [
            (dir.path(), "is a directory"),
            (pipe.as_path(), "is a pipe"),
            (socket.as_path(), "is a socket"),
            (Path::new("/dev/null"), "is a character device"),
        ] {
            // Opening the pipe must not wait for a writer.
            let error = open_file(path, &FileOptions::read_only()).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let missing = classify(&dir.path().join("missing")).unwrap_err();
        assert!(matches!(missing, Error::File { action: IoAction::Open, .. }));
    }

    #[test]
    fn append_is_taken_off() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::options().append(true).create(true).open(dir.path().join("f")).unwrap();
        set_flags("f", &file, CacheMode::Writeback).unwrap();
        assert!(!rustix::fs::fcntl_getfl(&file).unwrap().contains(OFlags::APPEND));
    }
}
