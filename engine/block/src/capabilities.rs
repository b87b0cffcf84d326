//! What a storage may offer beyond the core of [`Storage`], and the methods of `dyn Storage` that
//! use it or do without.
//!
//! Each default of a capability's method falls back to the core methods of the same storage. So a
//! wrapper that implements a capability in part never lets bytes pass by itself.

use std::io;
use std::sync::Arc;

use crate::error::{Error, IoAction, Result};
use crate::storage::{Storage, ZeroMode};
use crate::units::HostOffset;

/// Declares a trait's queries for capabilities. Each returns `None` unless the implementor has the
/// capability.
macro_rules! queries {
    ($($(#[$doc:meta])* $query:ident: $capability:ident,)+) => {
        $(
            $(#[$doc])*
            fn $query(&self) -> Option<&dyn $capability> {
                None
            }
        )+
    };
}
pub(crate) use queries;

/// Answers queries for capabilities with `Some(self)`, in an implementation of a trait that has such
/// queries: [`Storage`], [`StorageLayer`](crate::StorageLayer), [`Format`](crate::Format) or
/// [`FormatDriver`](crate::FormatDriver).
#[macro_export]
macro_rules! capabilities {
    ($($query:ident: $capability:ident),+) => {
        $(
            fn $query(&self) -> Option<&dyn $crate::$capability> {
                Some(self)
            }
        )+
    };
}

/// Bytes of one request that zeroes a device.
const ZERO_STEP_BYTES: u64 = 256 << 20;
/// Bytes per read of [`ReadPaths::read_discard`]; fits in a core's own cache.
const READ_DISCARD_BYTES: u64 = 256 << 10;

/// A run of a storage: data, or a hole that reads as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorageExtent {
    /// Whether there may be data; `false` promises zeroes.
    pub data: bool,
    /// Bytes for which this holds; never 0.
    pub len: u64,
}

/// Where a storage has holes, and how much space it takes.
pub trait SpaceMap {
    /// Whether the storage may have holes: fewer blocks allocated than the length needs. Cheap.
    fn may_have_holes(&self) -> Result<bool>;

    /// The data or hole at `offset`, at most `len` bytes. Past the end: a hole. Holes are assumed
    /// to read as zero.
    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent>;

    /// Allocated bytes of host space.
    fn allocated_bytes(&self) -> Result<u64>;
}

/// One read of a batch; see [`ReadPaths::read_batch`].
#[derive(Debug)]
pub struct ReadOp<'a> {
    /// Host offset of the first byte.
    pub offset: HostOffset,
    /// Where the bytes go. Bytes past the end of the storage are zero.
    pub buf: &'a mut [u8],
}

/// Reads by other ways than one call that waits.
pub trait ReadPaths: Storage {
    /// Fills `buf`, with zeroes past the end, without waiting for a disk. Returns `false`, with
    /// `buf` undefined, if the bytes are not cached or that is unknown.
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        let _ = (buf, offset);
        Ok(false)
    }

    /// Serves several reads, in any order; each is padded with zeroes past the end. Storages with a
    /// request queue override this.
    fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        ops.iter_mut().try_for_each(|op| self.read_padded(op.buf, op.offset))
    }

    /// Reads `len` bytes and discards them, to fill the host's cache or to find read errors. Bytes
    /// past the end are no error.
    fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        read_and_discard(self, offset, len)
    }
}

/// Writes that fill a new file.
pub trait InitialWrites {
    /// [`Storage::write_at`] for a range that was never written, for jobs that fill a new file with
    /// several threads. A storage may be faster for such ranges.
    fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()>;
}

/// Discards for guests.
pub trait GuestDiscard {
    /// [`Storage::discard`], or else another discard after which the bytes are undefined.
    fn forget(&self, offset: HostOffset, len: u64) -> Result<()>;
}

/// Ways to copy between two storages in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// Share the blocks (FICLONERANGE).
    Reflink,
    /// Let the kernel copy (copy_file_range).
    CopyFileRange,
}

/// A range to copy from another storage; see [`KernelCopy::copy_from`].
#[derive(Clone, Copy, Debug)]
pub struct CopyOp<'a> {
    /// Where the bytes go.
    pub to: HostOffset,
    /// The storage that has the bytes.
    pub source: &'a dyn Storage,
    /// Where it has them.
    pub from: HostOffset,
    /// Bytes.
    pub len: u64,
    /// How they are copied.
    pub method: CopyMethod,
}

/// Copying in the kernel.
pub trait KernelCopy {
    /// Copies a range to this storage in the kernel. Returns the bytes copied from the front. If
    /// the method is not possible here, that is fewer than [`CopyOp::len`] (also 0), and the caller
    /// copies the rest by other means.
    fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64>;
}

/// Access that changes while the storage is open, without a moment at which another process could
/// take the storage for writing.
pub trait AccessExchange: Storage {
    /// Releases the locks that exclude readers and keeps those that exclude writers, for a storage
    /// that will not be written any more. No other process can lock it for writing in between.
    fn downgrade_lock(&self) -> Result<()>;

    /// Reopens the same bytes for writing. If this storage excluded other writers, both storages
    /// then exclude all other processes; no other process can lock it for writing in between. On
    /// failure the locks are unchanged.
    fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        Err(cannot_reopen(self.name()))
    }
}

/// What callers need beyond the core: helpers, and each capability with its fallback.
impl dyn Storage + '_ {
    /// Whether the length is 0.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Gives a new image its length, which a device must have already. On a device, zeroes the
    /// first `zeroed` bytes: its old content must not show.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if the device is shorter; errors of the storage.
    pub fn make_room(&self, len: u64, zeroed: u64) -> Result<()> {
        if self.caps().growable {
            return self.set_len(len);
        }
        let found = self.len()?;
        if found < len {
            let what = format!("the image needs {len} bytes, the device has {found}");
            return Err(Error::no_space(self.name(), what));
        }
        in_steps(HostOffset(0), HostOffset(zeroed), ZERO_STEP_BYTES, |at, len| {
            self.write_zeroes(at, len, ZeroMode::MayUnmap)
        })
    }

    /// As `make_room`, for a file that may hold something else.
    ///
    /// # Errors
    /// As `make_room`.
    pub fn make_empty(&self, len: u64, zeroed: u64) -> Result<()> {
        if self.caps().growable && !self.is_empty()? {
            self.set_len(0)?;
        }
        self.make_room(len, zeroed)
    }

    /// See [`StorageExt::read_at`].
    pub fn read_at(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        StorageExt::read_at(self, buf, offset)
    }

    /// See [`StorageExt::read_padded`].
    pub fn read_padded(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        StorageExt::read_padded(self, buf, offset)
    }

    /// See [`ReadPaths::read_ready`].
    pub fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        self.read_paths().map_or(Ok(false), |paths| paths.read_ready(buf, offset))
    }

    /// See [`ReadPaths::read_batch`].
    pub fn read_batch(&self, ops: &mut [ReadOp<'_>]) -> Result<()> {
        match self.read_paths() {
            Some(paths) => paths.read_batch(ops),
            None => ops.iter_mut().try_for_each(|op| self.read_padded(op.buf, op.offset)),
        }
    }

    /// See [`ReadPaths::read_discard`].
    pub fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        match self.read_paths() {
            Some(paths) => paths.read_discard(offset, len),
            None => read_and_discard(self, offset, len),
        }
    }

    /// See [`InitialWrites::write_new`].
    pub fn write_new(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        match self.initial_writes() {
            Some(writes) => writes.write_new(buf, offset),
            None => self.write_at(buf, offset),
        }
    }

    /// See [`GuestDiscard::forget`].
    pub fn forget(&self, offset: HostOffset, len: u64) -> Result<()> {
        match self.guest_discard() {
            Some(discard) => discard.forget(offset, len),
            None => self.discard(offset, len),
        }
    }

    /// See [`SpaceMap::may_have_holes`].
    pub fn may_have_holes(&self) -> Result<bool> {
        self.space_map().map_or(Ok(false), |map| map.may_have_holes())
    }

    /// See [`SpaceMap::extent_at`].
    pub fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        if let Some(map) = self.space_map() {
            return map.extent_at(offset, len);
        }
        let (there, len) = (self.len()?.saturating_sub(offset.0), len.max(1));
        let data = there > 0;
        Ok(StorageExtent { data, len: if data { len.min(there) } else { len } })
    }

    /// See [`SpaceMap::allocated_bytes`].
    pub fn allocated_bytes(&self) -> Result<u64> {
        self.space_map().map_or_else(|| self.len(), |map| map.allocated_bytes())
    }

    /// See [`KernelCopy::copy_from`].
    pub fn copy_from(&self, op: &CopyOp<'_>) -> Result<u64> {
        self.kernel_copy().map_or(Ok(0), |copy| copy.copy_from(op))
    }

    /// See [`AccessExchange::downgrade_lock`]. A storage without locks does nothing.
    pub fn downgrade_lock(&self) -> Result<()> {
        self.access_exchange().map_or(Ok(()), |access| access.downgrade_lock())
    }

    /// See [`AccessExchange::reopen_for_writing`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a storage without this capability; errors of the storage.
    pub fn reopen_for_writing(&self) -> Result<Arc<dyn Storage>> {
        match self.access_exchange() {
            Some(access) => access.reopen_for_writing(),
            None => Err(cannot_reopen(self.name())),
        }
    }
}

/// Reads of whole buffers, for a storage whose type is known. (`dyn Storage` has them too.)
pub trait StorageExt: Storage {
    /// Fills `buf`; fails past the end.
    fn read_at(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        let got = self.read_up_to(buf, offset)?;
        if got < buf.len() {
            let message = format!("the file ends after {got} of them");
            let ends = io::Error::new(io::ErrorKind::UnexpectedEof, message);
            let len = buf.len() as u64;
            return Err(Error::io(self.name(), IoAction::Read, offset.0, len, ends));
        }
        Ok(())
    }

    /// Fills `buf`; bytes past the end are zero.
    fn read_padded(&self, buf: &mut [u8], offset: HostOffset) -> Result<()> {
        let got = self.read_up_to(buf, offset)?;
        buf[got..].fill(0);
        Ok(())
    }
}

impl<S: Storage + ?Sized> StorageExt for S {}

/// Calls `step` for pieces of at most `most` bytes of a range, so that a storage wrapper can cancel
/// in between.
///
/// # Errors
/// Those of `step`.
pub fn in_steps(
    from: HostOffset,
    end: HostOffset,
    most: u64,
    mut step: impl FnMut(HostOffset, u64) -> Result<()>,
) -> Result<()> {
    let mut at = from;
    while at < end {
        let len = most.min(end - at);
        step(at, len)?;
        at += len;
    }
    Ok(())
}

/// Reads `len` bytes in small pieces and drops them. Bytes past the end are no error.
///
/// # Errors
/// Errors of the storage.
pub fn read_and_discard<S: Storage + ?Sized>(
    storage: &S,
    offset: HostOffset,
    len: u64,
) -> Result<()> {
    let mut buf = vec![0; len.min(READ_DISCARD_BYTES) as usize];
    let mut done = 0;
    while done < len {
        let want = (len - done).min(READ_DISCARD_BYTES) as usize;
        if storage.read_up_to(&mut buf[..want], offset + done)? < want {
            break;
        }
        done += want as u64;
    }
    Ok(())
}

fn cannot_reopen(name: &str) -> Error {
    let hint = "open it for writing from the beginning";
    Error::unsupported(name, "cannot be opened for writing while it is read", hint)
}
