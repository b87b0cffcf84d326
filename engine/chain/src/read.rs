//! Reads: resolve through the chain, then read the extents.

use std::io::IoSliceMut;
use std::sync::Arc;

use vdkit_block::{Compressed, Error, GuestOffset, ReadOp, Result, Storage, require_within};

use crate::crypto::{self, EncryptedPlace, EncryptedRuns};
use crate::disk::Disk;
use crate::extent::{DiskExtent, DiskPlace, Purpose};
use crate::scratch::Scratch;
use crate::unit_cache::UnitKey;

/// Maximum pieces per batch; bounds the memory of a fragmented request.
const BATCH_MAX: usize = 256;

/// Bytes of several buffers. A sum that overflows is more than any disk has.
pub(crate) fn total(lens: impl Iterator<Item = usize>) -> u64 {
    lens.fold(0, |sum, len| sum.saturating_add(len as u64))
}

/// Reads grouped by storage.
#[derive(Default)]
struct Batch<'d, 'b> {
    groups: Vec<(&'d Arc<dyn Storage>, Vec<ReadOp<'b>>)>,
    pieces: usize,
}

impl<'d, 'b> Batch<'d, 'b> {
    fn push(&mut self, storage: &'d Arc<dyn Storage>, op: ReadOp<'b>) -> Result<()> {
        match self.groups.iter_mut().find(|(known, _)| Arc::ptr_eq(known, storage)) {
            Some((_, ops)) => ops.push(op),
            None => self.groups.push((storage, vec![op])),
        }
        self.pieces += 1;
        if self.pieces >= BATCH_MAX { self.submit() } else { Ok(()) }
    }

    fn submit(&mut self) -> Result<()> {
        self.pieces = 0;
        for (storage, mut ops) in self.groups.drain(..) {
            match ops.as_mut_slice() {
                [op] => storage.read_padded(op.buf, op.offset)?,
                ops => storage.read_batch(ops)?,
            }
        }
        Ok(())
    }
}

impl Disk {
    /// Reads guest bytes at `at` into `buf`.
    ///
    /// # Errors
    /// [`Error::Invalid`] past the end of the disk; damage; errors of storages.
    pub fn read_at(&self, buf: &mut [u8], at: GuestOffset) -> Result<()> {
        let _begun = self.begin();
        self.check_range(at, buf.len() as u64)?;
        self.read_through(buf, at)
    }

    /// Reads into several buffers in turn, which are one range of the disk.
    ///
    /// # Errors
    /// As [`Disk::read_at`]; nothing is read if the range ends past the end of the disk.
    pub fn read_vectored_at(&self, bufs: &mut [IoSliceMut<'_>], at: GuestOffset) -> Result<()> {
        let _begun = self.begin();
        self.check_range(at, total(bufs.iter().map(|buf| buf.len())))?;
        let mut at = at;
        for buf in bufs {
            self.read_through(buf, at)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// As [`Disk::read_at`], with zeroes past the end of the disk, for a request that has begun.
    pub(crate) fn read_through(&self, buf: &mut [u8], at: GuestOffset) -> Result<()> {
        let _flights = self.in_flight();
        let generation = self.units.generation();
        let end = at.0.saturating_add(buf.len() as u64).min(self.guest_bytes());
        let inside = end.saturating_sub(at.0) as usize;
        let (mut rest, outside) = buf.split_at_mut(inside);
        outside.fill(0);
        let mut extents = self.walk(Purpose::Io, at.0, end);
        let mut batch = Batch::default();
        let mut encrypted = EncryptedRuns::default();
        let mut done = 0;
        while let Some(extent) = extents.step()? {
            let from = done;
            done += extent.len as usize;
            let (piece, behind) = rest.split_at_mut(extent.len as usize);
            rest = behind;
            match extent.place {
                DiskPlace::Zero { .. } | DiskPlace::Hole => piece.fill(0),
                DiskPlace::Compressed { storage, compressed } => {
                    self.read_compressed(&extent, storage, &compressed, generation, piece)?;
                }
                DiskPlace::Data { storage, offset }
                    if let Some(encryption) = self.encryption(extent.depth) =>
                {
                    encrypted.begin(&self.sectors);
                    let piece_at = EncryptedPlace { guest: extent.at, host: offset };
                    if piece_at.is_whole(piece.len()) {
                        encrypted.push(encryption, piece_at, from..done);
                        batch.push(storage, ReadOp { offset, buf: piece })?;
                    } else {
                        crypto::read_part(encryption, &**storage, piece_at, piece)?;
                    }
                }
                // Common case: one run, one read, no allocation.
                DiskPlace::Data { storage, offset } if rest.is_empty() && batch.pieces == 0 => {
                    storage.read_padded(piece, offset)?;
                }
                DiskPlace::Data { storage, offset } => {
                    batch.push(storage, ReadOp { offset, buf: piece })?;
                }
            }
        }
        batch.submit()?;
        encrypted.decrypt(buf);
        Ok(())
    }

    /// Reads a part of a compressed unit.
    fn read_compressed(
        &self,
        extent: &DiskExtent<'_>,
        storage: &Arc<dyn Storage>,
        compressed: &Compressed,
        generation: u64,
        piece: &mut [u8],
    ) -> Result<()> {
        let limit = self.limits.compressed_bytes_max;
        let largest = u64::from(compressed.unpacked_len.max(compressed.len));
        require_within(storage.name(), "compressed unit", largest, limit)?;
        let unit_bytes = compressed.unpacked_len as usize;
        let from = compressed.skip as usize;
        if from.checked_add(piece.len()).is_none_or(|end| end > unit_bytes) {
            return Err(Error::corrupt(
                storage.name(),
                compressed.offset.0,
                "compressed unit",
                format!("{unit_bytes} bytes"),
                format!("{} bytes from {from} on", piece.len()),
            ));
        }
        let format = self.layers[extent.depth].format();
        let unpack = |out: &mut [u8]| {
            let mut bytes = Scratch::new(compressed.len as usize);
            storage.read_padded(&mut bytes, compressed.offset)?;
            format.unpack(compressed, &bytes, out)
        };
        // Only the top layer publishes compressed units while the disk is open.
        let top = extent.depth == 0;
        if top && self.units.generation() != generation {
            let mut unit = Scratch::new(unit_bytes);
            unpack(&mut unit)?;
            piece.copy_from_slice(&unit[from..from + piece.len()]);
            return Ok(());
        }
        let key = UnitKey {
            depth: extent.depth,
            file: compressed.file.0,
            offset: compressed.offset.0,
            generation: if top { generation } else { 0 },
        };
        if piece.len() == unit_bytes {
            // Decompress directly into the caller's memory; large sequential reads bypass the
            // cache.
            if self.units.copy_if_present(&key, from, piece, unit_bytes) {
                return Ok(());
            }
            return unpack(piece);
        }
        self.units.copy_or_unpack(key, from, piece, unit_bytes, unpack)
    }
}
