//! SEEK_HOLE and SEEK_DATA.

use vdkit_block::{GuestOffset, Result};
use vdkit_chain::Disk;

/// `whence` for allocated data.
pub const SEEK_DATA: i32 = 3;
/// `whence` for bytes that read as zero by the map. The end of the disk counts as a hole.
pub const SEEK_HOLE: i32 = 4;

/// The first offset at or after `at` of a hole, or of data. `None` past the end, and if no data
/// follows.
pub fn seek(disk: &Disk, at: u64, hole: bool) -> Result<Option<u64>> {
    let end = disk.guest_bytes();
    if at >= end {
        return Ok(None);
    }
    for extent in disk.extents(GuestOffset(at), end - at)? {
        let extent = extent?;
        if extent.place.reads_zero() == hole {
            return Ok(Some(extent.at.0));
        }
    }
    Ok(hole.then_some(end))
}
