//! The work of a plan, piece by piece. Merges pieces that one request can share.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{HostOffset, Result, Storage};

use crate::plan::{Planner, Work};

/// Maximum bytes per share request, which bounds the delay of a cancellation.
const BYTES_MAX: u64 = 1 << 30;
/// Maximum pieces per share request.
const PIECES_MAX: usize = 1024;

/// Pieces of the disk, contiguous or not, whose bytes are contiguous in a host file.
#[derive(Debug)]
pub(crate) struct Neighbors {
    /// The pieces, in order.
    pub(crate) parts: Vec<Range<u64>>,
    /// Total bytes of the pieces.
    pub(crate) len: u64,
    /// Bytes between and after them that read as zero.
    pub(crate) zero: u64,
    /// The file.
    pub(crate) storage: Arc<dyn Storage>,
    /// Offset in it.
    pub(crate) offset: HostOffset,
}

impl Neighbors {
    /// A single piece.
    pub(crate) fn one(part: Range<u64>, storage: Arc<dyn Storage>, offset: HostOffset) -> Self {
        let len = part.end - part.start;
        Self { parts: vec![part], len, zero: 0, storage, offset }
    }
}

/// A plan, with a piece that was taken from it too early.
#[derive(Debug)]
pub(crate) struct Queue<'a> {
    pub(crate) planner: Planner<'a>,
    held: Option<Work>,
    /// The turn of the next piece.
    pub(crate) number: u64,
}

impl<'a> Queue<'a> {
    pub(crate) fn new(planner: Planner<'a>) -> Self {
        Self { planner, held: None, number: 0 }
    }

    /// The next piece; see [`Planner::next_work`].
    ///
    /// # Errors
    /// Errors of the source's maps.
    pub(crate) fn next_work(&mut self) -> Result<Option<Work>> {
        match self.held.take() {
            Some(work) => Ok(Some(work)),
            None => self.planner.next_work(),
        }
    }

    /// Merges a piece to share with those that follow it, up to the first piece that is read or not
    /// contiguous. Zeroes between them must need no work.
    ///
    /// # Errors
    /// Errors of the source's maps.
    pub(crate) fn with_neighbors(
        &mut self,
        first: Range<u64>,
        storage: Arc<dyn Storage>,
        offset: HostOffset,
    ) -> Result<Neighbors> {
        let mut all = Neighbors::one(first, storage, offset);
        for _ in 1..PIECES_MAX {
            match self.next_work()? {
                Some(Work::Zero { len, .. }) => all.zero += len,
                Some(Work::Share { at, len, storage, offset })
                    if Arc::ptr_eq(&storage, &all.storage)
                        && offset == all.offset + all.len
                        && all.len + len <= BYTES_MAX =>
                {
                    all.parts.push(at..at + len);
                    all.len += len;
                }
                other => {
                    self.held = other;
                    break;
                }
            }
        }
        Ok(all)
    }
}
