//! The fast lane: requests that wait for nothing.
//!
//! A server that has many requests before it wants to know of each whether it can be done at once,
//! from what is in memory (a cached piece of the map, the page cache), or may wait for a disk. The
//! first kind it does where it stands; the second kind is worth another thread.

use std::sync::Arc;

use vdkit_block::{GuestOffset, HostOffset, Place, Result, Storage};

use crate::disk::Disk;

/// What [`Disk::read_ready`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The bytes are in the buffer.
    Bytes,
    /// All of them are zero; the buffer was not touched.
    Zero,
}

/// Where a run of the disk is, as far as memory knows.
enum Known<'a> {
    Zero,
    Data { storage: &'a Arc<dyn Storage>, offset: HostOffset },
}

impl Disk {
    /// [`Disk::read_at`] where that needs no waiting: the map is cached and the bytes are at hand.
    /// Nothing, with anything in `buf`, where it may have to wait; compressed and encrypted bytes
    /// count as such, since they take long.
    pub fn read_ready(&self, buf: &mut [u8], at: GuestOffset) -> Option<Result<Ready>> {
        if let Err(error) = self.check_range(at, buf.len() as u64) {
            return Some(Err(error));
        }
        let _guard = self.enter();
        let mut at = at.0;
        let mut rest = buf;
        let whole = rest.len();
        while !rest.is_empty() {
            let (known, len) = self.known_from(at, rest.len() as u64)?;
            if len as usize == whole && matches!(known, Known::Zero) {
                return Some(Ok(Ready::Zero));
            }
            let (piece, behind) = rest.split_at_mut(len as usize);
            match known {
                Known::Zero => piece.fill(0),
                Known::Data { storage, offset } => match storage.read_ready(piece, offset) {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(error) => return Some(Err(error)),
                },
            }
            rest = behind;
            at += len;
        }
        Some(Ok(Ready::Bytes))
    }

    /// Whether [`Disk::write_unsettled`] would as a rule wait for no disk: the map is cached, the storage
    /// takes bytes promptly, and nothing has to be read to fill a cluster. A guess that costs
    /// little: space that has to be made for the map or the refcounts can still take long.
    pub fn write_ready(&self, at: GuestOffset, len: u64) -> bool {
        let top = self.top();
        if !self.writable() || top.encryption().is_some() || self.check_range(at, len).is_err() {
            return false;
        }
        let _guard = self.enter();
        let mut done = 0;
        while done < len {
            let here = at + done;
            let Some(extent) = top.resolve_cached(here, len - done) else { return false };
            let ready = match extent.place {
                Place::Data { file, exclusive, .. } => {
                    exclusive && top.file(file).writes_promptly()
                }
                Place::Zero { .. } => true,
                Place::Hole => self.layers.len() == 1 || self.covers_units(here, extent.len),
                Place::Packed(_) => false,
            };
            if !ready || extent.len == 0 {
                return false;
            }
            done += extent.len;
        }
        true
    }

    /// Whether a range is made of whole units of the top image, so that a write needs no fill.
    fn covers_units(&self, at: GuestOffset, len: u64) -> bool {
        let unit = self.top().caps().fill_bytes.max(1);
        at.0.is_multiple_of(unit) && len.is_multiple_of(unit)
    }

    /// What memory knows of the run from `at`, at most `len` bytes.
    fn known_from(&self, at: u64, len: u64) -> Option<(Known<'_>, u64)> {
        let mut len = len;
        for layer in &self.layers {
            let format = layer.format();
            let end = format.guest_bytes();
            if at >= end {
                // Shorter than what stands on it; see `extent`.
                return Some((Known::Zero, len));
            }
            let extent = format.resolve_cached(GuestOffset(at), len.min(end - at))?;
            if extent.len == 0 || extent.len > len {
                return None;
            }
            len = extent.len;
            match extent.place {
                Place::Hole => {}
                Place::Zero { .. } => return Some((Known::Zero, len)),
                Place::Data { file, offset, .. } if format.encryption().is_none() => {
                    return Some((Known::Data { storage: format.file(file), offset }, len));
                }
                Place::Data { .. } | Place::Packed(_) => return None,
            }
        }
        Some((Known::Zero, len))
    }
}
