//! Zeroes, discards and empties by changing only metadata.

use std::ops::Range;

use vdkit_block::{Error, Extent, HostOffset, Place, Result, align_down};

use crate::image::{Meta, Vhdx};
use crate::layout::{BatEntry, PRESENT, State};
use crate::map::Lookup;

/// Blocks to change between two checks of the number of dirty pages: the entries of one page.
const STEP_BLOCKS: u64 = 512;

impl Vhdx {
    /// The blocks that are entirely within a range; the last one of the disk may be short.
    fn whole_blocks(&self, at: u64, len: u64) -> Range<u64> {
        let (bits, block) = (self.geometry.block_bits, self.geometry.block_bytes());
        let end = at + len;
        let end = if end == self.guest_len() {
            end.div_ceil(block)
        } else {
            align_down(end, block) >> bits
        };
        let start = at.div_ceil(block);
        start..end.max(start)
    }

    /// The bytes of blocks, limited to the disk.
    fn bytes_of(&self, blocks: &Range<u64>) -> Range<u64> {
        let bits = self.geometry.block_bits;
        let end = self.guest_len();
        (blocks.start << bits).min(end)..(blocks.end << bits).min(end)
    }

    /// Changes the entries of blocks, a few at a time, once no reservation holds them.
    pub(crate) fn for_blocks(
        &self,
        blocks: &Range<u64>,
        mut change: impl FnMut(&mut Meta, u64, BatEntry) -> Result<()>,
    ) -> Result<()> {
        let mut first = blocks.start;
        while first < blocks.end {
            let last = (first + STEP_BLOCKS).min(blocks.end);
            self.relieve()?;
            let mut meta = self.meta.lock();
            self.check_spoiled(&meta)?;
            let range = first << self.geometry.block_bits..last << self.geometry.block_bits;
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&range));
            for block in first..last {
                let entry = self.payload(block)?;
                change(&mut meta, block, entry)?;
            }
            first = last;
        }
        Ok(())
    }

    /// Replaces a block's entry, and frees its space if it had any.
    pub(crate) fn replace(
        &self,
        meta: &mut Meta,
        block: u64,
        old: BatEntry,
        new: BatEntry,
    ) -> Result<()> {
        let (host, bytes) = (old.host(), self.geometry.block_bytes());
        if old.has_data() {
            // Of a damaged image, no space is freed.
            self.space(meta)?;
        }
        self.set_entry(self.geometry.payload_index(block), new)?;
        if old.has_data() && self.ends_within_file(host, bytes) {
            self.unlink(meta, host, bytes);
        }
        Ok(())
    }

    /// As [`vdkit_block::Format::zero`] for whole blocks; also serves `zero_persistent`, since zero
    /// blocks always hide the parent.
    pub(crate) fn zero_blocks(&self, at: u64, len: u64) -> Result<Range<u64>> {
        let blocks = self.whole_blocks(at, len);
        if blocks.is_empty() {
            return Ok(at..at);
        }
        self.begin_session()?;
        let _guard = self.in_flight.enter();
        self.for_blocks(&blocks, |meta, block, old| {
            if self.state_of(block, old)? == State::Zero {
                return Ok(());
            }
            self.replace(meta, block, old, BatEntry::ZERO)
        })?;
        Ok(self.bytes_of(&blocks))
    }

    /// As [`vdkit_block::Format::discard`].
    pub(crate) fn discard_range(&self, at: u64, len: u64) -> Result<()> {
        self.begin_session()?;
        let _guard = self.in_flight.enter();
        let end = at + len;
        let blocks = if self.fixed { 0..0 } else { self.whole_blocks(at, len) };
        let new = if self.geometry.has_parent { BatEntry::ZERO } else { BatEntry::UNMAPPED };
        self.for_blocks(&blocks, |meta, block, old| {
            if self.state_of(block, old)? == State::NotPresent || !old.has_data() {
                return Ok(());
            }
            self.replace(meta, block, old, new)
        })?;
        if blocks.is_empty() {
            return self.punch(at, end);
        }
        let whole = self.bytes_of(&blocks);
        self.punch(at, whole.start)?;
        self.punch(whole.end, end)
    }

    /// Discards host space of data without changing the map.
    fn punch(&self, mut at: u64, end: u64) -> Result<()> {
        while at < end {
            let found = self.extent_in_block(at, end - at, Lookup::Load)?;
            let Some(Extent { len, place }) = found else { break };
            if let Place::Data { offset, .. } = place {
                self.storage.discard(HostOffset(offset.0), len)?;
            }
            at += len;
        }
        Ok(())
    }

    /// As [`vdkit_block::Overlay::empty`].
    pub(crate) fn empty_all(&self) -> Result<()> {
        if self.fixed {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: emptying a fixed VHDX image",
                "its blocks stay where they are; write zeroes instead",
            ));
        }
        self.begin_session()?;
        let has_parent = self.geometry.has_parent;
        let new = if has_parent { BatEntry::NOT_PRESENT } else { BatEntry::ZERO };
        let blocks = 0..self.geometry.blocks(self.guest_len());
        self.for_blocks(&blocks, |meta, block, old| {
            if old == new { Ok(()) } else { self.replace(meta, block, old, new) }
        })?;
        self.meta.flush(self)?;
        if has_parent {
            self.free_bitmaps(&blocks)?;
        }
        self.meta.flush(self)
    }

    /// Frees the sector bitmaps of blocks that are no longer partial, also on disk.
    pub(crate) fn free_bitmaps(&self, blocks: &Range<u64>) -> Result<()> {
        let chunk = 1 << self.geometry.chunk_bits();
        let (mut block, mut hosts) = (blocks.start, Vec::new());
        while block < blocks.end {
            self.relieve()?;
            let mut meta = self.meta.lock();
            let next = (block / chunk + 1) * chunk;
            let last = next.min(blocks.end);
            let range = block << self.geometry.block_bits..last << self.geometry.block_bits;
            self.meta.wait_until(&mut meta, |meta| !meta.tickets.overlap(&range));
            self.space(&mut meta)?;
            let index = self.geometry.bitmap_index(block);
            let entry = self.entry(index)?;
            let used = (block..last)
                .map(|block| self.payload(block))
                .try_fold(false, |used, entry| entry.map(|entry| used || entry.is_partial()))?;
            if entry.state_bits() == PRESENT && !used {
                self.set_entry(index, BatEntry::NOT_PRESENT)?;
                hosts.push(entry.host());
            }
            drop(meta);
            block = next;
        }
        self.give_bitmaps_back(&mut self.meta.lead(), &hosts)
    }
}
