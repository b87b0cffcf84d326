//! The map of a raw container: guest byte *n* is byte *payload offset + n*, encrypted.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{
    Encryption, Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight,
    OpenRequest, Place, Reservation, Result, Secret, SectorNumbering, Storage, require_writable,
};

use crate::header::{Header, HeaderPlace, SECTOR_BYTES};
use crate::on_disk::RawHeader;
use crate::slots::LuksSlots;

/// The header of a container is at its start.
pub(crate) fn place_of(storage: &dyn Storage) -> Result<HeaderPlace> {
    Ok(HeaderPlace { offset: HostOffset(0), room: storage.len()? })
}

/// Bytes of a container's guest disk, in whole sectors.
///
/// # Errors
/// [`Error::Corrupt`] if the file ends before its payload; [`Error::Unsupported`] for a detached
/// header.
pub(crate) fn guest_bytes_of(header: &Header, storage: &dyn Storage) -> Result<u64> {
    let (file, payload, len) = (storage.name(), header.payload_offset(), storage.len()?);
    if payload == 0 {
        return Err(Error::unsupported(
            file,
            "a LUKS header apart from its disk",
            "open it with 'cryptsetup open --header' and copy the device",
        ));
    }
    match len.checked_sub(payload) {
        Some(bytes) => Ok(bytes & !(SECTOR_BYTES - 1)),
        None => Err(Error::corrupt(
            file,
            offset_of!(RawHeader, payload_offset) as u64,
            "payload-offset",
            format!("{payload:#x}"),
            format!("at most the file's length, {len:#x}"),
        )),
    }
}

/// An open container.
#[derive(Debug)]
pub struct LuksFormat {
    storage: Arc<dyn Storage>,
    writable: bool,
    payload: u64,
    guest_bytes: AtomicU64,
    encryption: Encryption,
    in_flight: InFlight,
}

impl LuksFormat {
    /// Opens a container with the first matching key.
    ///
    /// # Errors
    /// As [`LuksSlots::unlock`]; [`Error::ReadOnly`].
    pub fn open(request: OpenRequest, keys: &[Secret]) -> Result<Self> {
        let OpenRequest { storage, writable, limits, .. } = request;
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let slots = LuksSlots::read(storage.clone(), place_of(&*storage)?, &limits)?;
        let guest_bytes = guest_bytes_of(slots.header(), &*storage)?;
        let cipher = slots.unlock(keys)?;
        Ok(Self {
            writable,
            payload: slots.header().payload_offset(),
            guest_bytes: AtomicU64::new(guest_bytes),
            encryption: Encryption { cipher, numbering: SectorNumbering::Guest },
            in_flight: InFlight::default(),
            storage,
        })
    }

    fn data(&self, at: GuestOffset, len: u64) -> Extent {
        let offset = HostOffset(self.payload + at.0);
        Extent { len, place: Place::Data { file: FileIndex(0), offset, exclusive: true } }
    }

    fn check_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }
}

impl Format for LuksFormat {
    fn name(&self) -> &'static str {
        "luks"
    }

    fn caps(&self) -> FormatCaps {
        let block_bytes = u64::from(self.storage.caps().block_bytes);
        FormatCaps {
            writable: self.writable,
            cluster_bytes: block_bytes.max(SECTOR_BYTES),
            fill_bytes: 1,
            compressed: None,
            one_pass: false,
            cheap_zeroes: false,
            host_aligned: false,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    fn encryption(&self) -> Option<&Encryption> {
        Some(&self.encryption)
    }

    /// Unwritten space is noise.
    fn new_reads_zero(&self) -> bool {
        false
    }

    vdkit_block::accessors!(storage, in_flight);

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        Ok(self.data(at, len))
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        Some(self.data(at, len))
    }

    /// Never a reservation: every byte is allocated.
    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        self.check_writable()?;
        Ok(None)
    }

    /// Does nothing: there is no zero metadata, so the caller writes zeroes.
    fn zero(&self, at: GuestOffset, _len: u64, _may_unmap: bool) -> Result<Range<u64>> {
        self.check_writable()?;
        Ok(at.0..at.0)
    }

    /// Does nothing: a hole in the file would read as noise.
    fn discard(&self, _at: GuestOffset, _len: u64) -> Result<()> {
        self.check_writable()
    }

    fn flush(&self) -> Result<()> {
        self.storage.sync()
    }

    fn close(&self) -> Result<()> {
        if self.writable { self.storage.sync() } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.check_writable()?;
        let file = self.storage.name();
        let end = guest_bytes
            .checked_next_multiple_of(SECTOR_BYTES)
            .and_then(|bytes| Some((bytes, bytes.checked_add(self.payload)?)))
            .filter(|(_, end)| *end <= i64::MAX as u64);
        let Some((bytes, end)) = end else {
            let limit = i64::MAX as u64 - self.payload;
            return Err(Error::limit(file, "size", guest_bytes, limit));
        };
        if !self.storage.caps().growable && end > self.storage.len()? {
            return Err(Error::Invalid(format!("{file}: has a fixed length and cannot grow")));
        }
        // Concurrent requests must not reach bytes beyond the end of the file.
        let before = self.guest_bytes.fetch_min(bytes, Ordering::AcqRel);
        if self.storage.caps().growable
            && let Err(error) = self.storage.set_len(end)
        {
            self.guest_bytes.store(before, Ordering::Release);
            return Err(error);
        }
        self.guest_bytes.store(bytes, Ordering::Release);
        Ok(())
    }
}
