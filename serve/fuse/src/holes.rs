//! SEEK_HOLE and SEEK_DATA.

use vdkit_block::{GuestOffset, Result};
use vdkit_chain::Disk;

/// `whence` for allocated data.
pub const SEEK_DATA: i32 = 3;
/// `whence` for bytes that read as zero by the map. The end of the disk counts as a hole.
pub const SEEK_HOLE: i32 = 4;

/// Bytes of the disk that one step of a search looks at.
const STEP_BYTES: u64 = 1 << 30;

/// What a step of a search has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The offset; `None` past the end, and if no data follows.
    Answer(Option<u64>),
    /// Nothing before this offset.
    Nothing(u64),
}

/// Looks for the first offset at or after `at` of a hole, or of data, in the next [`STEP_BYTES`].
pub fn seek(disk: &Disk, at: u64, hole: bool) -> Result<Found> {
    let end = disk.guest_bytes();
    if at >= end {
        return Ok(Found::Answer(None));
    }
    let step = STEP_BYTES.min(end - at);
    for extent in disk.extents(GuestOffset(at), step)? {
        let extent = extent?;
        if extent.place.reads_zero() == hole {
            return Ok(Found::Answer(Some(extent.at.0)));
        }
    }
    match at + step {
        next if next < end => Ok(Found::Nothing(next)),
        _ => Ok(Found::Answer(hole.then_some(end))),
    }
}
