//! Resolves guest offsets to host offsets.

use std::sync::atomic::Ordering;

use vdkit_block::bytes::le64;
use vdkit_block::{Error, Extent, FileIndex, HostOffset, Place, Remedy, Result, align_down};

use crate::image::Vhdx;
use crate::layout::{BITMAP_BYTES, BatEntry, MIB, PAGE, PAGE_BYTES, PRESENT, Page, State};

/// Most blocks that one lookup merges.
const BLOCKS_MAX: u32 = 4096;

/// Whether a lookup may read from the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lookup {
    Cached,
    Load,
}

impl Vhdx {
    /// The page of the block allocation table that holds an entry, and the entry's byte in it.
    fn bat_place(&self, index: u64) -> (u64, usize) {
        let at = self.entry_offset(index);
        (at & !(PAGE_BYTES - 1), (at % PAGE_BYTES) as usize)
    }

    pub(crate) fn entry_offset(&self, index: u64) -> u64 {
        self.bat_offset.load(Ordering::Acquire) + index * 8
    }

    fn lookup(&self, index: u64, lookup: Lookup) -> Result<Option<BatEntry>> {
        let (page, at) = self.bat_place(index);
        self.lookup_page(page, lookup, |bytes| BatEntry(le64(&bytes[..], at)))
    }

    /// Calls `of` with a page; `None` if it is not cached and must not be loaded.
    fn lookup_page<R>(
        &self,
        at: u64,
        lookup: Lookup,
        of: impl Fn(&Page) -> R,
    ) -> Result<Option<R>> {
        match lookup {
            Lookup::Cached => Ok(self.pages.with(at, of)),
            Lookup::Load => self.pages.with_loaded(at, || self.read_page(at), of).map(Some),
        }
    }

    fn read_page(&self, at: u64) -> Result<Page> {
        let mut page = Box::new([0; PAGE]);
        self.storage.read_padded(&mut page[..], HostOffset(at))?;
        Ok(page)
    }

    /// Changes a page, in memory.
    pub(crate) fn change_page(&self, at: u64, change: impl FnMut(&mut Page)) -> Result<()> {
        self.pages.change_loaded(at, || self.read_page(at), change)
    }

    pub(crate) fn entry(&self, index: u64) -> Result<BatEntry> {
        Ok(self.lookup(index, Lookup::Load)?.unwrap_or_default())
    }

    pub(crate) fn payload(&self, block: u64) -> Result<BatEntry> {
        self.entry(self.geometry.payload_index(block))
    }

    /// Changes an entry, in memory.
    pub(crate) fn set_entry(&self, index: u64, entry: BatEntry) -> Result<()> {
        let (page, at) = self.bat_place(index);
        debug_assert!(
            self.taken.read().iter().any(|(from, to)| *from <= page && page < *to),
            "entry {index} lies outside of the table's region"
        );
        self.change_page(page, |bytes| {
            bytes[at..at + 8].copy_from_slice(&entry.0.to_le_bytes());
        })
    }

    pub(crate) fn bat_fault(&self, index: u64, entry: BatEntry, expected: &str) -> Error {
        let at = self.entry_offset(index);
        Error::corrupt(
            self.storage.name(),
            at,
            "block allocation table entry",
            format!("{:#x}", entry.0),
            expected,
        )
        .with_remedy(Remedy::REPAIR)
    }

    /// Validates the entry of a payload block, and returns its state.
    pub(crate) fn state_of(&self, block: u64, entry: BatEntry) -> Result<State> {
        let index = self.geometry.payload_index(block);
        let Some(state) = entry.state() else {
            return Err(self.bat_fault(index, entry, "no reserved state [2.5.1.1]"));
        };
        if state == State::PartiallyPresent && !self.geometry.has_parent {
            let expected = "no partial block without a parent [2.5.1.1]";
            return Err(self.bat_fault(index, entry, expected));
        }
        if entry.has_data() {
            let start = block << self.geometry.block_bits;
            let bytes = self.geometry.block_bytes().min(self.guest_len().saturating_sub(start));
            self.check_space(index, entry, bytes)?;
        }
        Ok(state)
    }

    /// Rejects space that overlaps metadata or exceeds the end of the file.
    fn check_space(&self, index: u64, entry: BatEntry, bytes: u64) -> Result<()> {
        if !self.ends_within_file(entry.host(), bytes) {
            return Err(self.bat_fault(index, entry, "a block within the file [2.5.1]"));
        }
        let end = entry.host() + bytes;
        if self.taken.read().iter().any(|(from, to)| entry.host() < *to && *from < end) {
            let expected = "a block outside of headers, log and regions [2.5.1]";
            return Err(self.bat_fault(index, entry, expected));
        }
        Ok(())
    }

    /// Whether a range ends within the file. Other programs may write the last block of a disk only
    /// up to the disk's end.
    pub(crate) fn ends_within_file(&self, host: u64, bytes: u64) -> bool {
        host.saturating_add(bytes) <= self.file_bytes.load(Ordering::Acquire)
    }

    /// Host offset of the sector bitmap of a block's chunk; `None` if it is not cached.
    pub(crate) fn bitmap_host(&self, block: u64, lookup: Lookup) -> Result<Option<u64>> {
        let index = self.geometry.bitmap_index(block);
        let Some(entry) = self.lookup(index, lookup)? else { return Ok(None) };
        if entry.state_bits() != PRESENT || entry.host() < MIB {
            let expected = "a sector bitmap for the partial blocks of its chunk [2.5.1.2]";
            return Err(self.bat_fault(index, entry, expected));
        }
        self.check_space(index, entry, BITMAP_BYTES)?;
        Ok(Some(entry.host()))
    }

    /// The run of equal bits from the sector of `at`, in bytes, up to `end` in the same block. Ends
    /// at the end of a bitmap page.
    fn sectors(
        &self,
        block: u64,
        at: u64,
        end: u64,
        lookup: Lookup,
    ) -> Result<Option<(bool, u64)>> {
        let Some(host) = self.bitmap_host(block, lookup)? else { return Ok(None) };
        let bits = self.geometry.sector_bits;
        let first = self.geometry.bitmap_bit(at);
        let count = ((end - 1) >> bits) - (at >> bits) + 1;
        let page = host + align_down(first / 8, PAGE_BYTES);
        let from = (first % (PAGE_BYTES * 8)) as usize;
        let to = (from as u64 + count).min(PAGE_BYTES * 8) as usize;
        let found = self.lookup_page(page, lookup, |bytes| run_of_bits(&bytes[..], from, to))?;
        Ok(found.map(|(set, run)| {
            let stop = ((at >> bits) + run as u64) << bits;
            (set, stop.min(end) - at)
        }))
    }

    /// The extent at `at`, up to the end of its block or, in a partial block, of a run of sectors.
    /// `None` if it is not cached.
    pub(crate) fn extent_in_block(
        &self,
        at: u64,
        len: u64,
        lookup: Lookup,
    ) -> Result<Option<Extent>> {
        let block = self.geometry.block_of(at);
        let start = block << self.geometry.block_bits;
        let end = (start + self.geometry.block_bytes()).min(at + len);
        let index = self.geometry.payload_index(block);
        let Some(entry) = self.lookup(index, lookup)? else { return Ok(None) };
        let data = Place::Data {
            file: FileIndex(0),
            offset: HostOffset(entry.host() + (at - start)),
            exclusive: true,
        };
        let (len, place) = match self.state_of(block, entry)? {
            State::NotPresent => (end - at, Place::Hole),
            State::Undefined | State::Zero | State::Unmapped => {
                (end - at, Place::Zero { allocated: false })
            }
            State::FullyPresent => (end - at, data),
            State::PartiallyPresent => match self.sectors(block, at, end, lookup)? {
                None => return Ok(None),
                Some((true, run)) => (run, data),
                Some((false, run)) => (run, Place::Hole),
            },
        };
        Ok(Some(Extent { len, place }))
    }

    /// The extent at `at`, merged with those that follow it. `None` if it is not cached.
    pub(crate) fn map(&self, at: u64, len: u64, lookup: Lookup) -> Result<Option<Extent>> {
        let Some(mut run) = self.extent_in_block(at, len, lookup)? else { return Ok(None) };
        for _ in 1..BLOCKS_MAX {
            if run.len >= len {
                break;
            }
            // An uncached or damaged extent ends the run; the next lookup handles it.
            let next = self.extent_in_block(at + run.len, len - run.len, lookup);
            let Ok(Some(next)) = next else { break };
            match run.merge(next) {
                Some(joined) => run = joined,
                None => break,
            }
        }
        Ok(Some(run))
    }
}

/// The value of bit `from`, and the number of bits from there up to `to` with the same value. Bit 0
/// is the lowest bit of byte 0 [2.4].
fn run_of_bits(bytes: &[u8], from: usize, to: usize) -> (bool, usize) {
    let bit = |at: usize| bytes[at / 8] >> (at % 8) & 1 != 0;
    let value = bit(from);
    let whole = if value { 0xff } else { 0 };
    let mut at = from + 1;
    while at < to {
        if at.is_multiple_of(8) && at + 8 <= to && bytes[at / 8] == whole {
            at += 8;
        } else if bit(at) == value {
            at += 1;
        } else {
            break;
        }
    }
    (value, at.min(to) - from)
}

/// Sets or clears bits `from..to`.
pub(crate) fn fill_bits(bytes: &mut [u8], from: usize, to: usize, value: bool) {
    let mut at = from;
    while at < to {
        if at.is_multiple_of(8) && at + 8 <= to {
            bytes[at / 8] = if value { 0xff } else { 0 };
            at += 8;
            continue;
        }
        let mask = 1 << (at % 8);
        if value {
            bytes[at / 8] |= mask
        } else {
            bytes[at / 8] &= !mask
        }
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_bits_end_where_they_change() {
        let mut bytes = [0; 64];
        for (from, to) in [(3, 5), (8, 16), (17, 200), (511, 512)] {
            fill_bits(&mut bytes, from, to, true);
        }
        let mut runs = Vec::new();
        let mut at = 0;
        while at < 512 {
            let (value, len) = run_of_bits(&bytes, at, 512);
            runs.push((value, at, at + len));
            at += len;
        }
        let set: Vec<_> = runs.iter().filter(|r| r.0).map(|r| (r.1, r.2)).collect();
        assert_eq!(set, [(3, 5), (8, 16), (17, 200), (511, 512)]);
        assert_eq!(run_of_bits(&bytes, 20, 25), (true, 5));
        fill_bits(&mut bytes, 0, 512, false);
        assert_eq!(run_of_bits(&bytes, 0, 512), (false, 512));
    }
}
