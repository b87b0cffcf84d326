//! SEEK_HOLE and SEEK_DATA.

use fuser::Errno;
use vdkit_block::GuestOffset;
use vdkit_chain::Disk;

use crate::errno::errno_of;

/// What is looked for. The numbers are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sought {
    /// Bytes that somebody wrote.
    Data,
    /// Bytes of which the map says that they are zero. The end of the disk counts as one.
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

/// The first place at or behind `at` that is of the kind.
///
/// # Errors
/// ENXIO past the end, and where no data follows.
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
