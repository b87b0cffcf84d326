//! The map of a raw image.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vdkit_block::{
    Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, Place,
    Reservation, Result, Storage, ZeroMode, align_up, require_writable,
};

use crate::SECTOR_BYTES;

/// The maximum guest disk: the longest file, in whole sectors.
pub(crate) const GUEST_BYTES_MAX: u64 = i64::MAX as u64 & !(SECTOR_BYTES - 1);

/// An open raw image.
#[derive(Debug)]
pub struct RawFormat {
    storage: Arc<dyn Storage>,
    writable: bool,
    guest_bytes: AtomicU64,
    in_flight: InFlight,
    /// A known run of data, for scans in steps smaller than the run. Only data is cached: a cached
    /// hole would be wrong after a write, while cached data that became a hole still reads
    /// correctly.
    known_data: Mutex<Range<u64>>,
    /// The storage may have holes: the cheap check need not be repeated.
    has_holes: AtomicBool,
}

impl RawFormat {
    /// Uses a storage as a guest disk.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if `writable` is set and the storage is not; [`Error::Limit`] for an
    /// invalid length; errors of querying the length.
    pub fn new(storage: Arc<dyn Storage>, writable: bool) -> Result<Self> {
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let guest_bytes = guest_bytes_of(&*storage)?;
        Ok(Self {
            storage,
            writable,
            guest_bytes: AtomicU64::new(guest_bytes),
            in_flight: InFlight::default(),
            known_data: Mutex::default(),
            has_holes: AtomicBool::new(false),
        })
    }

    fn data(at: GuestOffset, len: u64) -> Extent {
        let place = Place::Data { file: FileIndex(0), offset: HostOffset(at.0), exclusive: true };
        Extent { len, place }
    }

    /// Bytes of known data from `at`.
    fn known_data_from(&self, at: u64) -> Option<u64> {
        let known = self.known_data.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(&at).then(|| known.end - at)
    }

    fn remember_data(&self, run: Range<u64>) {
        *self.known_data.lock().unwrap_or_else(PoisonError::into_inner) = run;
    }

    fn check_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }
}

/// A size rounded up to whole sectors; `None` above the maximum.
pub(crate) fn whole_sectors(bytes: u64) -> Option<u64> {
    align_up(bytes, SECTOR_BYTES).filter(|bytes| *bytes <= GUEST_BYTES_MAX)
}

/// Bytes of the guest disk in a storage.
pub(crate) fn guest_bytes_of(storage: &dyn Storage) -> Result<u64> {
    let len = storage.len()?;
    whole_sectors(len).ok_or_else(|| Error::limit(storage.name(), "length", len, GUEST_BYTES_MAX))
}

impl Format for RawFormat {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn caps(&self) -> FormatCaps {
        let cluster_bytes = u64::from(self.storage.caps().block_bytes.max(1));
        FormatCaps {
            writable: self.writable,
            cluster_bytes,
            fill_bytes: 1,
            compressed: None,
            one_pass: false,
            cheap_zeroes: true,
            host_aligned: true,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    vdkit_block::accessors!(storage, in_flight);

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        if let Some(known) = self.known_data_from(at.0) {
            return Ok(Self::data(at, known.min(len)));
        }
        let end = self.guest_bytes();
        if !self.has_holes.load(Ordering::Relaxed) {
            if !self.storage.may_have_holes()? {
                self.remember_data(0..end);
                return Ok(Self::data(at, len));
            }
            self.has_holes.store(true, Ordering::Relaxed);
        }
        // Queried up to the end of the disk, not of the request: one query per run.
        let run = self.storage.extent_at(HostOffset(at.0), end.saturating_sub(at.0).max(len))?;
        if run.data {
            self.remember_data(at.0..at.0.saturating_add(run.len));
            return Ok(Self::data(at, run.len.min(len)));
        }
        Ok(Extent { len: run.len.min(len), place: Place::Zero { allocated: false } })
    }

    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        Ok(Self::data(at, len))
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        Some(Self::data(at, len))
    }

    /// Never a reservation: every byte is allocated. Callers that use [`Format::resolve_for_io`]
    /// before a write never call this.
    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        self.check_writable()?;
        Ok(None)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        self.check_writable()?;
        let mode = if may_unmap { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
        self.storage.write_zeroes(HostOffset(at.0), len, mode)?;
        self.remember_data(0..0);
        Ok(at.0..at.0 + len)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        self.storage.forget(HostOffset(at.0), len)?;
        self.remember_data(0..0);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.storage.sync()
    }

    fn close(&self) -> Result<()> {
        if self.writable { self.storage.sync() } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.check_writable()?;
        if guest_bytes > GUEST_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "{}: cannot have {guest_bytes} bytes; a raw disk has at most {GUEST_BYTES_MAX}",
                self.storage.name()
            )));
        }
        if !self.storage.caps().growable {
            let len = self.storage.len()?;
            if guest_bytes > len {
                return Err(Error::Invalid(format!(
                    "{}: has a fixed length of {len} bytes and cannot grow",
                    self.storage.name()
                )));
            }
        }
        if self.storage.caps().growable {
            self.storage.set_len(guest_bytes)?;
        }
        self.remember_data(0..0);
        // Rounded up as when opening; a fixed device keeps its length, of which the guest sees
        // less.
        let rounded = align_up(guest_bytes, SECTOR_BYTES).unwrap_or(GUEST_BYTES_MAX);
        self.guest_bytes.store(rounded, Ordering::Release);
        Ok(())
    }
}
