//! Images whose disk is one range of a file: every guest byte has its place from the start, so
//! nothing is reserved or published. The file system allocates, also where the file has holes.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::capabilities::StorageExtent;
use crate::encryption::{CIPHER_SECTOR_BYTES, Encryption};
use crate::error::{Error, Result, require_writable};
use crate::extent::{Extent, FileIndex, Place};
use crate::format::{Format, FormatCaps};
use crate::in_flight::InFlight;
use crate::reservation::Reservation;
use crate::storage::{Storage, ZeroMode};
use crate::units::{GuestOffset, HostOffset};

/// Pause between two checks of whether the requests have ended that may reach beyond a new end.
const DRAIN_STEP: Duration = Duration::from_micros(100);

/// Data and holes of a range of a file, for scans in steps smaller than a run. Only data is cached:
/// a cached hole would be wrong after a write, while cached data that became a hole still reads
/// correctly.
#[derive(Debug, Default)]
pub struct DataRuns {
    known: Mutex<Range<u64>>,
    /// The storage may have holes: the cheap check need not be repeated.
    has_holes: AtomicBool,
}

impl DataRuns {
    fn remember(&self, run: Range<u64>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = run;
    }

    /// Must be called after bytes became zero.
    pub fn forget(&self) {
        self.remember(0..0);
    }

    /// The run of data or of zeroes from `at` on, in a range that ends at `end`: one query for each
    /// run, however small the steps.
    ///
    /// # Errors
    /// Those of the storage.
    pub fn run(&self, storage: &dyn Storage, at: u64, end: u64) -> Result<StorageExtent> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if known.contains(&at) {
            return Ok(StorageExtent { data: true, len: known.end - at });
        }
        if !self.has_holes.load(Ordering::Relaxed) {
            if !storage.may_have_holes()? {
                self.remember(0..end);
                return Ok(StorageExtent { data: true, len: end - at });
            }
            self.has_holes.store(true, Ordering::Relaxed);
        }
        let run = storage.extent_at(HostOffset(at), end - at)?;
        if run.data {
            self.remember(at..at.saturating_add(run.len));
        }
        Ok(run)
    }
}

/// The file of a [`FlatFormat`], and the place of the disk in it.
#[derive(Debug)]
pub struct Flat {
    /// The file.
    pub storage: Arc<dyn Storage>,
    /// Whether the image was opened for writing.
    pub writable: bool,
    /// Host offset of the disk's first byte.
    pub first: u64,
    /// Bytes of the disk.
    pub guest_bytes: AtomicU64,
    in_flight: InFlight,
    runs: DataRuns,
}

impl Flat {
    /// A disk of `guest_bytes` bytes from the host offset `first` on.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if `writable` is set and the storage is not.
    pub fn new(
        storage: Arc<dyn Storage>,
        writable: bool,
        first: u64,
        guest_bytes: u64,
    ) -> Result<Self> {
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let (in_flight, runs) = (InFlight::default(), DataRuns::default());
        let guest_bytes = AtomicU64::new(guest_bytes);
        Ok(Self { storage, writable, first, guest_bytes, in_flight, runs })
    }

    /// Fails if the image was opened for reading.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn require_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }

    /// Ends the disk at `guest_bytes` for requests that begin from now on, if it is longer, and waits
    /// for requests that may still write beyond. Call it before cutting the file: a late write would
    /// lengthen the file again, or overwrite what follows the disk. Returns the size before.
    pub fn shrink(&self, guest_bytes: u64) -> u64 {
        // A request enters and then reads the size. So it sees the new size, or is waited for.
        let before = self.guest_bytes.fetch_min(guest_bytes, Ordering::SeqCst);
        if guest_bytes < before {
            let stamp = self.in_flight.stamp();
            while !self.in_flight.passed(stamp) {
                std::thread::sleep(DRAIN_STEP);
            }
        }
        before
    }

    /// Gives the disk `guest_bytes`, and the file of `host_bytes`, if it is growable. A storage of
    /// fixed length keeps it, and the guest sees less of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a storage of fixed length is too short; those of the storage. The disk
    /// then keeps its size.
    pub fn set_size(&self, guest_bytes: u64, host_bytes: u64) -> Result<()> {
        let growable = self.storage.caps().growable;
        if !growable {
            let len = self.storage.len()?;
            if host_bytes > len {
                let what = format!("has a fixed length of {len} bytes and cannot grow");
                return Err(Error::invalid_for(&self.storage.name(), what));
            }
        }
        let before = self.shrink(guest_bytes);
        let done = if growable { self.storage.set_len(host_bytes) } else { Ok(()) };
        self.resized(if done.is_ok() { guest_bytes } else { before });
        done
    }

    /// Uses another size, after the file has changed.
    pub fn resized(&self, guest_bytes: u64) {
        self.runs.forget();
        self.guest_bytes.store(guest_bytes, Ordering::Release);
    }

    /// Fails for a range beyond the end. For requests in flight, that stays true until they end: see
    /// [`Flat::shrink`].
    fn require_inside(&self, at: GuestOffset, len: u64) -> Result<()> {
        let size = self.guest_bytes.load(Ordering::SeqCst);
        if at.0.checked_add(len).is_some_and(|end| end <= size) {
            return Ok(());
        }
        let name = self.storage.name();
        let what = format!("{len} bytes at {at} end beyond the disk's {size}");
        Err(Error::invalid_for(&name, what))
    }

    fn host(&self, at: GuestOffset) -> HostOffset {
        HostOffset(self.first + at.0)
    }

    fn data(&self, at: GuestOffset, len: u64) -> Extent {
        let (file, offset) = (FileIndex(0), self.host(at));
        Extent { len, place: Place::Data { file, offset, exclusive: true } }
    }
}

/// A format whose disk is one range of a file. Each implementor is a [`Format`].
///
/// If it is encrypted, holes would read as noise: there are none on its map, zeroes are written,
/// and nothing is discarded.
pub trait FlatFormat: Send + Sync + fmt::Debug {
    /// As [`Format::name`].
    fn name(&self) -> &'static str;

    /// The file.
    fn flat(&self) -> &Flat;

    /// As [`Format::warnings`].
    fn warnings(&self) -> &[String] {
        &[]
    }

    /// As [`Format::encryption`].
    fn encryption(&self) -> Option<&Encryption> {
        None
    }

    /// Discards bytes of the file.
    fn discard(&self, at: HostOffset, len: u64) -> Result<()> {
        self.flat().storage.discard(at, len)
    }

    /// As [`Format::resize`], of an image that is open for writing. Calls [`Flat::resized`].
    fn resize(&self, guest_bytes: u64) -> Result<()>;
}

impl<F: FlatFormat> Format for F {
    fn name(&self) -> &'static str {
        FlatFormat::name(self)
    }

    fn caps(&self) -> FormatCaps {
        let (flat, plain) = (self.flat(), self.new_reads_zero());
        let storage = flat.storage.caps();
        let least = if plain { 1 } else { CIPHER_SECTOR_BYTES };
        FormatCaps {
            writable: flat.writable,
            cluster_bytes: u64::from(storage.block_bytes).max(least),
            fill_bytes: 1,
            compressed: None,
            one_pass: false,
            // Devices and servers may write each zero.
            cheap_zeroes: plain && !storage.device && !storage.remote,
            host_aligned: plain,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.flat().guest_bytes.load(Ordering::Acquire)
    }

    fn warnings(&self) -> &[String] {
        FlatFormat::warnings(self)
    }

    fn encryption(&self) -> Option<&Encryption> {
        FlatFormat::encryption(self)
    }

    fn new_reads_zero(&self) -> bool {
        FlatFormat::encryption(self).is_none()
    }

    fn storage(&self) -> &Arc<dyn Storage> {
        &self.flat().storage
    }

    fn in_flight(&self) -> &InFlight {
        &self.flat().in_flight
    }

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        let flat = self.flat();
        if !self.new_reads_zero() {
            return Ok(flat.data(at, len));
        }
        // Up to the end of the disk, not of the request: one query for each run.
        let end = self.guest_bytes().max(at.0.saturating_add(len));
        let run = flat.runs.run(&*flat.storage, flat.host(at).0, flat.first.saturating_add(end))?;
        let len = run.len.min(len);
        if run.data {
            return Ok(flat.data(at, len));
        }
        Ok(Extent { len, place: Place::Zero { allocated: false } })
    }

    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        self.flat().require_inside(at, len)?;
        Ok(self.flat().data(at, len))
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        Some(self.flat().data(at, len))
    }

    /// Never a reservation: every byte has its place. Callers that use [`Format::resolve_for_io`]
    /// before a write never call this.
    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        self.flat().require_writable()?;
        Ok(None)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        let flat = self.flat();
        flat.require_writable()?;
        if !self.new_reads_zero() {
            return Ok(at.0..at.0);
        }
        let _guard = flat.in_flight.enter();
        flat.require_inside(at, len)?;
        let mode = if may_unmap { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
        flat.storage.write_zeroes(flat.host(at), len, mode)?;
        flat.runs.forget();
        Ok(at.0..at.0 + len)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        let flat = self.flat();
        flat.require_writable()?;
        if self.new_reads_zero() {
            let _guard = flat.in_flight.enter();
            flat.require_inside(at, len)?;
            FlatFormat::discard(self, flat.host(at), len)?;
            flat.runs.forget();
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.flat().storage.sync()
    }

    /// Only a resize writes metadata, and makes it durable itself.
    fn close(&self) -> Result<()> {
        if self.flat().writable { self.flat().storage.sync() } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.flat().require_writable()?;
        FlatFormat::resize(self, guest_bytes)
    }
}
