//! Which space of a file is in use, with one bit per MiB, to find free space and overlaps.
//!
//! New space is handed out, and old space freed, only after all entries of the block allocation
//! table were seen to name space of their own within the file. Otherwise an entry that lies beyond
//! the end of a truncated file would become valid once the file grows, over another block's data.

use vdkit_block::{Error, HostOffset, Result};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::image::{Meta, Vhdx};
use crate::layout::{BITMAP_BYTES, BatEntry, FILE_BYTES_MAX, MIB, PAGE, PRESENT};
use crate::space::Space;

/// Entries of one read of the table.
const STEP_ENTRIES: u64 = 8 << 10;
const PAGE_ENTRIES: usize = PAGE / 8;

/// The used MiB of a file.
pub(crate) struct Used {
    bits: Vec<u64>,
    file_bytes: u64,
    /// End of the last range that begins within the file.
    end: u64,
}

impl Used {
    pub(crate) fn new(file_bytes: u64) -> Self {
        Self { bits: vec![0; Self::words(file_bytes) as usize], file_bytes, end: 0 }
    }

    /// Number of 64-bit words for a file.
    pub(crate) fn words(file_bytes: u64) -> u64 {
        file_bytes.div_ceil(MIB).div_ceil(64)
    }

    /// Marks a range within the file. Returns whether a part of it was marked already.
    pub(crate) fn take(&mut self, from: u64, to: u64) -> bool {
        if from < self.file_bytes {
            self.end = self.end.max(to.min(FILE_BYTES_MAX).next_multiple_of(MIB));
        }
        let last = (self.bits.len() as u64 * 64).min(to.div_ceil(MIB));
        let mut seen = false;
        for bit in from / MIB..last {
            let (word, mask) = ((bit / 64) as usize, 1 << (bit % 64));
            seen |= self.bits[word] & mask != 0;
            self.bits[word] |= mask;
        }
        seen
    }

    /// End of the last used range, in whole MiB.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The first unused range from `at` on, in whole MiB of the file.
    pub(crate) fn next_gap(&self, at: u64) -> Option<(u64, u64)> {
        let is_used = |bit: u64| self.bits[(bit / 64) as usize] >> (bit % 64) & 1 != 0;
        let bits = self.file_bytes.div_ceil(MIB);
        let mut first = at.div_ceil(MIB);
        while first < bits && is_used(first) {
            first += 1;
        }
        let mut last = first;
        while last < bits && !is_used(last) {
            last += 1;
        }
        (first < last).then(|| (first * MIB, last * MIB))
    }
}

impl Vhdx {
    /// The allocator. On first use, reads the block allocation table to find the free space.
    ///
    /// # Errors
    /// [`vdkit_block::Error::Corrupt`] if an entry names space of another structure or beyond the
    /// end of the file; I/O.
    pub(crate) fn space<'m>(&self, meta: &'m mut Meta) -> Result<&'m mut Space> {
        if let Some(damage) = &meta.damage {
            return Err(Error::Corrupt(damage.clone()));
        }
        let space = match meta.space.take() {
            Some(space) => space,
            None => self.survey(meta).inspect_err(|error| {
                if let Error::Corrupt(fault) = error {
                    meta.damage = Some(fault.clone());
                }
            })?,
        };
        Ok(meta.space.insert(space))
    }

    fn survey(&self, meta: &Meta) -> Result<Space> {
        let mut used = Used::new(self.storage.len()?.min(FILE_BYTES_MAX));
        for &(from, to) in self.taken.read().iter() {
            if to > used.file_bytes() {
                let expected = "headers, log and regions within the file [2.1]";
                let found = format!("one up to {to:#x}");
                return Err(Error::corrupt(self.storage.name(), from, "region", found, expected));
            }
            used.take(from, to);
        }
        for freed in meta.reclaim.unlinked().chain(meta.reclaim.released()) {
            used.take(freed.first, freed.end());
        }
        self.each_entry(|index, entry| self.claim(&mut used, index, entry))?;
        Ok(Space::new(&used, self.storage.caps().growable))
    }

    /// Calls `visit` with the index and the value of each entry of the table. `meta` must be locked.
    fn each_entry(&self, mut visit: impl FnMut(u64, BatEntry) -> Result<()>) -> Result<()> {
        let entries = self.geometry.bat_entries(self.guest_len());
        let mut buffer = vec![U64::ZERO; STEP_ENTRIES as usize];
        for first in (0..entries).step_by(buffer.len()) {
            let at = self.entry_offset(first);
            let words = &mut buffer[..STEP_ENTRIES.min(entries - first) as usize];
            self.storage.read_padded(words.as_mut_bytes(), HostOffset(at))?;
            for (page, words) in words.chunks_mut(PAGE_ENTRIES).enumerate() {
                // The file may be older. A changed page stays cached while `meta` is locked.
                self.pages.with(at + (page * PAGE) as u64, |cached| {
                    let bytes = words.as_mut_bytes();
                    bytes.copy_from_slice(&cached[..bytes.len()]);
                });
            }
            for (index, word) in (first..).zip(words.iter()) {
                visit(index, BatEntry(word.get()))?;
            }
        }
        Ok(())
    }

    /// Marks the space of an entry. Fails if it is in use already, or not within the file.
    fn claim(&self, used: &mut Used, index: u64, entry: BatEntry) -> Result<()> {
        let chunk = (1 << self.geometry.chunk_bits()) + 1;
        let bytes = if (index + 1).is_multiple_of(chunk) {
            if !self.geometry.has_parent || entry.state_bits() != PRESENT {
                return Ok(());
            }
            BITMAP_BYTES..BITMAP_BYTES
        } else {
            let start = (index - index / chunk) << self.geometry.block_bits;
            let rest = self.guest_len().saturating_sub(start);
            let Some(state) = entry.state().filter(|_| rest > 0) else {
                // Payload entries beyond the disk, in a partial last chunk, are undefined.
                let expected = "no reserved state [2.5.1.1]";
                return if rest > 0 { Err(self.bat_fault(index, entry, expected)) } else { Ok(()) };
            };
            let keeps_space = state.keeps_space() && entry.host() != 0;
            if !entry.has_data() && !keeps_space {
                return Ok(());
            }
            let bytes = self.geometry.block_bytes();
            rest.min(bytes)..bytes
        };
        let host = entry.host();
        if host.saturating_add(bytes.start) > used.file_bytes() {
            return Err(self.bat_fault(index, entry, "space within the file [2.5.1]"));
        }
        if used.take(host, host.saturating_add(bytes.end)) {
            return Err(self.bat_fault(index, entry, "space that nothing else uses [2.5.1]"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_lie_between_used_ranges_of_the_file() {
        let mut used = Used::new(200 * MIB + 5);
        assert!(!used.take(0, 4 * MIB) && !used.take(70 * MIB, 71 * MIB + 1));
        assert!(used.take(71 * MIB, 72 * MIB), "each MiB is used as a whole");
        assert!(!used.take(300 * MIB, 301 * MIB), "a range beyond the file is ignored");
        let gaps: Vec<_> =
            std::iter::successors(used.next_gap(0), |(_, to)| used.next_gap(*to)).collect();
        assert_eq!(gaps, [(4 * MIB, 70 * MIB), (72 * MIB, 201 * MIB)]);
        assert_eq!(used.end(), 72 * MIB);
        used.take(200 * MIB, 240 * MIB);
        assert_eq!(
            (used.end(), used.next_gap(100 * MIB)),
            (240 * MIB, Some((100 * MIB, 200 * MIB)))
        );
    }
}
