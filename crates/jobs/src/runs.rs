//! A disk's map with the holes of host files told apart from data.
//!
//! A format may map clusters that nobody has written yet (preallocation); the host file then has a
//! hole there, and the bytes need not be read to know that they are zero.

use std::sync::Arc;

use vdkit_block::{GuestOffset, HostOffset, Packed, Result, Storage};
use vdkit_chain::{Disk, DiskPlace, Extents};

/// A run of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run<'a> {
    /// Guest offset of the first byte.
    pub(crate) at: u64,
    /// Bytes; never 0.
    pub(crate) len: u64,
    pub(crate) kind: RunKind<'a>,
}

/// What a run holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RunKind<'a> {
    /// Zeroes, as the map or the host file says.
    Zero,
    /// Bytes of a host file.
    Data { storage: &'a Arc<dyn Storage>, offset: HostOffset },
    /// Compressed.
    Packed { storage: &'a Arc<dyn Storage>, packed: Packed },
}

impl Run<'_> {
    /// Offset behind the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.at + self.len
    }

    /// This run without what lies before `at`, which is within it.
    pub(crate) fn from(self, at: u64) -> Self {
        debug_assert!(self.at <= at && at < self.end());
        let skip = at - self.at;
        let kind = match self.kind {
            RunKind::Data { storage, offset } => RunKind::Data { storage, offset: offset + skip },
            // A unit is at most a few MiB, so the sum stays within u32.
            RunKind::Packed { storage, packed } => RunKind::Packed {
                storage,
                packed: Packed { skip: packed.skip + skip as u32, ..packed },
            },
            RunKind::Zero => RunKind::Zero,
        };
        Self { at, len: self.len - skip, kind }
    }

    pub(crate) fn is_zero(&self) -> bool {
        matches!(self.kind, RunKind::Zero)
    }
}

/// The runs of a disk, in order.
#[derive(Debug)]
pub(crate) struct Runs<'a> {
    extents: Option<Extents<'a>>,
    /// Of the extent found last, what is not given out yet.
    rest: Option<Run<'a>>,
    /// The storage asked last whether it may have holes, and its answer.
    holes: Option<(&'a Arc<dyn Storage>, bool)>,
}

impl<'a> Runs<'a> {
    /// The runs of `len` bytes from `at` on.
    pub(crate) fn new(disk: &'a Disk, at: u64, len: u64) -> Result<Self> {
        let extents = if len == 0 { None } else { Some(disk.extents(GuestOffset(at), len)?) };
        Ok(Self { extents, rest: None, holes: None })
    }

    /// The next run, or nothing at the end.
    pub(crate) fn next_run(&mut self) -> Result<Option<Run<'a>>> {
        let run = match self.rest.take() {
            Some(run) => run,
            None => match self.extents.as_mut().and_then(Iterator::next).transpose()? {
                Some(extent) => Run {
                    at: extent.at.0,
                    len: extent.len,
                    kind: match extent.place {
                        DiskPlace::Zero { .. } | DiskPlace::Hole => RunKind::Zero,
                        DiskPlace::Packed { storage, packed } => {
                            RunKind::Packed { storage, packed }
                        }
                        DiskPlace::Data { storage, offset } => RunKind::Data { storage, offset },
                    },
                },
                None => return Ok(None),
            },
        };
        let RunKind::Data { storage, offset } = run.kind else { return Ok(Some(run)) };
        if !self.may_have_holes(storage)? {
            return Ok(Some(run));
        }
        let answer = storage.extent_at(offset, run.len)?;
        let len = answer.len.clamp(1, run.len);
        if len < run.len {
            self.rest = Some(run.from(run.at + len));
        }
        let kind = if answer.data { run.kind } else { RunKind::Zero };
        Ok(Some(Run { len, kind, ..run }))
    }

    fn may_have_holes(&mut self, storage: &'a Arc<dyn Storage>) -> Result<bool> {
        if let Some((_, answer)) = self.holes.filter(|(asked, _)| Arc::ptr_eq(asked, storage)) {
            return Ok(answer);
        }
        let answer = storage.may_have_holes()?;
        self.holes = Some((storage, answer));
        Ok(answer)
    }
}
