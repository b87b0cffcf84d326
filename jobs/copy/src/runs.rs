//! A disk's map, with holes of host files distinguished from data. See `holes`.

use std::sync::Arc;

use vdkit_block::{Compressed, GuestOffset, HostOffset, Result, Storage};
use vdkit_chain::{Disk, DiskPlace, Extents, TruncationCheck};

use crate::holes::Holes;

/// A run of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Guest offset of the first byte.
    pub at: u64,
    /// Bytes; never 0.
    pub len: u64,
    /// What the run holds.
    pub kind: RunKind<'a>,
    /// The layer that holds it, 0 being the top.
    pub depth: usize,
    /// No mapped layer holds it.
    pub absent: bool,
    /// The host file may have holes unknown to the map.
    hides_holes: bool,
    /// The host's bytes are not the guest's (compressed units excepted).
    encrypted: bool,
}

/// Content of a run.
#[derive(Clone, Copy, Debug)]
pub enum RunKind<'a> {
    /// Zeroes, by the map or the host file.
    Zero,
    /// Bytes of a host file.
    Data {
        /// The host file.
        storage: &'a Arc<dyn Storage>,
        /// Offset of the first byte in it.
        offset: HostOffset,
    },
    /// A part of a compressed unit.
    Compressed {
        /// The host file.
        storage: &'a Arc<dyn Storage>,
        /// The unit, and where in it the run begins.
        compressed: Compressed,
    },
}

impl Run<'_> {
    /// A run of zeroes.
    pub fn zeroes(at: u64, len: u64) -> Self {
        let (kind, depth) = (RunKind::Zero, usize::MAX);
        Self { at, len, kind, depth, absent: false, hides_holes: false, encrypted: false }
    }

    /// Guest offset behind the last byte.
    pub fn end(&self) -> u64 {
        self.at + self.len
    }

    /// This run from `at` on, which must be within it.
    pub fn from(self, at: u64) -> Self {
        debug_assert!(self.at <= at && at < self.end());
        let skip = at - self.at;
        let kind = match self.kind {
            RunKind::Data { storage, offset } => RunKind::Data { storage, offset: offset + skip },
            // A unit is at most a few MiB, so the sum fits in u32.
            RunKind::Compressed { storage, compressed } => RunKind::Compressed {
                storage,
                compressed: Compressed { skip: compressed.skip + skip as u32, ..compressed },
            },
            RunKind::Zero => RunKind::Zero,
        };
        Self { at, len: self.len - skip, kind, ..self }
    }

    /// Whether the host's bytes are the guest's.
    pub fn is_plain(&self) -> bool {
        !self.encrypted
    }

    /// Whether the run is known to read as zero.
    pub fn is_zero(&self) -> bool {
        matches!(self.kind, RunKind::Zero)
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
                        depth: extent.depth,
                        absent: matches!(extent.place, DiskPlace::Hole),
                        hides_holes: Holes::hides_holes(self.disk, extent.depth),
                        encrypted: self.disk.encryption(extent.depth).is_some(),
                        kind: match extent.place {
                            DiskPlace::Zero { .. } | DiskPlace::Hole => RunKind::Zero,
                            DiskPlace::Compressed { storage, compressed } => {
                                RunKind::Compressed { storage, compressed }
                            }
                            DiskPlace::Data { storage, offset } => {
                                RunKind::Data { storage, offset }
                            }
                        },
                    }
                }
                None => return Ok(None),
            },
        };
        let RunKind::Data { storage, offset } = run.kind else { return Ok(Some(run)) };
        if !run.hides_holes {
            return Ok(Some(run));
        }
        let answer = self.holes.run_at(storage, offset, run.len)?;
        let len = answer.len.clamp(1, run.len);
        if len < run.len {
            self.rest = Some(run.from(run.at + len));
        }
        let kind = if answer.data { run.kind } else { RunKind::Zero };
        Ok(Some(Run { len, kind, ..run }))
    }
}
