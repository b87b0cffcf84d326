//! SEEK_HOLE and SEEK_DATA.

use fuser::Errno;
use vdkit_block::GuestOffset;
use vdkit_chain::Disk;

use crate::errno::errno_of;

/// Target of a seek. The numbers are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sought {
    /// Allocated data.
    Data,
    /// Bytes that read as zero by the map. The end of the disk counts as a hole.
    Hole,
}

impl Sought {
    /// From `whence`.
    pub fn of(whence: i32) -> Option<Self> {
        match whence {
            3 => Some(Self::Data),
            4 => Some(Self::Hole),
            _ => None,
        }
    }
}

/// The first offset at or after `at` of this kind.
///
/// # Errors
/// ENXIO past the end, and if no data follows.
pub fn seek(disk: &Disk, at: u64, sought: Sought) -> Result<u64, Errno> {
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
        if extent.place.reads_zero() == (sought == Sought::Hole) {
            return Ok(extent.at.0);
        }
    }
    if sought == Sought::Hole { Ok(end) } else { Err(Errno::ENXIO) }
}
