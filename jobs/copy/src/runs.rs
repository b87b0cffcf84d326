//! A disk's map, with holes of host files distinguished from data. See `holes`.

use vdkit_block::{Compressed, GuestOffset, Result};
use vdkit_chain::{Disk, DiskPlace, Extents, TruncationCheck};

use crate::holes::Holes;

/// A run of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Guest offset of the first byte.
    pub at: u64,
    /// Bytes; never 0.
    pub len: u64,
    /// Where its bytes are. A hole of the host file is a [`DiskPlace::Zero`]; a [`DiskPlace::Hole`]
    /// is what no mapped layer holds.
    pub place: DiskPlace<'a>,
    /// The layer that holds it, 0 being the top.
    pub depth: usize,
    /// The host file may have holes unknown to the map.
    hides_holes: bool,
    /// The host's bytes are not the guest's (compressed units excepted).
    encrypted: bool,
}

/// Zeroes that a layer or the host file holds.
const ZERO: DiskPlace<'static> = DiskPlace::Zero { allocated: false };

impl Run<'_> {
    /// A run of zeroes.
    pub fn zeroes(at: u64, len: u64) -> Self {
        Self { at, len, place: ZERO, depth: usize::MAX, hides_holes: false, encrypted: false }
    }

    /// Guest offset behind the last byte.
    pub fn end(&self) -> u64 {
        self.at + self.len
    }

    /// This run from `at` on, which must be within it.
    pub fn from(self, at: u64) -> Self {
        debug_assert!(self.at <= at && at < self.end());
        let skip = at - self.at;
        let place = match self.place {
            DiskPlace::Data { storage, offset } => {
                DiskPlace::Data { storage, offset: offset + skip }
            }
            // A unit is at most a few MiB, so the sum fits in u32.
            DiskPlace::Compressed { storage, compressed } => DiskPlace::Compressed {
                storage,
                compressed: Compressed { skip: compressed.skip + skip as u32, ..compressed },
            },
            zero @ (DiskPlace::Zero { .. } | DiskPlace::Hole) => zero,
        };
        Self { at, len: self.len - skip, place, ..self }
    }

    /// Whether the host's bytes are the guest's.
    pub fn is_plain(&self) -> bool {
        !self.encrypted
    }

    /// Whether the run is known to read as zero.
    pub fn is_zero(&self) -> bool {
        self.place.reads_zero()
    }
}

/// The runs of a disk, in order.
#[derive(Debug)]
pub struct Runs<'a> {
    disk: &'a Disk,
    extents: Option<Extents<'a>>,
    /// The unreturned rest of the last extent.
    rest: Option<Run<'a>>,
    holes: Holes,
    /// `None` if truncated files are no error.
    missing: Option<TruncationCheck>,
}

impl<'a> Runs<'a> {
    /// The runs of `len` bytes from `at`.
    pub fn new(disk: &'a Disk, at: u64, len: u64) -> Result<Self> {
        Self::of_layers(disk, usize::MAX, at, len)
    }

    /// As [`Runs::new`] for the first `layers` images only.
    pub(crate) fn of_layers(disk: &'a Disk, layers: usize, at: u64, len: u64) -> Result<Self> {
        let walk = || disk.extents_of(layers, GuestOffset(at), len);
        let extents = (len > 0).then(walk).transpose()?;
        let missing = Some(TruncationCheck::default());
        Ok(Self { disk, extents, rest: None, holes: Holes::default(), missing })
    }

    /// With `salvage`, truncated files are no error: reads report what is lost.
    pub(crate) fn salvage(self, salvage: bool) -> Self {
        Self { missing: (!salvage).then(TruncationCheck::default), ..self }
    }

    /// The next run; `None` at the end.
    pub fn next_run(&mut self) -> Result<Option<Run<'a>>> {
        let run = match self.rest.take() {
            Some(run) => run,
            None => match self.extents.as_mut().and_then(Iterator::next).transpose()? {
                Some(extent) => {
                    if let Some(missing) = &mut self.missing {
                        missing.refuse(self.disk, &extent)?;
                    }
                    Run {
                        at: extent.at.0,
                        len: extent.len,
                        place: extent.place,
                        depth: extent.depth,
                        hides_holes: Holes::hides_holes(self.disk, extent.depth),
                        encrypted: self.disk.encryption(extent.depth).is_some(),
                    }
                }
                None => return Ok(None),
            },
        };
        let DiskPlace::Data { storage, offset } = run.place else { return Ok(Some(run)) };
        if !run.hides_holes {
            return Ok(Some(run));
        }
        let answer = self.holes.run_at(storage, offset, run.len)?;
        let len = answer.len.clamp(1, run.len);
        if len < run.len {
            self.rest = Some(run.from(run.at + len));
        }
        let place = if answer.data { run.place } else { ZERO };
        Ok(Some(Run { len, place, ..run }))
    }
}
