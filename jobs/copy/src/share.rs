//! Shares blocks of one file with another, with as few requests as possible.
//!
//! The target's granularity decides. A whole unit (a cluster, or a subcluster) gets new space that
//! holds only shared blocks. A part of a unit can be shared if its space is already allocated. The
//! rest must be copied, since it needs a fill.
//!
//! Pieces may be apart on the disk but contiguous in both files. Their spaces are reserved one
//! after the other, cloned by one request, and published together: see [`Batch`].

use std::ops::Range;

use vdkit_block::{
    CopyMethod, CopyOp, Extent, FileIndex, Fill, GuestOffset, HostOffset, Place, Reservation,
    Result, Storage, align_down,
};
use vdkit_chain::Disk;

/// Maximum reservations per request.
const BATCH_SPACES_MAX: usize = 1024;

/// Result of sharing.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Bytes shared.
    pub(crate) bytes: u64,
    /// Guest ranges that must be copied, in order.
    pub(crate) left: Vec<Range<u64>>,
    /// The file system does not support sharing here; the rest is in `left`.
    pub(crate) refused: bool,
}

impl Shared {
    fn leave(&mut self, range: Range<u64>) {
        match self.left.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.left.push(range),
        }
    }
}

/// Shares blocks of `from` at `offset` with a guest range of the target, or lets the kernel copy
/// them.
///
/// # Errors
/// Errors of the target and its storage.
pub(crate) fn share(
    method: CopyMethod,
    target: &Disk,
    guest: Range<u64>,
    from: &dyn Storage,
    offset: HostOffset,
) -> Result<Shared> {
    // Other threads may work on this disk: no reservation may wait for another.
    share_up_to(1, method, target, &[guest], from, offset)
}

/// Shares consecutive blocks of `from` at `offset` with guest ranges of the target, which must be
/// in order. Meanwhile the disk may only be changed by reservations of other ranges.
///
/// # Errors
/// Errors of the target and its storage. Reservations that were not certainly cloned are released.
pub(crate) fn share_all(
    target: &Disk,
    parts: &[Range<u64>],
    from: &dyn Storage,
    offset: HostOffset,
) -> Result<Shared> {
    share_up_to(BATCH_SPACES_MAX, CopyMethod::Reflink, target, parts, from, offset)
}

fn share_up_to(
    most: usize,
    method: CopyMethod,
    target: &Disk,
    parts: &[Range<u64>],
    from: &dyn Storage,
    mut offset: HostOffset,
) -> Result<Shared> {
    // An encrypted image would decrypt shared plaintext.
    let mut shared = Shared { refused: target.encryption(0).is_some(), ..Shared::default() };
    let op = CopyOp { to: HostOffset(0), source: from, from: offset, len: 0, method };
    let mut batch = Batch { target, most, spaces: Vec::new(), file: FileIndex::default(), op };
    for part in parts {
        let mut at = part.start;
        while at < part.end && !shared.refused {
            let run = batch.add(at..part.end, offset, &mut shared)?;
            at += run;
            offset += run;
        }
        if shared.refused {
            shared.leave(at..part.end);
        }
    }
    if !shared.refused {
        batch.clone_all(&mut shared)?;
    }
    Ok(shared)
}

/// Spaces that are contiguous in the target's file, for blocks that are contiguous in the source's.
struct Batch<'t> {
    target: &'t Disk,
    /// Maximum number of spaces.
    most: usize,
    spaces: Vec<(Reservation<'t>, Range<u64>)>,
    /// The target's file.
    file: FileIndex,
    /// Copies into all spaces.
    op: CopyOp<'t>,
}

impl Batch<'_> {
    /// Adds the first homogeneous part of a range, with the blocks at `offset`. Returns its bytes;
    /// 0 if sharing was refused.
    fn add(&mut self, guest: Range<u64>, offset: HostOffset, shared: &mut Shared) -> Result<u64> {
        let (target, at) = (self.target, guest.start);
        let caps = target.top().caps();
        let unit = caps.fill_bytes.max(1);
        let len = end_of_run(at, guest.end, unit, target.guest_bytes()) - at;
        // Two reservations of one cluster would wait for each other.
        let cluster = align_down(at, caps.cluster_bytes.max(1));
        let near = self.spaces.last().is_some_and(|(space, _)| space.guest.end > cluster);
        if (near || self.spaces.len() >= self.most) && !self.clone_all(shared)? {
            return Ok(0);
        }
        let space = target.top().reserve(GuestOffset(at), len)?;
        let Some(space) = space else {
            return if self.clone_all(shared)? {
                self.clone_in_place(at, len, offset, shared)
            } else {
                Ok(0)
            };
        };
        if space.head != Fill::Ready || space.tail != Fill::Ready {
            let run = (space.write.end - at).clamp(1, len);
            drop(space);
            if !self.clone_all(shared)? {
                return Ok(0);
            }
            // It needs a fill.
            shared.leave(at..at + run);
            return Ok(run);
        }
        let (host, run) = (space.host_of(at), space.write.end - at);
        let goes_on = space.file == self.file
            && host == self.op.to + self.op.len
            && offset == self.op.from + self.op.len;
        if !goes_on && !self.clone_all(shared)? {
            return Ok(0);
        }
        if self.spaces.is_empty() {
            (self.file, self.op.to, self.op.from) = (space.file, host, offset);
        }
        self.spaces.push((space, at..at + run));
        self.op.len += run;
        Ok(run)
    }

    /// The same for a range that may be allocated already.
    fn clone_in_place(
        &self,
        at: u64,
        len: u64,
        offset: HostOffset,
        shared: &mut Shared,
    ) -> Result<u64> {
        let top = self.target.top();
        // After the reservation, which may wait for requests in flight.
        let _guard = self.target.enter();
        let (file, host, run) = match top.resolve_for_io(GuestOffset(at), len)? {
            Extent { len: run, place: Place::Data { file, offset, exclusive: true } } => {
                top.note_write(GuestOffset(at), run)?;
                (file, offset, run.min(len))
            }
            other => {
                let run = other.len.clamp(1, len);
                shared.leave(at..at + run);
                return Ok(run);
            }
        };
        let op = CopyOp { to: host, from: offset, len: run, ..self.op };
        let got = top.file(file).copy_from(&op)?;
        shared.refused = got == 0;
        shared.bytes += got;
        Ok(got)
    }

    /// Clones and publishes the batch. Returns whether that succeeded; if not, all of it must be
    /// copied, and its space is released.
    fn clone_all(&mut self, shared: &mut Shared) -> Result<bool> {
        let spaces = std::mem::take(&mut self.spaces);
        let op = CopyOp { len: std::mem::take(&mut self.op.len), ..self.op };
        if spaces.is_empty() {
            return Ok(true);
        }
        let _guard = self.target.enter();
        if self.target.top().file(self.file).copy_from(&op)? < op.len {
            shared.refused = true;
            spaces.iter().for_each(|(_, guest)| shared.leave(guest.clone()));
            return Ok(false);
        }
        for (space, _) in spaces {
            space.publish()?;
        }
        shared.bytes += op.len;
        Ok(true)
    }
}

/// The end of whole units from `at`, or of the partial one.
fn end_of_run(at: u64, end: u64, unit: u64, disk_end: u64) -> u64 {
    let whole = if end == disk_end { end } else { align_down(end, unit) };
    if at.is_multiple_of(unit) && whole > at { whole } else { end.min((at / unit + 1) * unit) }
}

#[cfg(test)]
mod tests;
