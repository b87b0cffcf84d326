//! Placement of a file on its device: extents and jumps between them.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;

use crate::sys::{self, FiemapExtent};

/// Flags of an extent. Source: linux/fiemap.h.
mod flag {
    pub(super) const LAST: u32 = 0x1;
    /// No known location: unknown, not allocated yet, compressed, or within metadata.
    pub(super) const NOWHERE: u32 = 0x2 | 0x4 | 0x8 | 0x200;
    pub(super) const SHARED: u32 = 0x2000;
}

/// Placement of a file on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Extents as the file system keeps them.
    pub extents: u64,
    /// Extents that directly follow their predecessor in the file but not on the device: seeks of a
    /// sequential read. A hole in between is no jump.
    pub jumps: u64,
    /// Bytes of all extents.
    pub bytes: u64,
    /// Bytes of extents shared with other files (or snapshots).
    pub shared_bytes: u64,
    /// The file has more extents than were read.
    pub partial: bool,
}

impl Placement {
    /// Queries the file system, for at most `extents_max` extents. `None` if it does not support
    /// the query.
    ///
    /// # Errors
    /// Other errors of the kernel.
    pub fn of(file: &File, extents_max: u64) -> io::Result<Option<Self>> {
        let mut placement = Self::default();
        let mut before: Option<FiemapExtent> = None;
        let mut start = 0;
        while placement.extents < extents_max {
            let map = match sys::fiemap(file.as_fd(), start) {
                Ok(map) => map,
                Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => {
                    return Ok(None);
                }
                Err(error) => return Err(error.into()),
            };
            let found = map.found();
            for extent in found {
                placement.add(before.as_ref(), extent);
                before = Some(*extent);
            }
            let Some(last) = found.last() else { return Ok(Some(placement)) };
            let end = last.logical.saturating_add(last.length);
            if last.flags & flag::LAST != 0 || end <= start {
                return Ok(Some(placement));
            }
            start = end;
        }
        placement.partial = true;
        Ok(Some(placement))
    }

    fn add(&mut self, before: Option<&FiemapExtent>, extent: &FiemapExtent) {
        self.extents += 1;
        self.bytes = self.bytes.saturating_add(extent.length);
        if extent.flags & flag::SHARED != 0 {
            self.shared_bytes = self.shared_bytes.saturating_add(extent.length);
        }
        let Some(before) = before else { return };
        let end = |from: u64| from.checked_add(before.length);
        let known = (before.flags | extent.flags) & flag::NOWHERE == 0;
        let follows = end(before.logical) == Some(extent.logical);
        let elsewhere = end(before.physical) != Some(extent.physical);
        self.jumps += u64::from(known && follows && elsewhere);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::Command;

    use super::*;

    fn extent(logical: u64, physical: u64, length: u64, flags: u32) -> FiemapExtent {
        FiemapExtent { logical, physical, length, flags, ..FiemapExtent::default() }
    }

    #[test]
    fn jumps_are_between_bytes_that_follow_one_another() {
        let count = |extents: &[FiemapExtent]| {
            let mut placement = Placement::default();
            let mut before = None;
            for extent in extents {
                placement.add(before.as_ref(), extent);
                before = Some(*extent);
            }
            placement
        };
        let straight = count(&[extent(0, 100, 10, 0), extent(10, 110, 10, 0)]);
        assert_eq!((straight.extents, straight.jumps, straight.bytes), (2, 0, 20));
        assert_eq!(count(&[extent(0, 100, 10, 0), extent(10, 90, 10, 0)]).jumps, 1);
        // The extent after a hole may lie anywhere.
        assert_eq!(count(&[extent(0, 100, 10, 0), extent(20, 900, 10, 0)]).jumps, 0);
        // Compressed extents have no comparable location.
        assert_eq!(count(&[extent(0, 100, 10, 0x8), extent(10, 500, 10, 0x8)]).jumps, 0);
        assert_eq!(count(&[extent(0, 100, 10, flag::SHARED)]).shared_bytes, 10);
        let far = count(&[extent(u64::MAX - 5, u64::MAX - 5, 10, 0), extent(4, 4, u64::MAX, 0)]);
        assert_eq!((far.jumps, far.bytes), (0, u64::MAX));
    }

    /// filefrag makes the same query.
    #[test]
    fn extents_are_those_that_filefrag_counts() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        let file = File::create_new(&path).unwrap();
        // More extents than fit into one call.
        for i in 0..700u64 {
            file.write_all_at(&[1; 4096], i * 16384).unwrap();
        }
        file.sync_all().unwrap();
        let Some(found) = Placement::of(&file, 10_000).unwrap() else {
            return vdkit_testbase::impossible_here(
                "the file system of /var/tmp reports no extents",
            );
        };
        let said = Command::new("filefrag").arg("-v").arg(&path).output().unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        let rows = said.lines().filter(|line| line.contains("..") && line.contains(':'));
        assert_eq!(found.extents, rows.count() as u64, "{said}");
        assert_eq!((found.bytes, found.jumps, found.partial), (700 * 4096, 0, false));
        let some = Placement::of(&file, 300).unwrap().unwrap();
        assert!(some.partial && some.extents >= 300);
    }
}
