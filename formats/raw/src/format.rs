//! The map of a raw image.

use std::sync::Arc;

use vdkit_block::{Error, Flat, FlatFormat, HostOffset, Result, Storage, align_up};

use crate::SECTOR_BYTES;

/// The maximum guest disk: the longest file, in whole sectors.
pub(crate) const GUEST_BYTES_MAX: u64 = i64::MAX as u64 & !(SECTOR_BYTES - 1);

/// An open raw image.
#[derive(Debug)]
pub struct RawFormat {
    flat: Flat,
}

impl RawFormat {
    /// Uses a storage as a guest disk.
    ///
    /// # Errors
    /// [`Error::ReadOnly`] if `writable` is set and the storage is not; [`Error::Limit`] for an
    /// invalid length; errors of querying the length.
    pub fn new(storage: Arc<dyn Storage>, writable: bool) -> Result<Self> {
        let guest_bytes = guest_bytes_of(&*storage)?;
        Ok(Self { flat: Flat::new(storage, writable, 0, guest_bytes)? })
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

impl FlatFormat for RawFormat {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn flat(&self) -> &Flat {
        &self.flat
    }

    /// On a block device the bytes may become anything.
    fn discard(&self, at: HostOffset, len: u64) -> Result<()> {
        self.flat.storage.forget(at, len)
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        if guest_bytes > GUEST_BYTES_MAX {
            return Err(Error::invalid_for(
                &self.flat.storage.name(),
                format!(
                    "cannot have {guest_bytes} bytes; a raw disk has at most {GUEST_BYTES_MAX}"
                ),
            ));
        }
        // Rounded up as when opening.
        let rounded = align_up(guest_bytes, SECTOR_BYTES).unwrap_or(GUEST_BYTES_MAX);
        self.flat.set_size(rounded, guest_bytes)
    }
}
