//! Encrypted layers: decryption of reads, encryption of writes.
//!
//! Encryption works on sectors of 512 bytes. Requests that are not aligned to sectors are widened:
//! a read goes through a scratch buffer; a write in place reads the sector, changes it and writes
//! it back. Reserved space is always written whole, since unwritten space there is noise, not zero.
//!
//! # The lock on sectors
//! Two writes to different bytes of one sector must not undo each other, and a reader must not see
//! a sector with half-written ciphertext. So a write in place to part of a sector holds
//! [`Disk::sectors`](crate::Disk) exclusively; reads and writes of whole sectors hold it shared.

use std::ops::Range;

use parking_lot::{RwLock, RwLockReadGuard};
use vdkit_block::{
    CIPHER_SECTOR_BYTES, Encryption, Fill, GuestOffset, HostOffset, Place, Reservation, Result,
    Storage, align_down,
};

use crate::disk::Disk;
use crate::scratch::Scratch;
use crate::write::{STEP_BYTES, Source};

/// Bytes that are copied and encrypted at a time, to stay in the cache.
const CACHED_BYTES: usize = 64 << 10;

/// Start of an encrypted run, for the guest and on the host. Both have the same offset within their
/// sectors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EncryptedPlace {
    pub(crate) guest: GuestOffset,
    pub(crate) host: HostOffset,
}

impl EncryptedPlace {
    /// Whether `len` bytes from here are whole sectors.
    pub(crate) fn is_whole(&self, len: usize) -> bool {
        (self.host.0 | len as u64).is_multiple_of(CIPHER_SECTOR_BYTES)
    }

    /// This place plus `bytes`.
    fn after(&self, bytes: u64) -> Self {
        Self { guest: self.guest + bytes, host: self.host + bytes }
    }

    /// The start of the sector, and the offset within it.
    fn sector(&self) -> (Self, usize) {
        let before = self.host.0 % CIPHER_SECTOR_BYTES;
        debug_assert_eq!(before, self.guest.0 % CIPHER_SECTOR_BYTES);
        let guest = GuestOffset(self.guest.0 - before);
        (Self { guest, host: HostOffset(self.host.0 - before) }, before as usize)
    }

    fn encrypt(&self, encryption: &Encryption, sectors: &mut [u8]) {
        encryption.encrypt(sectors, self.guest, self.host);
    }

    fn decrypt(&self, encryption: &Encryption, sectors: &mut [u8]) {
        encryption.decrypt(sectors, self.guest, self.host);
    }
}

/// Runs of a read to decrypt after the I/O.
#[derive(Debug, Default)]
pub(crate) struct EncryptedRuns<'a> {
    runs: Vec<(&'a Encryption, EncryptedPlace, Range<usize>)>,
    _shared: Option<RwLockReadGuard<'a, ()>>,
}

impl<'a> EncryptedRuns<'a> {
    /// Takes the sector lock. Call it before reading the first encrypted byte.
    pub(crate) fn begin(&mut self, sectors: &'a RwLock<()>) {
        self._shared.get_or_insert_with(|| sectors.read());
    }

    /// Adds a run of whole sectors, read into `range` of the buffer.
    pub(crate) fn push(
        &mut self,
        encryption: &'a Encryption,
        place: EncryptedPlace,
        range: Range<usize>,
    ) {
        self.runs.push((encryption, place, range));
    }

    /// Decrypts all runs.
    pub(crate) fn decrypt(self, buf: &mut [u8]) {
        for (encryption, place, range) in self.runs {
            place.decrypt(encryption, &mut buf[range]);
        }
    }
}

/// Reads a run that is not aligned to sectors.
pub(crate) fn read_part(
    encryption: &Encryption,
    storage: &dyn Storage,
    place: EncryptedPlace,
    out: &mut [u8],
) -> Result<()> {
    let mut done = 0;
    while done < out.len() {
        let (first, skip) = place.after(done as u64).sector();
        let len = (out.len() - done).min(STEP_BYTES as usize - skip);
        let mut sectors = Scratch::new(whole(skip + len));
        storage.read_padded(&mut sectors, first.host)?;
        first.decrypt(encryption, &mut sectors);
        out[done..done + len].copy_from_slice(&sectors[skip..skip + len]);
        done += len;
    }
    Ok(())
}

/// Rounds up to whole sectors.
fn whole(len: usize) -> usize {
    len.next_multiple_of(CIPHER_SECTOR_BYTES as usize)
}

impl Disk {
    /// Overwrites exclusive bytes of an encrypted image.
    pub(crate) fn write_encrypted_in_place(
        &self,
        encryption: &Encryption,
        storage: &dyn Storage,
        place: EncryptedPlace,
        data: Source<'_>,
    ) -> Result<()> {
        let len = data.len();
        if place.is_whole(len as usize) {
            let _shared = self.sectors.read();
            return write_whole(encryption, storage, place, data, false);
        }
        // A partial sector at each end, whole ones between.
        let (_, skip) = place.sector();
        let head = if skip == 0 { 0 } else { (CIPHER_SECTOR_BYTES - skip as u64).min(len) };
        let middle = align_down(len - head, CIPHER_SECTOR_BYTES);
        let _alone = self.sectors.write();
        for part in [0..head, head..head + middle, head + middle..len] {
            let (place, data) =
                (place.after(part.start), data.slice(part.start, part.end - part.start));
            if place.is_whole(data.len() as usize) {
                write_whole(encryption, storage, place, data, false)?;
            } else {
                change_sector(encryption, storage, place, data)?;
            }
        }
        Ok(())
    }

    /// Writes a whole reservation of an encrypted image: the data and all fills. No fill counts as
    /// already written.
    pub(crate) fn fill_encrypted(
        &self,
        encryption: &Encryption,
        reservation: &Reservation<'_>,
        data: Source<'_>,
    ) -> Result<()> {
        let (guest, write) = (reservation.guest.clone(), reservation.write.clone());
        let storage = self.top().file(reservation.file);
        let mut at = guest.start;
        while at < guest.end {
            let len = STEP_BYTES.min(guest.end - at);
            let end = at + len;
            let mut piece = Scratch::new(whole(len as usize));
            piece[len as usize..].fill(0);
            let part = |from: u64, to: u64| {
                let (from, to) = (from.clamp(at, end), to.clamp(at, end));
                (from, (from - at) as usize..(to - at) as usize)
            };
            let (from, head) = part(guest.start, write.start);
            self.fill(reservation.head, &mut piece[head], from)?;
            let (from, body) = part(write.start, write.end);
            if !body.is_empty() {
                data.slice(from - write.start, body.len() as u64).copy_to(&mut piece[body]);
            }
            let (from, tail) = part(write.end, guest.end);
            self.fill(reservation.tail, &mut piece[tail], from)?;
            let place = EncryptedPlace { guest: GuestOffset(at), host: reservation.host_of(at) };
            place.encrypt(encryption, &mut piece);
            storage.write_at(&piece, place.host)?;
            at = end;
        }
        Ok(())
    }

    /// Writes all bytes of a reservation, encrypting them if the image is encrypted. `bytes` are
    /// those of the guest range `write`; the reservation needs no fill.
    ///
    /// # Errors
    /// Errors of the storage.
    pub fn write_reserved(
        &self,
        reservation: &Reservation<'_>,
        bytes: &[u8],
        at: u64,
    ) -> Result<()> {
        debug_assert!(reservation.head == Fill::Ready && reservation.tail == Fill::Ready);
        let storage = self.top().file(reservation.file);
        let host = reservation.host_of(at);
        match self.top().encryption() {
            None if reservation.untouched => storage.write_new(bytes, host),
            None => storage.write_at(bytes, host),
            Some(encryption) => {
                let place = EncryptedPlace { guest: GuestOffset(at), host };
                let new = reservation.untouched;
                write_whole(encryption, &**storage, place, Source::Bytes(bytes), new)
            }
        }
    }

    /// As [`Disk::write_unsettled`] for an image that is being made: it has no dirty bitmap, and no
    /// data that a partial write would have to keep.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_new_at(&self, bytes: &[u8], at: GuestOffset) -> Result<()> {
        self.check_writable()?;
        let _begun = self.begin();
        let len = bytes.len() as u64;
        self.check_range(at, len)?;
        let flights = self.in_flight();
        let extent = self.top().resolve_for_io(at, len)?;
        if let Place::Data { file, offset, exclusive: true } = extent.place
            && extent.len == len
        {
            let storage = self.top().file(file);
            let place = EncryptedPlace { guest: at, host: offset };
            match self.top().encryption() {
                None => return storage.write_new(bytes, offset),
                Some(encryption) if place.is_whole(bytes.len()) => {
                    let _shared = self.sectors.read();
                    return write_whole(encryption, &**storage, place, Source::Bytes(bytes), true);
                }
                Some(_) => {}
            }
        }
        drop(flights);
        self.write_unchecked(bytes, at)
    }
}

/// Encrypts and writes whole sectors; `new` if nothing was written there before. Zeroes pad a short
/// last sector at the end of the disk.
fn write_whole(
    encryption: &Encryption,
    storage: &dyn Storage,
    place: EncryptedPlace,
    data: Source<'_>,
    new: bool,
) -> Result<()> {
    let mut done = 0;
    while done < data.len() {
        let len = STEP_BYTES.min(data.len() - done);
        let mut piece = Scratch::new(whole(len as usize));
        let place = place.after(done);
        let mut filled = 0;
        // In small parts, which are still in the cache when encrypted.
        for part in piece.chunks_mut(CACHED_BYTES) {
            let (bytes, behind) = part.split_at_mut(part.len().min((len - filled) as usize));
            data.slice(done + filled, bytes.len() as u64).copy_to(bytes);
            behind.fill(0);
            place.after(filled).encrypt(encryption, part);
            filled += part.len() as u64;
        }
        if new {
            storage.write_new(&piece, place.host)?;
        } else {
            storage.write_at(&piece, place.host)?;
        }
        done += len;
    }
    Ok(())
}

/// Read-modify-write within one sector.
fn change_sector(
    encryption: &Encryption,
    storage: &dyn Storage,
    place: EncryptedPlace,
    data: Source<'_>,
) -> Result<()> {
    let (first, skip) = place.sector();
    let mut sector = Scratch::new(CIPHER_SECTOR_BYTES as usize);
    storage.read_padded(&mut sector, first.host)?;
    first.decrypt(encryption, &mut sector);
    data.copy_to(&mut sector[skip..skip + data.len() as usize]);
    first.encrypt(encryption, &mut sector);
    storage.write_at(&sector, first.host)
}
