//! The flattened map: locations of the disk's bytes through the whole chain.

use std::sync::Arc;

use vdkit_block::{Compressed, Error, GuestOffset, HostOffset, IoAction, Place, Result, Storage};

use crate::disk::{Gates, Layer, enter_all};

/// A run of the disk at one location.
#[derive(Clone, Copy, Debug)]
pub struct DiskExtent<'a> {
    /// Guest offset of the first byte.
    pub at: GuestOffset,
    /// Bytes; never 0.
    pub len: u64,
    /// The layer that holds the bytes, 0 being the top. For a [`DiskPlace::Hole`]: the number of
    /// layers searched.
    pub depth: usize,
    /// The location.
    pub place: DiskPlace<'a>,
}

/// Location of bytes of a disk.
#[derive(Clone, Copy, Debug)]
pub enum DiskPlace<'a> {
    /// Uncompressed bytes, contiguous in a host file. Past the end of that file they are zero.
    Data {
        /// The storage.
        storage: &'a Arc<dyn Storage>,
        /// Host offset of the first byte.
        offset: HostOffset,
    },
    /// Reads as zero: the layer at `depth` says so, or is shorter than its overlay.
    Zero {
        /// Host space is allocated nevertheless.
        allocated: bool,
    },
    /// No searched layer holds it. Reads as zero if all layers were searched.
    Hole,
    /// Compressed; [`crate::Disk::read_at`] decompresses it.
    Compressed {
        /// The storage.
        storage: &'a Arc<dyn Storage>,
        /// Location and codec. The extent may begin within the unit ([`Compressed::skip`]).
        compressed: Compressed,
    },
}

impl DiskPlace<'_> {
    /// Whether the map alone shows that the bytes are zero (holes of the whole chain included).
    pub fn reads_zero(&self) -> bool {
        matches!(self, Self::Zero { .. } | Self::Hole)
    }
}

impl<'a> DiskExtent<'a> {
    /// Guest offset of the end.
    pub fn end(&self) -> GuestOffset {
        self.at + self.len
    }

    /// Merges the extents if `next` directly follows in the same layer, both for the guest and on
    /// the host.
    pub fn merge(self, next: DiskExtent<'a>) -> Option<DiskExtent<'a>> {
        if self.depth != next.depth || self.end() != next.at {
            return None;
        }
        let joined = match (&self.place, &next.place) {
            (
                DiskPlace::Data { storage: a, offset },
                DiskPlace::Data { storage: b, offset: next_offset },
            ) => Arc::ptr_eq(a, b) && offset.checked_add(self.len) == Some(*next_offset),
            (DiskPlace::Zero { allocated: a }, DiskPlace::Zero { allocated: b }) => a == b,
            (DiskPlace::Hole, DiskPlace::Hole) => true,
            _ => false,
        };
        joined.then_some(DiskExtent { len: self.len + next.len, ..self })
    }
}

/// Purpose of a map lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Mapping: holes of raw files are distinguished from data.
    Map,
    /// I/O; see [`vdkit_block::Format::resolve_for_io`].
    Io,
}

/// Number of layers whose holes are stored inline.
const INLINE: usize = 8;

/// Walks a range through the layers. If a layer has a hole, the layers beneath are searched for its
/// whole length before that layer is searched again.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    layers: &'a [Layer],
    purpose: Purpose,
    at: u64,
    end: u64,
    /// Number of layers, from the top, with a hole at `at`.
    holes: usize,
    /// Ends of those holes; a deeper hole never ends later.
    inline: [u64; INLINE],
    more: Vec<u64>,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(layers: &'a [Layer], purpose: Purpose, at: u64, end: u64) -> Self {
        Self { layers, purpose, at, end, holes: 0, inline: [0; INLINE], more: Vec::new() }
    }

    fn hole_end(&self, level: usize) -> u64 {
        if level < INLINE { self.inline[level] } else { self.more[level - INLINE] }
    }

    fn push_hole(&mut self, end: u64) {
        if self.holes < INLINE {
            self.inline[self.holes] = end;
        } else {
            self.more.truncate(self.holes - INLINE);
            self.more.push(end);
        }
        self.holes += 1;
    }

    /// The next run; `None` at the end of the range.
    pub(crate) fn step(&mut self) -> Result<Option<DiskExtent<'a>>> {
        if self.at >= self.end {
            return Ok(None);
        }
        while self.holes > 0 && self.hole_end(self.holes - 1) <= self.at {
            self.holes -= 1;
        }
        loop {
            let depth = self.holes;
            let end = if depth == 0 { self.end } else { self.hole_end(depth - 1) };
            let Some(layer) = self.layers.get(depth) else {
                return Ok(Some(self.emit(end - self.at, depth, DiskPlace::Hole)));
            };
            let format = layer.format();
            let layer_end = format.guest_bytes().min(end);
            if self.at >= layer_end {
                // The backing image is shorter than its overlay. Reads as zero here: deeper layers
                // must not show through.
                let zero = DiskPlace::Zero { allocated: false };
                return Ok(Some(self.emit(end - self.at, depth, zero)));
            }
            let (at, len) = (GuestOffset(self.at), layer_end - self.at);
            let extent = match self.purpose {
                Purpose::Map => format.resolve(at, len)?,
                Purpose::Io => format.resolve_for_io(at, len)?,
            };
            if extent.len == 0 || extent.len > len {
                // A bug of the format, which would otherwise cause an endless loop or an access
                // beyond the request.
                return Err(Error::io(
                    format.storage().name(),
                    IoAction::Map,
                    self.at,
                    len,
                    std::io::Error::other(format!("the map answered {} bytes", extent.len)),
                ));
            }
            let place = match extent.place {
                Place::Hole => {
                    self.push_hole(self.at + extent.len);
                    continue;
                }
                Place::Zero { allocated } => DiskPlace::Zero { allocated },
                Place::Data { file, offset, .. } => {
                    DiskPlace::Data { storage: format.file(file), offset }
                }
                Place::Compressed(compressed) => {
                    DiskPlace::Compressed { storage: format.file(compressed.file), compressed }
                }
            };
            return Ok(Some(self.emit(extent.len, depth, place)));
        }
    }

    pub(crate) fn stop(&mut self) {
        self.at = self.end;
    }

    fn emit(&mut self, len: u64, depth: usize, place: DiskPlace<'a>) -> DiskExtent<'a> {
        let extent = DiskExtent { at: GuestOffset(self.at), len, depth, place };
        self.at += len;
        extent
    }
}

/// The extents of a range, in order, neighbors merged; see [`crate::Disk::extents`].
///
/// Ends after the first error, which follows the extents found before it.
#[derive(Debug)]
pub struct Extents<'a> {
    cursor: Cursor<'a>,
    /// Each step of the iterator is a request of its own.
    gates: Gates<'a>,
    ahead: Option<DiskExtent<'a>>,
    error: Option<Error>,
}

impl<'a> Extents<'a> {
    pub(crate) fn new(cursor: Cursor<'a>, gates: Gates<'a>) -> Self {
        Self { cursor, gates, ahead: None, error: None }
    }

    /// The next extent; `None` at the end of the range.
    pub(crate) fn step(&mut self) -> Result<Option<DiskExtent<'a>>> {
        self.step_within(u32::MAX)
    }

    /// As `step`, merging at most `answers` runs: the next extent may then continue this one.
    pub(crate) fn step_within(&mut self, answers: u32) -> Result<Option<DiskExtent<'a>>> {
        let mut run = match self.ahead.take() {
            Some(run) => run,
            None => match self.advance()? {
                Some(run) => run,
                None => return Ok(None),
            },
        };
        for _ in 1..answers {
            match self.advance() {
                Ok(Some(next)) => match run.merge(next) {
                    Some(joined) => run = joined,
                    None => {
                        self.ahead = Some(next);
                        break;
                    }
                },
                Ok(None) => break,
                Err(error) => {
                    self.error = Some(error);
                    break;
                }
            }
        }
        Ok(Some(run))
    }

    /// The next unmerged run. An error ends the walk.
    fn advance(&mut self) -> Result<Option<DiskExtent<'a>>> {
        if let Some(error) = self.error.take() {
            self.cursor.stop();
            return Err(error);
        }
        self.cursor.step()
    }
}

impl<'a> Iterator for Extents<'a> {
    type Item = Result<DiskExtent<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let _begun = enter_all(self.gates);
        let step = self.step();
        if step.is_err() {
            self.cursor.stop();
        }
        step.transpose()
    }
}
