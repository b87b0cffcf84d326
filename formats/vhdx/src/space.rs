//! Space in the file, in multiples of 1 MiB: what is free, and where the file grows.
//!
//! The format has no list of free space: the allocator finds gaps between blocks by reading the
//! block allocation table before it first hands out or frees space.

use std::collections::BTreeMap;

use vdkit_block::{Error, HostOffset, Result, Storage, ZeroMode};

use crate::layout::{FILE_BYTES_MAX, MIB};
use crate::used::Used;

/// Additional growth of the file, at first and at most. The length must be durable before the map
/// exposes a block beyond the old end, so each growth costs a barrier.
const AHEAD_MIN: u64 = 4 * MIB;
const AHEAD_MAX: u64 = 64 * MIB;
/// Most gaps that are remembered; others stay unused until the image is opened again.
const GAPS_MAX: usize = 1 << 20;
/// Most free runs that a search visits.
const RUNS_MAX: usize = 256;

/// A free run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    bytes: u64,
    /// The run reads as zero.
    zero: bool,
}

/// Allocated space. It reads as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Offset in the file.
    pub(crate) at: u64,
    /// Number of units.
    pub(crate) count: u64,
    /// Never written, so it reads as zero after a crash too.
    pub(crate) fresh: bool,
}

/// The free space of a file.
#[derive(Debug)]
pub(crate) struct Space {
    free: BTreeMap<u64, Run>,
    /// Nothing from here on is in use.
    frontier: u64,
    /// Space after the frontier reads as zero.
    fresh_zero: bool,
    ahead: u64,
}

impl Space {
    /// The space of a file, without these used ranges. A file that cannot grow ends with the last
    /// used one; what follows it there may hold arbitrary bytes.
    pub(crate) fn new(used: &Used, growable: bool) -> Self {
        let frontier = match growable {
            true => used.end().max(used.file_bytes().next_multiple_of(MIB)),
            false => used.end(),
        };
        let gaps = std::iter::successors(used.next_gap(0), |(_, to)| used.next_gap(*to));
        let gaps = gaps.take_while(|(_, to)| *to <= frontier).take(GAPS_MAX);
        let free = gaps.map(|(from, to)| (from, Run { bytes: to - from, zero: false })).collect();
        Self { free, frontier, fresh_zero: growable, ahead: AHEAD_MIN }
    }

    /// Smallest possible end of the file.
    pub(crate) fn end(&self) -> u64 {
        let mut end = self.frontier;
        for (at, run) in self.free.iter().rev() {
            if at + run.bytes != end {
                break;
            }
            end = *at;
        }
        end
    }

    /// Must be called after the file was truncated to `end`.
    pub(crate) fn cut(&mut self, end: u64) {
        self.free.split_off(&end);
        self.frontier = end;
    }

    /// Allocates up to `count` units of `unit` bytes each, growing the file if needed.
    ///
    /// # Errors
    /// [`Error::NoSpace`] on a device; I/O.
    pub(crate) fn take(&mut self, storage: &dyn Storage, unit: u64, count: u64) -> Result<Taken> {
        let fits = self.free.iter().take(RUNS_MAX).find(|(_, run)| run.bytes >= unit);
        if let Some((&at, &run)) = fits {
            let count = (run.bytes / unit).min(count);
            self.take_from(storage, at, run, count * unit)?;
            return Ok(Taken { at, count, fresh: false });
        }
        let at = self.frontier;
        let bytes = unit.saturating_mul(count);
        let end = at.checked_add(bytes).filter(|end| *end <= FILE_BYTES_MAX);
        let Some(end) = end else { return Err(no_space(storage, bytes)) };
        let len = storage.len()?;
        if end > len {
            if !storage.caps().growable {
                let room = len.saturating_sub(at) / unit;
                if room == 0 {
                    return Err(no_space(storage, unit));
                }
                return self.take(storage, unit, room);
            }
            storage.set_len(end + self.ahead)?;
            self.ahead = (2 * self.ahead).min(AHEAD_MAX);
        }
        if !self.fresh_zero {
            storage.write_zeroes(HostOffset(at), bytes, ZeroMode::MayUnmap)?;
        }
        self.frontier = end;
        Ok(Taken { at, count, fresh: self.fresh_zero })
    }

    /// Allocates the first free run of `bytes` bytes that ends at or below `limit`; it reads as
    /// zero.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn take_below(
        &mut self,
        storage: &dyn Storage,
        bytes: u64,
        limit: u64,
    ) -> Result<Option<u64>> {
        let fits = |(at, run): &(&u64, &Run)| run.bytes >= bytes && **at + bytes <= limit;
        let Some((&at, &run)) = self.free.range(..limit).find(fits) else { return Ok(None) };
        self.take_from(storage, at, run, bytes)?;
        Ok(Some(at))
    }

    /// Takes the first `bytes` bytes of a free run, and makes them read as zero.
    fn take_from(&mut self, storage: &dyn Storage, at: u64, run: Run, bytes: u64) -> Result<()> {
        if !run.zero {
            storage.write_zeroes(HostOffset(at), bytes, ZeroMode::MayUnmap)?;
        }
        self.free.remove(&at);
        if run.bytes > bytes {
            self.free.insert(at + bytes, Run { bytes: run.bytes - bytes, ..run });
        }
        Ok(())
    }

    /// Frees space. Frees none if some is free already: in a damaged image, two entries may have
    /// named one block.
    pub(crate) fn give(&mut self, at: u64, bytes: u64, zero: bool) {
        let before = self.free.range(..at + bytes).next_back();
        if before.is_some_and(|(start, run)| start + run.bytes > at) {
            return;
        }
        let (mut at, mut bytes) = (at, bytes);
        if let Some((before, run)) = self.free.range(..at).next_back()
            && before + run.bytes == at
            && run.zero == zero
        {
            (at, bytes) = (*before, run.bytes + bytes);
        }
        let end = at + bytes;
        if let Some(run) = self.free.get(&end).copied()
            && run.zero == zero
        {
            self.free.remove(&end);
            bytes += run.bytes;
        }
        self.free.insert(at, Run { bytes, zero });
    }
}

fn no_space(storage: &dyn Storage, bytes: u64) -> Error {
    Error::no_space(storage.name(), format!("{bytes} bytes for blocks of the image"))
}

#[cfg(test)]
mod tests {
    use vdkit_block::StorageExt;
    use vdkit_storage::MemoryStorage;

    use super::*;

    /// The space of a file of so many MiB, without these used ranges.
    fn of(mib: u64, ranges: &[(u64, u64)], growable: bool) -> Space {
        let mut used = Used::new(mib * MIB);
        for (from, to) in ranges {
            used.take(from * MIB, to * MIB);
        }
        Space::new(&used, growable)
    }

    fn take(space: &mut Space, storage: &MemoryStorage, unit: u64, count: u64) -> (u64, u64) {
        let taken = space.take(storage, unit, count).unwrap();
        (taken.at, taken.count)
    }

    #[test]
    fn gaps_are_used_first_and_read_as_zero() {
        let storage = MemoryStorage::with_len("m", 10 * MIB);
        storage.write_at(&[1; 4096], HostOffset(5 * MIB)).unwrap();
        let mut space = of(10, &[(0, 4), (6, 8), (7, 8)], true);
        assert_eq!(space.end(), 8 * MIB);
        assert_eq!(take(&mut space, &storage, 2 * MIB, 3), (4 * MIB, 1));
        let mut bytes = [9; 4096];
        storage.read_at(&mut bytes, HostOffset(5 * MIB)).unwrap();
        assert_eq!(bytes, [0; 4096]);
        assert_eq!(take(&mut space, &storage, 2 * MIB, 3), (8 * MIB, 1));
        assert_eq!(take(&mut space, &storage, 2 * MIB, 3), (10 * MIB, 3));
        assert!(storage.len().unwrap() >= 16 * MIB);
        space.give(10 * MIB, 2 * MIB, true);
        space.give(14 * MIB, 2 * MIB, true);
        assert_eq!(space.end(), 14 * MIB);
        space.give(12 * MIB, 2 * MIB, true);
        assert_eq!(space.end(), 10 * MIB);
        assert_eq!(take(&mut space, &storage, MIB, 9), (10 * MIB, 6));
    }

    #[test]
    fn a_block_that_is_freed_twice_is_handed_out_once() {
        let storage = MemoryStorage::with_len("m", 10 * MIB);
        let mut space = of(10, &[(0, 10)], true);
        space.give(2 * MIB, 2 * MIB, true);
        for (at, bytes) in [(2, 2), (2, 1), (3, 1), (1, 2), (3, 2), (1, 4)] {
            space.give(at * MIB, bytes * MIB, false);
        }
        assert_eq!(take(&mut space, &storage, 2 * MIB, 1), (2 * MIB, 1));
        assert_eq!(take(&mut space, &storage, MIB, 1), (10 * MIB, 1));
    }

    #[test]
    fn a_device_has_an_end_and_old_bytes() {
        let storage = MemoryStorage::with_len("m", 6 * MIB).fixed_len();
        storage.write_at(&[1; 4096], HostOffset(4 * MIB)).unwrap();
        let mut space = of(6, &[(0, 4)], false);
        assert_eq!(take(&mut space, &storage, MIB, 9), (4 * MIB, 2));
        let mut bytes = [9; 4096];
        storage.read_at(&mut bytes, HostOffset(4 * MIB)).unwrap();
        assert_eq!(bytes, [0; 4096]);
        assert!(matches!(space.take(&storage, MIB, 1), Err(Error::NoSpace { .. })));
    }
}
