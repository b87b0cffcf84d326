//! Where host bytes live.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::error::{Error, IoAction, Result};
use crate::units::HostOffset;

/// How much [`Storage::skim`] reads at once: it stays in a core's own cache.
const SKIM_BYTES: u64 = 256 << 10;

/// What is promised about the bytes of a disk, in QEMU's words. A storage bypasses the page cache where
/// the mode says so. That a write is durable when it returns is the disk's promise: it flushes.
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
    /// The page cache is used and [`Storage::sync`] does nothing: for scratch data that can be
    /// made again.
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

/// How bytes are made to read as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// Space may be given back (a hole is as good as zeroes).
    MayUnmap,
    /// Space stays or becomes allocated, so that a later write cannot fail for want of it.
    KeepAllocated,
}

/// Ways to copy between two storages without passing the bytes through this process.
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

/// What a storage can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageCaps {
    /// Writes are possible.
    pub writable: bool,
    /// Writing past the end makes it longer (a file, not a device).
    pub growable: bool,
    /// A block device.
    pub device: bool,
    /// Bytes go in from the first to the last (a pipe): writes come in ascending order, and what
    /// is left out between two of them becomes zero. Little or nothing can be read back.
    pub sequential: bool,
    /// Offsets, lengths and memory of a request that avoids a bounce buffer are multiples of
    /// this; 1 where anything goes.
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

/// A place where host bytes live. All methods may be called from many threads at once; concurrent
/// requests to overlapping ranges leave either request's bytes, as on a disk.
///
/// Interrupted and short system calls never reach a caller.
///
/// A storage that is only read leaves out [`write_at`](Storage::write_at),
/// [`write_zeroes`](Storage::write_zeroes), [`discard`](Storage::discard),
/// [`allocate`](Storage::allocate) and [`set_len`](Storage::set_len): they answer
/// [`Error::ReadOnly`]. One that stands before another and passes writes on has all five.
pub trait Storage: Send + Sync + fmt::Debug {
    /// The name for messages, as the user gave it.
    fn name(&self) -> &str;

    /// What this storage can do. Constant while it is open.
    fn caps(&self) -> StorageCaps;

    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    /// Whether the length is 0.
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads as many bytes as there are, up to `buf.len()`; fewer only at the end of the storage.
    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize>;

    /// Fills `buf`; bytes past the end are an error.
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

    /// Fills `buf`; bytes past the end are zero. For formats whose rules say so.
    fn read_padded(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        let got = self.read_up_to(buf, offset)?;
        buf[got..].fill(0);
        Ok(())
    }

    /// Reads `len` bytes that nobody looks at: into the host's cache, or wherever is cheapest.
    /// What cannot be read is an error all the same; bytes past the end are no error.
    fn skim(&self, offset: HostOffset, len: u64) -> Result<()> {
        let mut buf = vec![0; len.min(SKIM_BYTES) as usize];
        let mut done = 0;
        while done < len {
            let want = (len - done).min(SKIM_BYTES) as usize;
            if self.read_up_to(&mut buf[..want], offset + done)? < want {
                break;
            }
            done += want as u64;
        }
        Ok(())
    }

    /// [`Storage::read_padded`], but only where the bytes are at hand, so that the call waits for no
    /// disk; `false`, with anything in `buf`, where they are not or nobody knows.
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        let _ = (buf, offset);
        Ok(false)
    }

    /// Whether [`Storage::write_at`] as a rule only hands the bytes over (to the page cache, to
    /// memory) and does not wait for a disk.
    fn writes_promptly(&self) -> bool {
        false
    }

    /// Serves several reads, in any order; each is padded with zeroes past the end. Storages that
    /// can keep several requests in flight override this.
    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        for op in ops {
            self.read_padded(op.buf, op.offset)?;
        }
        Ok(())
    }

    /// Writes all of `buf`, making the storage longer where that is needed and possible.
    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let _ = (buf, offset);
        Err(read_only(self.name()))
    }

    /// [`Storage::write_at`] for a range that holds nothing yet, as a job writes a new file with
    /// several threads. A storage may know a quicker way to such bytes.
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.write_at(buf, offset)
    }

    /// Makes `len` bytes read as zero, the cheapest way that `mode` allows. Ranges past the end of
    /// a growable storage make it longer.
    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        let _ = (offset, len, mode);
        Err(read_only(self.name()))
    }

    /// Gives space back. The bytes read as zero or as before afterwards: a hint. Never changes the
    /// length.
    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        Err(read_only(self.name()))
    }

    /// Gives space back as [`Storage::discard`] does, and where that is not possible also in a way after
    /// which the bytes may read as anything: for a guest that said that it does not need them.
    fn forget(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.discard(offset, len)
    }

    /// Makes sure that writes to the range will not run out of space; makes the storage longer
    /// where needed. What is there stays.
    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let _ = (offset, len);
        Err(read_only(self.name()))
    }

    /// Makes every write that returned before this call durable, with the length (fdatasync). An
    /// error here is final: bytes may be lost, and every later call fails too.
    fn sync(&self) -> Result<()>;

    /// [`Storage::sync`] does nothing: no order of writes survives a crash, so none needs keeping.
    fn volatile(&self) -> bool {
        false
    }

    /// Told that a [volatile](Storage::volatile) storage is about to be written up to `len`. One
    /// that gains from knowing becomes so long; others grow as they are written.
    fn expect_len(&self, len: u64) -> Result<()> {
        let _ = len;
        Ok(())
    }

    /// Changes the length; new bytes read as zero.
    fn set_len(&self, len: u64) -> Result<()> {
        let _ = len;
        Err(read_only(self.name()))
    }

    /// Whether holes can be there at all: fewer blocks allocated than the length needs. Cheap.
    fn may_have_holes(&self) -> Result<bool>;

    /// The run of data or hole that begins at `offset`, at most `len` bytes. Past the end: a hole.
    /// Holes are believed to read as zero.
    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent>;

    /// Bytes of host space that are allocated.
    fn allocated_bytes(&self) -> Result<u64>;

    /// Copies `len` bytes from `source` at `from` to this storage at `to`, inside the kernel.
    /// Returns how many bytes were copied from the front: fewer than `len` (also 0) where this
    /// method does not work here, and the caller moves the rest by another way.
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

    /// Of the locks by which a writer keeps other processes away, gives back those that keep
    /// readers away: for a storage that will be written no more. Nobody else can take it for
    /// writing, at no moment. A storage without locks does nothing.
    fn let_others_read(&self) -> Result<()> {
        Ok(())
    }

    /// The same bytes as a second storage, which can be written. Where this one keeps writers away,
    /// it keeps everyone away from now on, and the new one does too: at no moment can another
    /// process take it for writing. Where this fails, the locks are as before.
    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        let hint = "open it for writing from the beginning";
        Err(Error::unsupported(self.name(), "cannot be opened for writing while it is read", hint))
    }

    /// The descriptor, for storages that have one.
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
