//! Storages of host bytes.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::error::{Error, IoAction, Result};
use crate::units::HostOffset;

/// Bytes per read of [`Storage::read_discard`]; fits in a core's own cache.
const READ_DISCARD_BYTES: u64 = 256 << 10;

/// Cache modes of a disk, as QEMU names them. The storage bypasses the page cache if the mode says
/// so. The disk flushes after each write if the mode says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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
                return Err(Error::Invalid(format!(
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

/// Ways to copy between two storages in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// Share the blocks (FICLONERANGE).
    Reflink,
    /// Let the kernel copy (copy_file_range).
    CopyFileRange,
}

/// A run of a storage: data, or a hole that reads as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageExtent {
    /// Whether there may be data; `false` promises zeroes.
    pub data: bool,
    /// Bytes for which this holds; never 0.
    pub len: u64,
}

/// Capabilities of a storage.
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
}

/// One read of a batch; see [`Storage::read_batch`].
#[derive(Debug)]
pub struct ReadOp<'a> {
    /// Host offset of the first byte.
    pub offset: HostOffset,
    /// Where the bytes go. Bytes past the end of the storage are zero.
    pub buf: &'a mut [u8],
}

fn read_only(file: &str) -> Error {
    Error::ReadOnly { file: file.to_owned() }
}

/// A storage of host bytes. All methods may be called from many threads. Concurrent requests to
/// overlapping ranges leave either request's bytes, as on a disk.
///
/// Interrupted and short system calls never reach a caller.
///
/// A read-only storage leaves out [`write_at`](Storage::write_at),
/// [`write_zeroes`](Storage::write_zeroes), [`discard`](Storage::discard),
/// [`allocate`](Storage::allocate) and [`set_len`](Storage::set_len): their defaults return
/// [`Error::ReadOnly`]. A storage that wraps another and passes writes on must implement all five.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The name for messages, as the user gave it.
    fn name(&self) -> &str;

    /// Capabilities. Constant while the storage is open.
    fn caps(&self) -> StorageCaps;

    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    /// Whether the length is 0.
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads up to `buf.len()` bytes; fewer only at the end of the storage.
    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize>;

    /// Fills `buf`; fails past the end.
    fn read_at(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        let got = self.read_up_to(buf, offset)?;
        if got < buf.len() {
            return Err(Error::io(
                self.name(),
                IoAction::Read,
                offset.0,
                buf.len() as u64,
                std::io::Error::new(
                    std::io::ErrorKind::UnexpectedEof,
                    format!("the file ends after {got} of them"),
                ),
            ));
        }
        Ok(())
    }

    /// Fills `buf`; bytes past the end are zero.
    fn read_padded(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        let got = self.read_up_to(buf, offset)?;
        buf[got..].fill(0);
        Ok(())
    }

    /// Reads `len` bytes and discards them, to fill the host's cache or to find read errors. Bytes
    /// past the end are no error.
    fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let mut buf = vec![0; len.min(READ_DISCARD_BYTES) as usize];
        let mut done = 0;
        while done < len {
            let want = (len - done).min(READ_DISCARD_BYTES) as usize;
            if self.read_up_to(&mut buf[..want], offset + done)? < want {
                break;
            }
            done += want as u64;
        }
        Ok(())
    }

    /// [`Storage::read_padded`] without waiting for a disk. Returns `false`, with `buf` undefined,
    /// if the bytes are not cached or that is unknown.
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        let _ = (buf, offset);
        Ok(false)
    }

    /// Whether [`Storage::write_at`] usually copies to the page cache or memory and does not wait
    /// for a disk.
    fn writes_promptly(&self) -> bool {
        false
    }

    /// Serves several reads, in any order; each is padded with zeroes past the end. Storages with a
    /// request queue override this.
    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        for op in ops {
            self.read_padded(op.buf, op.offset)?;
        }
        Ok(())
    }

    /// Writes all of `buf`, extending the storage if needed and possible.
    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let _ = (buf, offset);
        Err(read_only(self.name()))
    }

    /// [`Storage::write_at`] for a range that was never written, for jobs that fill a new file with
    /// several threads. A storage may optimise for such ranges.
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.write_at(buf, offset)
    }

    /// Makes `len` bytes read as zero, the cheapest way that `mode` allows. Ranges past the end
    /// extend a growable storage.
    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let _ = (offset, len, mode);
        Err(read_only(self.name()))
    }

    /// Frees space, as a hint. The bytes then read as zero or are unchanged. Never changes the
    /// length.
    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        Err(read_only(self.name()))
    }

    /// [`Storage::discard`], or else another discard after which the bytes are undefined: for guest
    /// discards.
    fn forget(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.discard(offset, len)
    }

    /// Allocates the range so that later writes cannot run out of space; extends the storage if
    /// needed. Existing data stays.
    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        Err(read_only(self.name()))
    }

    /// Makes every write that returned before this call durable, and the length (fdatasync). An
    /// error is final: bytes may be lost, and every later call fails too.
    fn sync(&self) -> Result<()>;

    /// [`Storage::sync`] does nothing: no order of writes survives a crash, so callers need not
    /// keep one.
    fn volatile(&self) -> bool {
        false
    }

    /// Changes the length; new bytes read as zero.
    fn set_len(&self, len: u64) -> Result<()> {
        let _ = len;
        Err(read_only(self.name()))
    }

    /// Whether the storage may have holes: fewer blocks allocated than the length needs. Cheap.
    fn may_have_holes(&self) -> Result<bool>;

    /// The data or hole at `offset`, at most `len` bytes. Past the end: a hole. Holes are assumed
    /// to read as zero.
    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent>;

    /// Allocated bytes of host space.
    fn allocated_bytes(&self) -> Result<u64>;

    /// Copies `len` bytes from `source` at `from` to this storage at `to`, in the kernel. Returns
    /// the bytes copied from the front. If `method` is not possible here, that is fewer than `len`
    /// (also 0), and the caller copies the rest by other means.
    fn copy_from(
        &self,
        to: HostOffset,
        source: &dyn Storage,
        from: HostOffset,
        len: u64,
        method: CopyMethod,
    ) -> Result<u64> {
        let _ = (to, source, from, len, method);
        Ok(0)
    }

    /// Releases the locks that exclude readers and keeps those that exclude writers, for a storage
    /// that will not be written any more. No other process can lock it for writing in between. A
    /// storage without locks does nothing.
    fn let_others_read(&self) -> Result<()> {
        Ok(())
    }

    /// Reopens the same bytes for writing. If this storage excluded other writers, both storages
    /// then exclude all other processes; no other process can lock it for writing in between. On
    /// failure the locks are unchanged.
    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        let hint = "open it for writing from the beginning";
        Err(Error::unsupported(self.name(), "cannot be opened for writing while it is read", hint))
    }

    /// The file descriptor, if any.
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
