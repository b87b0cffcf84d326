//! The non-blocking path: requests that need no disk wait.
//!
//! A server with many queued requests runs those inline that memory can serve (cached map, page
//! cache). Before one that may wait for a disk it lets another thread take over its queue.

use std::sync::Arc;

use vdkit_block::{GuestOffset, HostOffset, Place, Result, Storage};

use crate::disk::Disk;

/// Result of [`Disk::read_ready`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The bytes are in the buffer.
    Bytes,
    /// All bytes are zero; the buffer is untouched.
    Zero,
}

/// Location of a run, from memory alone.
enum Known<'a> {
    Zero,
    Data { storage: &'a Arc<dyn Storage>, offset: HostOffset },
}

impl Disk {
    /// [`Disk::read_at`] if it needs no waiting: the map is cached and the bytes are in memory.
    /// `None`, with `buf` undefined, if it may wait. Compressed and encrypted bytes always return
    /// `None`, since they take long.
    pub fn read_ready(&self, buf: &mut [u8], at: GuestOffset) -> Option<Result<Ready>> {
        let _begun = self.try_begin()?;
        if let Err(error) = self.check_range(at, buf.len() as u64) {
            return Some(Err(error));
        }
        let _flights = self.in_flight();
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

    /// Whether [`Disk::write_unsettled`] would usually not wait for a disk: the map is cached, the
    /// storage buffers writes, and no fill needs a read. A cheap estimate: allocating map or
    /// refcount space can still take long.
    pub fn write_ready(&self, at: GuestOffset, len: u64) -> bool {
        let top = self.top();
        let Some(_begun) = self.try_begin() else { return false };
        if !self.writable() || top.encryption().is_some() || self.check_range(at, len).is_err() {
            return false;
        }
        let _flights = self.in_flight();
        let mut done = 0;
        while done < len {
            let here = at + done;
            let Some(extent) = top.resolve_cached(here, len - done) else { return false };
            let ready = match extent.place {
                Place::Data { file, exclusive, .. } => {
                    exclusive && top.file(file).caps().prompt_writes
                }
                Place::Zero { .. } => true,
                Place::Hole => self.layers.len() == 1 || self.covers_units(here, extent.len),
                Place::Compressed(_) => false,
            };
            if !ready || extent.len == 0 {
                return false;
            }
            done += extent.len;
        }
        true
    }

    /// Whether a range is whole units of the top image, so that a write needs no fill.
    fn covers_units(&self, at: GuestOffset, len: u64) -> bool {
        let unit = self.top().caps().fill_bytes.max(1);
        at.0.is_multiple_of(unit) && len.is_multiple_of(unit)
    }

    /// The cached location of the run at `at`, at most `len` bytes.
    fn known_from(&self, at: u64, len: u64) -> Option<(Known<'_>, u64)> {
        let mut len = len;
        for layer in &self.layers {
            let format = layer.format();
            let end = format.guest_bytes();
            if at >= end {
                // Shorter than its overlay; see `extent`.
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
                Place::Data { .. } | Place::Compressed(_) => return None,
            }
        }
        Some((Known::Zero, len))
    }
}
