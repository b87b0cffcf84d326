//! Blocks of one file made part of another: as much of a piece as can be.
//!
//! The target's granularity decides. A whole unit (a cluster, or a subcluster) gets space that holds
//! what is shared and nothing else; a part of one can be shared where its space is there already;
//! what is left must be copied, since something else has to be put around it.

use std::ops::Range;

use vdkit_block::{
    CopyMethod, Extent, Fill, GuestOffset, HostOffset, Place, Result, Storage, align_down,
};
use vdkit_chain::Disk;

/// What became of a piece.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Bytes shared.
    pub(crate) bytes: u64,
    /// Ranges of the guest disk that must be copied, in their order.
    pub(crate) left: Vec<Range<u64>>,
    /// The file systems share nothing here: all from there on is left.
    pub(crate) refused: bool,
}

impl Shared {
    fn leave(&mut self, range: Range<u64>) {
        match self.left.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.left.push(range),
        }
    }
}

/// What can be done with a run of the target.
enum Run {
    Shared(u64),
    /// Something else must be put around it.
    Left(u64),
    Refused,
}

/// Makes blocks of `from`, from `offset` on, the target's bytes in a range of the guest disk.
///
/// # Errors
/// What the target and its storage return.
pub(crate) fn share(
    target: &Disk,
    guest: Range<u64>,
    from: &dyn Storage,
    offset: HostOffset,
) -> Result<Shared> {
    let mut shared = Shared::default();
    if target.encryption(0).is_some() {
        // What is shared would be read as ciphertext.
        shared.refused = true;
        shared.leave(guest);
        return Ok(shared);
    }
    let unit = target.top().caps().fill_bytes.max(1);
    let mut at = guest.start;
    while at < guest.end {
        let end = end_of_run(at, guest.end, unit, target.guest_bytes());
        match share_run(target, at..end, from, offset + (at - guest.start))? {
            Run::Shared(bytes) => {
                shared.bytes += bytes;
                at += bytes;
            }
            Run::Left(bytes) => {
                shared.leave(at..at + bytes);
                at += bytes;
            }
            Run::Refused => {
                shared.refused = true;
                shared.leave(at..guest.end);
                break;
            }
        }
    }
    Ok(shared)
}

/// Whole units from `at` on, or the part of one.
fn end_of_run(at: u64, end: u64, unit: u64, disk_end: u64) -> u64 {
    let whole = if end == disk_end { end } else { align_down(end, unit) };
    if at.is_multiple_of(unit) && whole > at { whole } else { end.min((at / unit + 1) * unit) }
}

/// The first part of a run, as far as it is alike.
fn share_run(
    target: &Disk,
    guest: Range<u64>,
    from: &dyn Storage,
    offset: HostOffset,
) -> Result<Run> {
    let (at, len) = (GuestOffset(guest.start), guest.end - guest.start);
    let space = target.top().reserve(at, len)?;
    // After the reservation, which may have to wait for requests in flight.
    let _guard = target.enter();
    let (file, host, run) = match &space {
        Some(space) if space.head == Fill::Ready && space.tail == Fill::Ready => {
            (space.file, space.host_of(at.0), space.write.end - at.0)
        }
        Some(space) => return Ok(Run::Left((space.write.end - at.0).clamp(1, len))),
        None => match target.top().resolve_for_io(at, len)? {
            Extent { len: run, place: Place::Data { file, offset, exclusive: true } } => {
                target.top().note_write(at, run)?;
                (file, offset, run.min(len))
            }
            other => return Ok(Run::Left(other.len.clamp(1, len))),
        },
    };
    let to = target.top().file(file);
    let got = to.copy_from(host, from, offset, run, CopyMethod::Reflink)?;
    match space {
        _ if got == 0 => Ok(Run::Refused),
        // What was shared of an unpublished reservation goes with it.
        Some(_) if got < run => Ok(Run::Refused),
        Some(space) => space.publish().map(|()| Run::Shared(run)),
        None => Ok(Run::Shared(got)),
    }
}
