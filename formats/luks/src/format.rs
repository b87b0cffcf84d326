//! The map of a raw container: guest byte *n* is byte *payload offset + n*, encrypted.

use std::mem::offset_of;

use vdkit_block::{
    Encryption, Error, Flat, FlatFormat, HostOffset, OpenRequest, Result, Secret, SectorNumbering,
    Storage, require_writable,
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
pub(crate) struct LuksFormat {
    flat: Flat,
    encryption: Encryption,
}

impl LuksFormat {
    /// Opens a container with the first matching key.
    ///
    /// # Errors
    /// As [`LuksSlots::unlock`]; [`Error::ReadOnly`].
    pub(crate) fn open(request: OpenRequest, keys: &[Secret]) -> Result<Self> {
        let OpenRequest { storage, writable, limits, .. } = request;
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let slots = LuksSlots::read(storage.clone(), place_of(&*storage)?, &limits)?;
        let guest_bytes = guest_bytes_of(slots.header(), &*storage)?;
        let cipher = slots.unlock(keys)?;
        Ok(Self {
            flat: Flat::new(storage, writable, slots.header().payload_offset(), guest_bytes)?,
            encryption: Encryption { cipher, numbering: SectorNumbering::Guest },
        })
    }
}

impl FlatFormat for LuksFormat {
    fn name(&self) -> &'static str {
        "luks"
    }

    fn flat(&self) -> &Flat {
        &self.flat
    }

    fn encryption(&self) -> Option<&Encryption> {
        Some(&self.encryption)
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        let flat = &self.flat;
        let end = guest_bytes
            .checked_next_multiple_of(SECTOR_BYTES)
            .and_then(|bytes| Some((bytes, bytes.checked_add(flat.first)?)))
            .filter(|(_, end)| *end <= i64::MAX as u64);
        let Some((bytes, end)) = end else {
            let limit = i64::MAX as u64 - flat.first;
            return Err(Error::limit(flat.storage.name(), "size", guest_bytes, limit));
        };
        flat.set_size(bytes, end)
    }
}
