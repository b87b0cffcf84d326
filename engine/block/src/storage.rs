//! Storages of host bytes.

use std::fmt;
use std::os::fd::BorrowedFd;

use crate::capabilities::{
    AccessExchange, GuestDiscard, InitialWrites, KernelCopy, ReadPaths, SpaceMap,
};
use crate::error::{Error, Result, require_writable};
use crate::units::HostOffset;

/// Cache modes of a disk, as QEMU names them. The storage bypasses the page cache if the mode says
/// so. The disk flushes after each write if the mode says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CacheMode {
    /// The host's page cache is used; [`Storage::sync`] makes writes durable.
    #[default]
    Writeback,
    /// The page cache is bypassed (O_DIRECT); [`Storage::sync`] makes writes durable.
    None,
    /// The page cache is used, and each write is durable when it returns.
    Writethrough,
    /// The page cache is bypassed, and each write is durable when it returns.
    DirectSync,
    /// The page cache is used and [`Storage::sync`] does nothing: for scratch data.
    Unsafe,
}

impl CacheMode {
    /// Whether the page cache is bypassed.
    pub fn direct(self) -> bool {
        matches!(self, Self::None | Self::DirectSync)
    }

    /// Whether each write is durable when it returns.
    pub fn write_durable(self) -> bool {
        matches!(self, Self::Writethrough | Self::DirectSync)
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Writeback => "writeback",
            Self::None => "none",
            Self::Writethrough => "writethrough",
            Self::DirectSync => "directsync",
            Self::Unsafe => "unsafe",
        })
    }
}

impl std::str::FromStr for CacheMode {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        Ok(match s {
            "writeback" => Self::Writeback,
            "none" => Self::None,
            "writethrough" => Self::Writethrough,
            "directsync" => Self::DirectSync,
            "unsafe" => Self::Unsafe,
            other => {
                return Err(Error::invalid(format!(
                    "unknown cache mode '{other}': use writeback, none, writethrough, directsync \
                     or unsafe"
                )));
            }
        })
    }
}

/// How to zero bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// Space may be freed.
    MayUnmap,
    /// Space stays or becomes allocated, so that a later write cannot fail with "no space".
    KeepAllocated,
}

/// Facts about a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageCaps {
    /// Writes are possible.
    pub writable: bool,
    /// Writing past the end makes it longer (a file, not a device).
    pub growable: bool,
    /// A block device.
    pub device: bool,
    /// Written front to back (a pipe). Writes are in ascending order; gaps between them become
    /// zero. Little or nothing can be read back.
    pub sequential: bool,
    /// Required alignment of offsets, lengths and memory to avoid a bounce buffer; 1 for none.
    pub alignment: u32,
    /// Granularity of reflinks and holes: the file system's block size.
    pub block_bytes: u32,
    /// [`Storage::sync`] does nothing: no order of writes survives a crash, so callers need not
    /// keep one.
    pub volatile: bool,
    /// [`Storage::write_at`] usually copies to the page cache or memory and does not wait for a
    /// disk.
    pub prompt_writes: bool,
    /// Requests wait for another host or process: more of them in flight than there are cores make
    /// the storage faster.
    pub remote: bool,
}

impl Default for StorageCaps {
    /// Read-only bytes without special properties.
    fn default() -> Self {
        Self {
            writable: false,
            growable: false,
            device: false,
            sequential: false,
            alignment: 1,
            block_bytes: 4096,
            volatile: false,
            prompt_writes: false,
            remote: false,
        }
    }
}

/// A storage of host bytes. All methods may be called from many threads. Concurrent requests to
/// overlapping ranges leave either request's bytes, as on a disk.
///
/// Interrupted and short system calls never reach a caller. Offsets and lengths are in bytes.
///
/// # Errors
/// [`Error::Io`] with the range of the request, or [`Error::File`] for a request without a range. If
/// there is no space, their kind is [`NoSpace`](crate::ErrorKind::NoSpace).
///
/// # Implementing it
/// A read-only storage leaves out [`write_at`](Storage::write_at),
/// [`write_zeroes`](Storage::write_zeroes), [`discard`](Storage::discard),
/// [`allocate`](Storage::allocate) and [`set_len`](Storage::set_len): their defaults return
/// [`Error::ReadOnly`].
///
/// The methods that return an [`Option`] are queries for capabilities. A storage without a
/// capability leaves the query out. Callers use the methods of `dyn Storage`, such as
/// `read_batch` and `copy_from`: they ask for the capability and fall back to the core.
///
/// A storage that wraps another one implements [`StorageLayer`](crate::StorageLayer), which passes
/// on what the wrapper leaves out.
#[allow(clippy::len_without_is_empty)] // `is_empty` is a method of `dyn Storage`.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The name for messages, as the user gave it.
    fn name(&self) -> &str;

    /// Facts. Constant while the storage is open.
    fn caps(&self) -> StorageCaps;

    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    /// Reads up to `buf.len()` bytes; fewer only at the end of the storage.
    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize>;

    /// Writes all of `buf`, extending the storage if needed and possible.
    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let _ = (buf, offset);
        require_writable(false, self.name())
    }

    /// Makes `len` bytes read as zero, the cheapest way that `mode` allows. Ranges past the end
    /// extend a growable storage.
    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let _ = (offset, len, mode);
        require_writable(false, self.name())
    }

    /// Frees space, as a hint. The bytes then read as zero or are unchanged. Never changes the
    /// length.
    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        require_writable(false, self.name())
    }

    /// Allocates the range so that later writes cannot run out of space; extends the storage if
    /// needed. Existing data stays.
    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        require_writable(false, self.name())
    }

    /// Changes the length; new bytes read as zero.
    fn set_len(&self, len: u64) -> Result<()> {
        let _ = len;
        require_writable(false, self.name())
    }

    /// Makes every write that returned before this call durable, and the length (fdatasync). An
    /// error is final: bytes may be lost, and every later call fails too.
    fn sync(&self) -> Result<()>;

    /// The file descriptor, if any.
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    crate::capabilities::queries! {
        /// Holes and allocated space; without it, all bytes are data.
        space_map: SpaceMap,
        /// Reads by other ways than one call that waits.
        read_paths: ReadPaths,
        /// Faster writes of ranges that were never written.
        initial_writes: InitialWrites,
        /// Discards after which the bytes are undefined.
        guest_discard: GuestDiscard,
        /// Copying in the kernel.
        kernel_copy: KernelCopy,
        /// Locks that are exchanged while the storage is open.
        access_exchange: AccessExchange,
    }
}
