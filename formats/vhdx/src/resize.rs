//! Resizes the disk.
//!
//! New entries are durable before the size that exposes them. A smaller size is durable before the
//! entries beyond it are removed. The size is in the metadata region and changes through the log. A
//! table that outgrows its region moves: its copy is complete and durable before one log entry
//! changes both region tables. No request is inside [`vdkit_block::Gate`] meanwhile.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{Error, HostOffset, Result, ZeroMode, in_steps};
use vdkit_meta::{Freed, Metadata, MutexGuard};

use crate::image::{Lead, Log, Meta, Vhdx};
use crate::layout::{
    BAT_REGION, BatEntry, GUEST_BYTES_MAX, MIB, PAGE, PAGE_BYTES, PRESENT, REGION_OFFSETS, State,
};
use crate::log::entry::LoggedPage;
use crate::regions::{self, Region};

/// Entries written between two flushes.
const STEP_BLOCKS: u64 = 32 << 10;

impl Vhdx {
    /// As [`vdkit_block::Overlay::resize_over`].
    pub(crate) fn resize_to(&self, guest_bytes: u64, beneath: u64) -> Result<()> {
        let sector = self.geometry.sector_bytes();
        let new = guest_bytes.checked_next_multiple_of(sector).filter(|n| *n <= GUEST_BYTES_MAX);
        let file = self.storage.name();
        let new = new
            .ok_or_else(|| Error::limit(file, "size of the disk", guest_bytes, GUEST_BYTES_MAX))?;
        // A request may hold a page or an entry of the table that moves, or space of a block that goes.
        let _alone = self.gate.close();
        let old = self.guest_len();
        if new == old {
            return Ok(());
        }
        self.begin_session()?;
        let (mut lead, mut meta) = self.meta.quiesce(self)?;
        // Of a damaged image, no space is zeroed or freed.
        self.space(&mut meta)?;
        drop(meta);
        if new > old {
            self.grow(&mut lead, old, new, beneath)
        } else {
            self.shrink(&mut lead, old, new)
        }
    }

    fn grow(&self, lead: &mut Lead<'_>, old: u64, new: u64, beneath: u64) -> Result<()> {
        let needed = self.geometry.bat_region_bytes(new);
        let region =
            lead.leader_state().regions.iter().find(|region| region.guid == BAT_REGION).copied();
        if let Some(region) = region
            && needed > region.bytes
        {
            self.move_table(lead.leader_state(), region, needed)?;
        }
        self.own_tail(old, new, beneath)?;
        let blocks = self.geometry.blocks(old)..self.geometry.blocks(new);
        let mut first = blocks.start;
        while first < blocks.end {
            let last = (first + STEP_BLOCKS).min(blocks.end);
            self.new_entries(&mut self.meta.lock(), first..last)?;
            self.meta.flush_led(self, lead)?;
            first = last;
        }
        self.meta.flush_led(self, lead)?;
        self.write_size(lead, old, new)
    }

    /// Sets the entries of new blocks: zero, which hides the parent, or present in a fixed image.
    fn new_entries(&self, meta: &mut MutexGuard<'_, Meta>, blocks: Range<u64>) -> Result<()> {
        let mut block = blocks.start;
        while block < blocks.end {
            if !self.fixed {
                self.set_entry(self.geometry.payload_index(block), BatEntry::ZERO)?;
                self.clear_bitmap_entry(block)?;
                block += 1;
                continue;
            }
            let unit = self.geometry.block_bytes();
            let taken = self.space(meta)?.take(&*self.storage, unit, blocks.end - block)?;
            self.note_file_bytes()?;
            meta.data_first |= !taken.fresh;
            for index in 0..taken.count {
                let entry = BatEntry::present(taken.at + index * unit);
                self.set_entry(self.geometry.payload_index(block + index), entry)?;
                self.clear_bitmap_entry(block + index)?;
            }
            block += taken.count;
        }
        Ok(())
    }

    /// Clears the entry of a sector bitmap that becomes part of the table with a new block, since
    /// the file may hold arbitrary bytes there. An image with a parent has a bitmap entry for each
    /// chunk that has blocks. Other tables end with the entry of their last block, and bytes after
    /// that may belong to something else.
    fn clear_bitmap_entry(&self, block: u64) -> Result<()> {
        let chunk = 1 << self.geometry.chunk_bits();
        if !block.is_multiple_of(chunk) {
            return Ok(());
        }
        let of = if self.geometry.has_parent { Some(block) } else { block.checked_sub(1) };
        match of {
            Some(of) => self.set_entry(self.geometry.bitmap_index(of), BatEntry::NOT_PRESENT),
            None => Ok(()),
        }
    }

    /// Makes the old last block read as zero beyond the old end, even if the parent is longer.
    fn own_tail(&self, old: u64, new: u64, beneath: u64) -> Result<()> {
        let bytes = self.geometry.block_bytes();
        if old.is_multiple_of(bytes) {
            return Ok(());
        }
        let block = self.geometry.block_of(old);
        let start = block << self.geometry.block_bits;
        let entry = self.payload(block)?;
        let state = self.state_of(block, entry)?;
        if state == State::NotPresent && self.geometry.has_parent && beneath > old {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: growing over a parent that is longer than the last block is known of",
                "make the disk as long as its parent first, or convert it",
            ));
        }
        if !entry.has_data() {
            return Ok(());
        }
        let end = entry.host() + bytes;
        // Other writers may truncate the last block of a fixed image.
        if end > self.file_bytes.load(Ordering::Acquire) {
            self.storage.set_len(end)?;
            self.note_file_bytes()?;
        }
        let host = HostOffset(entry.host() + (old - start));
        self.storage.write_zeroes(host, start + bytes - old, ZeroMode::MayUnmap)?;
        let mut meta = self.meta.lock();
        meta.data_first = true;
        if state == State::PartiallyPresent {
            self.fill_sectors(block, &(old..new.min(start + bytes)), true)?;
        }
        Ok(())
    }

    /// Writes the size durably, and then uses it.
    fn write_size(&self, lead: &mut Lead<'_>, old: u64, new: u64) -> Result<()> {
        let size_at = self.metadata.size_at;
        self.put_metadata(size_at, &new.to_le_bytes())?;
        if let Err(error) = self.meta.flush_led(self, lead) {
            // Restored in memory, so that a later flush does not write the new size.
            let _ = self.put_metadata(size_at, &old.to_le_bytes());
            return Err(error);
        }
        self.guest_bytes.store(new, Ordering::Release);
        Ok(())
    }

    /// Changes bytes of the metadata region in memory; they are logged like table entries.
    pub(crate) fn put_metadata(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let from = (at % PAGE_BYTES) as usize;
            let part = (PAGE - from).min(bytes.len() - done);
            self.change_page(at & !(PAGE_BYTES - 1), |page| {
                page[from..from + part].copy_from_slice(&bytes[done..done + part]);
            })?;
            done += part;
        }
        Ok(())
    }

    fn shrink(&self, lead: &mut Lead<'_>, old: u64, new: u64) -> Result<()> {
        self.write_size(lead, old, new)?;
        let blocks = self.geometry.blocks(new)..self.geometry.blocks(old);
        let mut first = blocks.start;
        while first < blocks.end {
            let last = (first + STEP_BLOCKS).min(blocks.end);
            let mut meta = self.meta.lock();
            for block in first..last {
                let index = self.geometry.payload_index(block);
                let entry = self.entry(index)?;
                if entry != BatEntry::NOT_PRESENT {
                    self.set_entry(index, BatEntry::NOT_PRESENT)?;
                }
                let bytes = self.geometry.block_bytes();
                if entry.has_data() && self.ends_within_file(entry.host(), bytes) {
                    self.unlink(&mut meta, entry.host(), bytes);
                }
            }
            drop(meta);
            self.meta.flush_led(self, lead)?;
            first = last;
        }
        self.drop_bitmaps(lead, &blocks)
    }

    /// Frees the sector bitmaps of chunks without blocks.
    fn drop_bitmaps(&self, lead: &mut Lead<'_>, blocks: &Range<u64>) -> Result<()> {
        if !self.geometry.has_parent {
            return Ok(());
        }
        let chunk = 1 << self.geometry.chunk_bits();
        let mut hosts = Vec::new();
        for first in (blocks.start.next_multiple_of(chunk)..blocks.end).step_by(chunk as usize) {
            let index = self.geometry.bitmap_index(first);
            let entry = self.entry(index)?;
            if entry.state_bits() == PRESENT {
                self.set_entry(index, BatEntry::NOT_PRESENT)?;
                hosts.push(entry.host());
            }
        }
        self.give_bitmaps_back(lead, &hosts)
    }

    /// Moves the block allocation table to a longer region.
    fn move_table(&self, state: &mut Log, old: Region, bytes: u64) -> Result<()> {
        let taken = self.space(&mut self.meta.lock())?.take(&*self.storage, bytes, 1)?;
        let copied = self.note_file_bytes().and_then(|()| self.copy_table(old, taken.at));
        if let Err(error) = copied {
            self.give_back(taken.at, bytes);
            return Err(error);
        }
        let mut regions = state.regions.clone();
        for region in &mut regions {
            if region.guid == BAT_REGION {
                (region.offset, region.bytes) = (taken.at, bytes);
            }
        }
        // From here on no log entry may be for the old table, whose space will be reused. After an
        // error this entry may or may not be in the log, so the copy's space stays unused until the
        // image is reopened.
        self.log_alone(state, &both_tables(&regions))?;
        // The log has the new place; the region tables may be written later.
        state.regions = regions;
        self.pages.clear();
        self.bat_offset.store(taken.at, Ordering::Release);
        let mut taken_ranges = self.taken.write();
        taken_ranges.retain(|range| *range != (old.offset, old.end()));
        taken_ranges.push((taken.at, taken.at + bytes));
        drop(taken_ranges);
        let space = Freed { file: 0, first: old.offset, count: old.bytes, punch: true };
        self.meta.lock().reclaim.release(&self.in_flight, [space]);
        self.apply_late(state)?;
        self.recycle()
    }

    /// Frees space that the file never referred to and that holds arbitrary bytes.
    fn give_back(&self, at: u64, bytes: u64) {
        let zero = self.storage.write_zeroes(HostOffset(at), bytes, ZeroMode::MayUnmap).is_ok();
        let mut meta = self.meta.lock();
        if let Some(space) = &mut meta.space {
            space.give(at, bytes, zero);
        }
    }

    fn copy_table(&self, old: Region, to: u64) -> Result<()> {
        let mut buffer = vec![0; MIB as usize];
        in_steps(HostOffset(old.offset), HostOffset(old.end()), MIB, |at, len| {
            let piece = &mut buffer[..len as usize];
            self.storage.read_padded(piece, at)?;
            self.storage.write_at(piece, HostOffset(to + (at.0 - old.offset)))
        })
    }
}

fn both_tables(regions: &[Region]) -> Vec<LoggedPage> {
    let table = regions::encode(regions);
    let mut pages = Vec::new();
    for offset in REGION_OFFSETS {
        for (index, bytes) in table.chunks(PAGE).enumerate() {
            let mut page = Box::new([0; PAGE]);
            page.copy_from_slice(bytes);
            pages.push((offset + (index * PAGE) as u64, page));
        }
    }
    pages
}
