//! SEEK_HOLE and SEEK_DATA.

use std::ops::Deref;
use std::time::{Duration, Instant};

use vdkit_block::{GuestOffset, Result};
use vdkit_chain::Disk;

/// `whence` for allocated data.
pub const SEEK_DATA: i32 = 3;
/// `whence` for bytes that read as zero by the map. The end of the disk counts as a hole.
pub const SEEK_HOLE: i32 = 4;

/// Bytes of the disk that the first step of a search looks at.
const STEP_BYTES: u64 = 1 << 30;
/// A step that took longer is followed by a smaller one, any other by a larger one: a disk of 2^62
/// bytes without data takes some thirty steps.
const STEP_TIME: Duration = Duration::from_millis(10);

/// The first offset at or after `at` of a hole, or of data. `None` past the end, and if no data
/// follows. `hold` gives the disk for one step: jobs, and with them all clients, wait for its end.
pub fn seek<D: Deref<Target = Disk>>(
    hold: impl Fn() -> Result<D>,
    mut at: u64,
    hole: bool,
) -> Result<Option<u64>> {
    let (start, mut step) = (at, STEP_BYTES);
    loop {
        let disk = hold()?;
        let end = disk.guest_bytes();
        if at >= end {
            return Ok(Some(end).filter(|_| hole && start < end));
        }
        let began = Instant::now();
        let len = step.min(end - at);
        for extent in disk.extents(GuestOffset(at), len)? {
            let extent = extent?;
            if extent.place.reads_zero() == hole {
                return Ok(Some(extent.at.0));
            }
        }
        at += len;
        step = match began.elapsed() > STEP_TIME {
            true => (step / 2).max(STEP_BYTES),
            false => step.saturating_mul(2),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use vdkit_testkit::disk_of;

    use super::*;

    #[test]
    fn a_large_disk_takes_few_steps() {
        let disk = disk_of(&vdkit_raw::RawDriver, 1 << 62, &[(5 << 40, &[1])]);
        let steps = Cell::new(0);
        let hold = || {
            steps.set(steps.get() + 1);
            Ok(&disk)
        };
        let data = seek(hold, 0, false).unwrap().unwrap();
        assert!((data..data + (1 << 20)).contains(&(5 << 40)), "{data:#x}");
        assert_eq!(seek(hold, 6 << 40, false).unwrap(), None);
        assert_eq!(seek(hold, 6 << 40, true).unwrap(), Some(6 << 40));
        assert_eq!(seek(hold, 1 << 62, true).unwrap(), None);
        assert!(steps.get() < 1000, "{steps:?}");
    }
}
