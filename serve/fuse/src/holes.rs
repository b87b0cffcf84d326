//! SEEK_HOLE and SEEK_DATA.

use fuser::Errno;
use vdkit_block::GuestOffset;
use vdkit_chain::Disk;

use crate::errno::errno_of;

/// `whence` for allocated data.
pub const SEEK_DATA: i32 = 3;
/// `whence` for bytes that read as zero by the map. The end of the disk counts as a hole.
pub const SEEK_HOLE: i32 = 4;

/// The first offset at or after `at` of a hole, or of data.
///
/// # Errors
/// ENXIO past the end, and if no data follows.
pub fn seek(disk: &Disk, at: u64, hole: bool) -> Result<u64, Errno> {
    let end = disk.guest_bytes();
    if at >= end {
        return Err(Errno::ENXIO);
    }
    let tell = |error: vdkit_block::Error| {
        tracing::warn!("{error}");
        errno_of(&error)
    };
    for extent in disk.extents(GuestOffset(at), end - at).map_err(tell)? {
        let extent = extent.map_err(tell)?;
        if extent.place.reads_zero() == hole {
            return Ok(extent.at.0);
        }
    }
    if hole { Ok(end) } else { Err(Errno::ENXIO) }
}
