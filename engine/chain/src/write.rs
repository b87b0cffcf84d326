//! Writes: in place if the map allows, else into reserved space that is then published.

use std::io::IoSlice;
use std::ops::Range;

use vdkit_block::{
    CompressedReservation, Error, ErrorKind, FileIndex, Fill, GuestOffset, HostOffset, IoAction,
    Place, Reservation, Result, ZeroMode,
};

use crate::crypto::EncryptedPlace;
use crate::disk::Disk;
use crate::extent::Purpose;
use crate::read::total;
use crate::scratch::Scratch;

/// Maximum size of a write and its fill that is sent as one request; above it, copying the data
/// costs more than the saved system calls.
const COALESCE_BYTES_MAX: u64 = 256 << 10;

/// Bytes per step of long fills or zeroes.
pub(crate) const STEP_BYTES: u64 = 1 << 20;

/// Up to this length zeroes are written as data; above it, by `write_zeroes` of the storage.
const ZERO_BYTES_MAX: u64 = 64 << 10;

/// Maximum retries in a row after a format reports a changed map; beyond it the format is taken to
/// be broken. Each retry means that another thread made progress.
const RETRIES_MAX: u32 = 100_000;

/// What is left of a range before and behind the part that is done.
fn edges(done: &Range<u64>, at: u64, end: u64) -> [Range<u64>; 2] {
    if done.is_empty() {
        return [at..end, end..end];
    }
    [at..done.start.clamp(at, end), done.end.clamp(at, end)..end]
}

/// The data of a write.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Bytes(&'a [u8]),
    /// This many zeroes.
    Zeroes(u64),
}

impl Source<'_> {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeroes(len) => *len,
        }
    }

    pub(crate) fn slice(&self, from: u64, len: u64) -> Self {
        match self {
            Self::Bytes(bytes) => Self::Bytes(&bytes[from as usize..(from + len) as usize]),
            Self::Zeroes(_) => Self::Zeroes(len),
        }
    }

    pub(crate) fn copy_to(&self, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(bytes),
            Self::Zeroes(_) => out.fill(0),
        }
    }
}

impl Disk {
    /// Writes all of `buf` at `at`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Invalid`] past the end of the disk; errors of the format and
    /// its storages. After an error each byte of the range is either old or new.
    pub fn write_at(&self, buf: &[u8], at: GuestOffset) -> Result<()> {
        self.write_unsettled(buf, at)?;
        self.flush_if_write_durable()
    }

    /// Writes several buffers in turn, which are one range of the disk. In cache modes in which a
    /// write is durable on return, one flush serves all of them.
    ///
    /// # Errors
    /// As [`Disk::write_at`]; nothing is written if the range ends past the end of the disk.
    pub fn write_vectored_at(&self, bufs: &[IoSlice<'_>], at: GuestOffset) -> Result<()> {
        self.check_writable()?;
        let begun = self.begin();
        self.check_range(at, total(bufs.iter().map(|buf| buf.len())))?;
        let mut at = at;
        for buf in bufs {
            self.write_unchecked(buf, at)?;
            at += buf.len() as u64;
        }
        drop(begun);
        self.flush_if_write_durable()
    }

    /// As [`Disk::write_at`], but durable only after the next [`Disk::flush`], in every cache mode.
    /// In modes in which each write is durable on return, the caller must flush before it reports
    /// completion. One flush serves all such writes that returned before it.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_unsettled(&self, buf: &[u8], at: GuestOffset) -> Result<()> {
        self.check_writable()?;
        let _begun = self.begin();
        self.check_range(at, buf.len() as u64)?;
        self.write_unchecked(buf, at)
    }

    /// As [`Disk::write_unsettled`], for a range that is known to be on the disk, within a request
    /// that has begun.
    pub(crate) fn write_unchecked(&self, buf: &[u8], at: GuestOffset) -> Result<()> {
        self.write_source(Source::Bytes(buf), at)
    }

    /// Makes `len` bytes at `at` read as zero, by metadata if possible. `may_unmap` allows freeing
    /// their space.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_zeroes(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<()> {
        self.check_writable()?;
        let begun = self.begin();
        self.check_range(at, len)?;
        self.zero_unchecked(at, len, may_unmap)?;
        drop(begun);
        self.flush_if_write_durable()
    }

    /// As [`Disk::write_zeroes`] and not durable yet, for a range that is known to be on the disk,
    /// within a request that has begun.
    pub(crate) fn zero_unchecked(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let done = self.top().zero(at, len, may_unmap)?;
        let [before, behind] = edges(&done, at.0, at.0 + len);
        self.zero_by_writing(before.start, before.end)?;
        self.zero_by_writing(behind.start, behind.end)
    }

    /// As [`Disk::write_zeroes`], but the bytes stay zero after a rebase to any backing image.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn write_zeroes_persistent(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        let begun = self.begin();
        self.check_range(at, len)?;
        if len == 0 {
            return Ok(());
        }
        let done = self.top().zero_persistent(at, len)?;
        for edge in edges(&done, at.0, at.0 + len) {
            self.write_source(Source::Zeroes(edge.end - edge.start), GuestOffset(edge.start))?;
        }
        drop(begun);
        self.flush_if_write_durable()
    }

    /// Drops all data of the top image, so that the disk reads as its backing image. Durable on
    /// return; a crash leaves the image partly emptied.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Unsupported`] if the format cannot; errors of the format.
    pub fn empty(&self) -> Result<()> {
        self.check_writable()?;
        let _begun = self.begin();
        self.top().empty()
    }

    /// Discards `len` bytes at `at`. They then read as zero or as before. Exception: on a raw disk
    /// on a block device that has no other way to free space (such as a thin LVM volume), they are
    /// undefined.
    ///
    /// # Errors
    /// As [`Disk::write_at`].
    pub fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.check_writable()?;
        let begun = self.begin();
        self.check_range(at, len)?;
        if len == 0 {
            return Ok(());
        }
        self.top().discard(at, len)?;
        drop(begun);
        self.flush_if_write_durable()
    }

    /// Writes compressed units for consecutive clusters from `at`. They replace the clusters'
    /// content.
    ///
    /// # Errors
    /// As [`Disk::write_at`]; [`Error::Unsupported`] if the format has no compressed units.
    pub fn write_compressed(&self, at: GuestOffset, units: &[impl AsRef<[u8]>]) -> Result<()> {
        self.check_writable()?;
        let cluster_bytes = self.top().caps().cluster_bytes;
        let lens: Vec<u32> = units
            .iter()
            .map(|unit| u32::try_from(unit.as_ref().len()))
            .collect::<Result<_, _>>()
            .map_err(|_| Error::invalid("a compressed unit passes 4 GiB"))?;
        let begun = self.begin();
        let mut done = 0;
        while done < units.len() {
            let offset = cluster_bytes
                .checked_mul(done as u64)
                .and_then(|bytes| at.checked_add(bytes))
                .ok_or_else(|| Error::invalid_for(&self.name(), "offset overflow"))?;
            let reservation =
                self.top().writes_compressed()?.reserve_compressed(offset, &lens[done..])?;
            let taken = reservation.units.clamp(1, units.len() - done);
            self.fill_compressed(reservation, &units[done..done + taken])?;
            done += taken;
        }
        drop(begun);
        self.flush_if_write_durable()
    }

    fn fill_compressed(
        &self,
        reservation: CompressedReservation<'_>,
        units: &[impl AsRef<[u8]>],
    ) -> Result<()> {
        let len = units.iter().map(|unit| unit.as_ref().len()).sum();
        let storage = self.top().file(reservation.file);
        let moved = if let [unit] = units {
            storage.write_at(unit.as_ref(), reservation.host)
        } else {
            let mut joined = Scratch::new(len);
            let mut rest = &mut joined[..];
            for unit in units {
                let (piece, behind) = rest.split_at_mut(unit.as_ref().len());
                piece.copy_from_slice(unit.as_ref());
                rest = behind;
            }
            storage.write_at(&joined, reservation.host)
        };
        if let Err(error) = moved {
            self.empty_compressed(&reservation, len as u64, &error);
            return Err(error);
        }
        self.publish_compressed(reservation)
    }

    /// Publishes compressed units that the caller wrote. (Publishing them directly on the format
    /// could leave replaced units in the disk's cache.)
    ///
    /// # Errors
    /// Errors of the format.
    pub fn publish_compressed(&self, reservation: CompressedReservation<'_>) -> Result<()> {
        // Must precede the publication: see `unit_cache`.
        self.units.next_generation();
        reservation.publish()
    }

    /// Zeroes without the format's help, skipping what already reads as zero.
    fn zero_by_writing(&self, at: u64, end: u64) -> Result<()> {
        let mut at = at;
        while at < end {
            let run = {
                let _flights = self.in_flight();
                let Some(run) = self.walk(Purpose::Io, at, end).step()? else { break };
                (run.len, run.place.reads_zero())
            };
            let (len, zero) = run;
            if !zero {
                self.write_source(Source::Zeroes(len), GuestOffset(at))?;
            }
            at += len;
        }
        Ok(())
    }

    /// Copies the unit of the byte at `at` from the backing image to the top image, if it is still
    /// there. Guest data stays the same; bytes beyond the end of the disk become zero.
    pub(crate) fn own_byte(&self, at: u64) -> Result<()> {
        let _begun = self.begin();
        let offset = GuestOffset(at);
        if self.top().resolve(offset, 1)?.place != Place::Hole {
            return Ok(());
        }
        let Some(reservation) = self.top().reserve(offset, 1)? else { return Ok(()) };
        // No other thread writes there while it is reserved.
        let mut byte = [0];
        self.read_through(&mut byte, offset)?;
        self.fill_and_publish(reservation, Source::Bytes(&byte), offset, 0)?;
        Ok(())
    }

    fn write_source(&self, source: Source<'_>, at: GuestOffset) -> Result<()> {
        let len = source.len();
        let mut done = 0;
        let mut retries = 0;
        while done < len {
            let (at, left) = (at + done, len - done);
            let mut step = self.write_in_place(source, at, done)?;
            if step == 0
                && let Some(reservation) = self.top().reserve(at, left)?
            {
                step = self.fill_and_publish(reservation, source, at, done)?;
            }
            done += step;
            retries = if step == 0 { retries + 1 } else { 0 };
            if retries > RETRIES_MAX {
                let broken = std::io::Error::other("the map never settles");
                return Err(Error::io(self.name(), IoAction::Write, at.0, left, broken));
            }
            if retries > 10 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Overwrites exclusive bytes and returns their number; 0 if the bytes are not exclusive.
    fn write_in_place(&self, source: Source<'_>, at: GuestOffset, done: u64) -> Result<u64> {
        // Enter before the map lookup and leave after the write, so that the space is not reused
        // for another cluster meanwhile.
        let _flights = self.in_flight();
        let top = self.top();
        let extent = top.resolve_for_io(at, source.len() - done)?;
        let Place::Data { file, offset, exclusive: true } = extent.place else { return Ok(0) };
        top.note_write(at, extent.len)?;
        let storage = top.file(file);
        if let Some(encryption) = top.encryption() {
            let place = EncryptedPlace { guest: at, host: offset };
            let data = source.slice(done, extent.len);
            self.write_encrypted_in_place(encryption, &**storage, place, data)?;
            return Ok(extent.len);
        }
        match source.slice(done, extent.len) {
            Source::Bytes(bytes) => storage.write_at(bytes, offset)?,
            Source::Zeroes(len) if len <= ZERO_BYTES_MAX => {
                let mut zeroes = Scratch::new(len as usize);
                zeroes.fill(0);
                storage.write_at(&zeroes, offset)?;
            }
            Source::Zeroes(len) => storage.write_zeroes(offset, len, ZeroMode::KeepAllocated)?,
        }
        Ok(extent.len)
    }

    /// Writes the data and its fill into reserved space and publishes it. An error drops the
    /// reservation: nothing changes.
    fn fill_and_publish(
        &self,
        reservation: Reservation<'_>,
        source: Source<'_>,
        at: GuestOffset,
        done: u64,
    ) -> Result<u64> {
        let write = reservation.write.clone();
        let written = write.end.saturating_sub(write.start);
        if write.start != at.0 || written == 0 || written > source.len() - done {
            let broken = std::io::Error::other("the format reserved another range");
            return Err(Error::io(self.name(), IoAction::Write, at.0, written, broken));
        }
        let data = source.slice(done, written);
        if let Err(error) = self.fill_reserved(&reservation, data) {
            self.empty_reserved(&reservation, &error);
            return Err(error);
        }
        reservation.publish()?;
        Ok(written)
    }

    /// After a write failed with "no space", discards the bytes that it already wrote. Nothing
    /// refers to them, and closing the image needs the space for the metadata of earlier writes.
    /// Call it before dropping the reservation.
    pub fn empty_reserved(&self, reservation: &Reservation<'_>, error: &Error) {
        let guest = &reservation.guest;
        self.empty_host(reservation.file, reservation.host, guest.end - guest.start, error);
    }

    /// As [`Disk::empty_reserved`], for `len` bytes of compressed units.
    pub fn empty_compressed(
        &self,
        reservation: &CompressedReservation<'_>,
        len: u64,
        error: &Error,
    ) {
        self.empty_host(reservation.file, reservation.host, len, error);
    }

    fn empty_host(&self, file: FileIndex, host: HostOffset, len: u64, error: &Error) {
        if error.kind() == ErrorKind::NoSpace {
            // Report the first error.
            let _ = self.top().file(file).discard(host, len);
        }
    }

    /// Writes the data and its fill into reserved space.
    fn fill_reserved(&self, reservation: &Reservation<'_>, data: Source<'_>) -> Result<()> {
        if let Some(encryption) = self.top().encryption() {
            return self.fill_encrypted(encryption, reservation, data);
        }
        let (guest, write) = (reservation.guest.clone(), reservation.write.clone());
        // The range to write: the data, and each side that is not ready.
        let start = if reservation.head == Fill::Ready { write.start } else { guest.start };
        let end = if reservation.tail == Fill::Ready { write.end } else { guest.end };
        let plain = matches!(data, Source::Bytes(_)) && (start, end) == (write.start, write.end);
        if plain || end - start > COALESCE_BYTES_MAX {
            self.move_fill(reservation, reservation.head, start, write.start)?;
            self.move_data(reservation, data)?;
            return self.move_fill(reservation, reservation.tail, write.end, end);
        }
        let mut piece = Scratch::new((end - start) as usize);
        let (head, rest) = piece.split_at_mut((write.start - start) as usize);
        let (body, tail) = rest.split_at_mut((write.end - write.start) as usize);
        self.fill(reservation.head, head, start)?;
        data.copy_to(body);
        self.fill(reservation.tail, tail, write.end)?;
        self.top().file(reservation.file).write_at(&piece, reservation.host_of(start))
    }

    /// The fill bytes at a guest offset.
    pub(crate) fn fill(&self, fill: Fill, out: &mut [u8], at: u64) -> Result<()> {
        match fill {
            Fill::Copy => self.read_through(out, GuestOffset(at)),
            Fill::Zero | Fill::Ready => {
                out.fill(0);
                Ok(())
            }
        }
    }

    fn move_data(&self, reservation: &Reservation<'_>, data: Source<'_>) -> Result<()> {
        let write = reservation.write.clone();
        match data {
            Source::Bytes(bytes) => {
                let storage = self.top().file(reservation.file);
                storage.write_at(bytes, reservation.host_of(write.start))
            }
            Source::Zeroes(_) => self.move_fill(reservation, Fill::Zero, write.start, write.end),
        }
    }

    /// Writes one side of a large reservation, in steps.
    fn move_fill(
        &self,
        reservation: &Reservation<'_>,
        fill: Fill,
        start: u64,
        end: u64,
    ) -> Result<()> {
        if start >= end || fill == Fill::Ready {
            return Ok(());
        }
        let storage = self.top().file(reservation.file);
        if fill == Fill::Zero && end - start > ZERO_BYTES_MAX {
            let host = reservation.host_of(start);
            return storage.write_zeroes(host, end - start, ZeroMode::KeepAllocated);
        }
        let mut at = start;
        while at < end {
            let len = STEP_BYTES.min(end - at);
            let mut piece = Scratch::new(len as usize);
            self.fill(fill, &mut piece, at)?;
            storage.write_at(&piece, reservation.host_of(at))?;
            at += len;
        }
        Ok(())
    }
}
