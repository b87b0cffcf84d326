//! Reserves host space for a write and publishes it.
//!
//! A new block reads as zero before any write, so a reservation is only as long as its write, and
//! several reservations may share a block. Publishing the first one exposes the block; the ranges
//! that the others have not written yet still read as zero. In a differencing image, reservations
//! consist of sectors, and publishing one exposes only its own sectors.

use std::ops::Range;

use vdkit_block::{
    Error, FileIndex, Fill, HostOffset, IoAction, Place, Reservation, Reserver, Result, Ticket,
    ZeroMode, align_down,
};
use vdkit_meta::Freed;

use crate::image::{Meta, Vhdx};
use crate::layout::{BITMAP_BYTES, BatEntry, PAGE_BYTES, PRESENT, State};
use crate::map::{Lookup, fill_bits};

const RESERVATION_BYTES_MAX: u64 = 4 << 30;

/// A reservation that is neither published nor released.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Other reservations must wait for its range, which consists of whole sectors.
    copies: bool,
    /// Its new blocks; empty if it uses the space of a partial block.
    blocks: Range<u64>,
}

/// A block with new space that at least one reservation holds.
#[derive(Debug)]
pub(crate) struct PendingBlock {
    host: u64,
    holders: u32,
    /// The map refers to the block.
    published: bool,
    fresh: bool,
}

/// Result of an attempt to reserve.
enum Attempt<'a> {
    InPlace,
    Wait,
    Reserved(Reservation<'a>),
}

/// A range of partial or new blocks to reserve.
struct Plan {
    write: Range<u64>,
    /// Host offset of the block at `write.start`.
    block_host: u64,
    blocks: Range<u64>,
    /// Unwritten sectors must keep the parent's data.
    copies: bool,
    zeroed: bool,
    fresh: bool,
}

impl Vhdx {
    /// As [`vdkit_block::Format::reserve`].
    pub(crate) fn reserve_range(&self, at: u64, len: u64) -> Result<Option<Reservation<'_>>> {
        self.relieve()?;
        let mut meta = self.meta.lock();
        loop {
            // The disk may have shrunk while this thread waited.
            self.in_range(at, len, IoAction::Write)?;
            self.check_spoiled(&meta)?;
            match self.attempt(&mut meta, at, len.min(RESERVATION_BYTES_MAX))? {
                Attempt::InPlace => return Ok(None),
                Attempt::Reserved(reservation) => return Ok(Some(reservation)),
                Attempt::Wait => self.meta.wait(&mut meta),
            }
        }
    }

    pub(crate) fn check_spoiled(&self, meta: &Meta) -> Result<()> {
        if !meta.spoiled {
            return Ok(());
        }
        let source = std::io::Error::other("space of a failed write could not be made zero again");
        Err(Error::io(self.storage.name(), IoAction::WriteZeroes, 0, 0, source))
    }

    fn attempt(&self, meta: &mut Meta, at: u64, len: u64) -> Result<Attempt<'_>> {
        let block = self.geometry.block_of(at);
        let entry = self.payload(block)?;
        let state = self.state_of(block, entry)?;
        let plan = match state {
            State::FullyPresent => return Ok(Attempt::InPlace),
            State::PartiallyPresent => {
                let extent = self.extent_in_block(at, len, Lookup::Load)?;
                let Some(extent) = extent.filter(|e| e.place == Place::Hole) else {
                    return Ok(Attempt::InPlace);
                };
                // Of a damaged image, the sector bitmap may be another block's data.
                self.space(meta)?;
                Plan {
                    write: at..at + extent.len,
                    block_host: entry.host(),
                    blocks: block..block,
                    copies: true,
                    zeroed: false,
                    fresh: false,
                }
            }
            _ => {
                let copies = self.copies(state);
                let Some(write) = self.free_part(meta, at..at + len, copies) else {
                    return Ok(Attempt::Wait);
                };
                self.plan_new(meta, block, write, copies)?
            }
        };
        let Some(write) = self.free_part(meta, plan.write.clone(), plan.copies) else {
            return Ok(Attempt::Wait);
        };
        Ok(Attempt::Reserved(self.hand_out(meta, Plan { write, ..plan })))
    }

    /// Whether unwritten parts of a new block in this state must keep the parent's data.
    fn copies(&self, state: State) -> bool {
        state == State::NotPresent && self.geometry.has_parent
    }

    /// The first part of a write whose sectors no other reservation holds; `None` if there is none.
    fn free_part(&self, meta: &Meta, write: Range<u64>, copies: bool) -> Option<Range<u64>> {
        if !copies {
            return Some(write);
        }
        let start = align_down(write.start, self.geometry.sector_bytes());
        let end = meta.tickets.find(&(start..write.end), write.start, |p| p.copies)?;
        Some(write.start..end)
    }

    /// Plans new space for a write that begins in a block without space.
    fn plan_new(
        &self,
        meta: &mut Meta,
        block: u64,
        write: Range<u64>,
        copies: bool,
    ) -> Result<Plan> {
        let (bits, block_bytes) = (self.geometry.block_bits, self.geometry.block_bytes());
        if let Some(held) = meta.blocks.get(&block) {
            let end = write.end.min((block + 1) << bits);
            return Ok(Plan {
                write: write.start..end,
                block_host: held.host,
                blocks: block..block + 1,
                copies,
                zeroed: !copies,
                fresh: held.fresh,
            });
        }
        let mut last = block + 1;
        while last << bits < write.end && !meta.blocks.contains_key(&last) {
            let entry = self.payload(last)?;
            let state = self.state_of(last, entry)?;
            if entry.has_data() || self.copies(state) != copies {
                break;
            }
            last += 1;
        }
        if copies {
            self.need_bitmaps(meta, block..last)?;
        }
        let space = self.space(meta)?;
        let taken = space.take(&*self.storage, block_bytes, last - block)?;
        self.note_file_bytes()?;
        Ok(Plan {
            write: write.start..write.end.min((block + taken.count) << bits),
            block_host: taken.at,
            blocks: block..block + taken.count,
            copies,
            zeroed: true,
            fresh: taken.fresh,
        })
    }

    /// Allocates sector bitmaps for the chunks of the first and the last block if needed; the
    /// blocks in between are written whole.
    fn need_bitmaps(&self, meta: &mut Meta, blocks: Range<u64>) -> Result<()> {
        for block in [blocks.start, blocks.end - 1] {
            let index = self.geometry.bitmap_index(block);
            if self.entry(index)?.state_bits() == PRESENT {
                continue;
            }
            let taken = self.space(meta)?.take(&*self.storage, BITMAP_BYTES, 1)?;
            self.note_file_bytes()?;
            meta.data_first |= !taken.fresh;
            self.set_entry(index, BatEntry(taken.at | PRESENT))?;
        }
        Ok(())
    }

    fn hand_out(&self, meta: &mut Meta, plan: Plan) -> Reservation<'_> {
        let sector = self.geometry.sector_bytes();
        let (block, write) = (self.geometry.block_of(plan.write.start), plan.write);
        let guest = match plan.copies {
            // The disk consists of whole sectors.
            true => align_down(write.start, sector)..write.end.next_multiple_of(sector),
            false => write.clone(),
        };
        let fill = |ready: bool| if ready { Fill::Ready } else { Fill::Copy };
        let (head, tail) = (fill(guest.start == write.start), fill(guest.end == write.end));
        let new = plan.blocks.start..plan.blocks.end;
        for held in new.clone() {
            let host = plan.block_host + ((held - block) << self.geometry.block_bits);
            let first = PendingBlock { host, holders: 0, published: false, fresh: plan.fresh };
            meta.blocks.entry(held).or_insert(first).holders += 1;
        }
        let host = plan.block_host + (guest.start - (block << self.geometry.block_bits));
        let pending = Pending { copies: plan.copies, blocks: new };
        let ticket = meta.tickets.open(guest.clone(), pending);
        Reservation::new(self, ticket, guest, write, FileIndex(0), HostOffset(host), head, tail)
            .zeroed(plan.zeroed)
            .untouched(plan.fresh)
    }

    /// Links the reserved space into the map.
    fn show(&self, meta: &mut Meta, guest: &Range<u64>, pending: &Pending) -> Result<()> {
        if pending.copies {
            meta.data_first = true;
        }
        if pending.blocks.is_empty() {
            return self.fill_sectors(self.geometry.block_of(guest.start), guest, true);
        }
        for block in pending.blocks.clone() {
            let index = self.geometry.payload_index(block);
            let Some(held) = meta.blocks.get_mut(&block) else {
                unreachable!("a reservation holds its blocks")
            };
            let start = block << self.geometry.block_bits;
            let end = (start + self.geometry.block_bytes()).min(self.guest_len());
            let whole = guest.start <= start && end <= guest.end;
            if pending.copies && !whole {
                let part = guest.start.max(start)..guest.end.min(end);
                if !held.published {
                    self.fill_sectors(block, &(start..start + self.geometry.block_bytes()), false)?;
                }
                self.fill_sectors(block, &part, true)?;
                if !held.published {
                    self.set_entry(index, BatEntry::partial(held.host))?;
                }
            } else if !held.published {
                self.set_entry(index, BatEntry::present(held.host))?;
            }
            held.published = true;
            meta.data_first |= !held.fresh;
        }
        Ok(())
    }

    /// Sets or clears the bits of sectors in one block.
    pub(crate) fn fill_sectors(&self, block: u64, guest: &Range<u64>, value: bool) -> Result<()> {
        let Some(host) = self.bitmap_host(block, Lookup::Load)? else { return Ok(()) };
        let bits = self.geometry.sector_bits;
        let mut bit = self.geometry.bitmap_bit(guest.start);
        let end = bit + ((guest.end - guest.start) >> bits);
        let page_bits = PAGE_BYTES * 8;
        while bit < end {
            let next = ((bit / page_bits + 1) * page_bits).min(end);
            let page = host + bit / page_bits * PAGE_BYTES;
            let (from, to) = (bit % page_bits, bit % page_bits + (next - bit));
            self.change_page(page, |bytes| {
                fill_bits(&mut bytes[..], from as usize, to as usize, value);
            })?;
            bit = next;
        }
        Ok(())
    }

    /// Zeroes the space of a failed reservation again, which may have been written, since later
    /// reservations rely on it. Skips published blocks, which others may have written in place
    /// since, and ranges of other reservations, which may have been written. There, reading bytes
    /// of the failed write is allowed.
    fn wipe(&self, meta: &mut Meta, guest: &Range<u64>, pending: &Pending) {
        if pending.copies {
            // No reservation relies on the unmapped sectors of such a block.
            return;
        }
        for block in pending.blocks.clone() {
            let Some(held) = meta.blocks.get(&block) else { continue };
            if held.published || held.holders == 1 {
                continue;
            }
            let (start, host) = (block << self.geometry.block_bits, held.host);
            let part = guest.start.max(start)..guest.end.min(start + self.geometry.block_bytes());
            let others = meta.tickets.iter().map(|(other, _)| other.clone()).collect();
            for gap in without(part, others) {
                let at = HostOffset(host + (gap.start - start));
                let wiped = self.storage.write_zeroes(at, gap.end - gap.start, ZeroMode::MayUnmap);
                meta.spoiled |= wiped.is_err();
            }
        }
    }

    /// Drops a reservation's hold on its blocks. Unpublished blocks without other holders become
    /// free.
    fn drop_hold(&self, meta: &mut Meta, pending: &Pending) {
        for block in pending.blocks.clone() {
            let Some(held) = meta.blocks.get_mut(&block) else { continue };
            held.holders -= 1;
            if held.holders > 0 {
                continue;
            }
            let (host, published) = (held.host, held.published);
            meta.blocks.remove(&block);
            if let (false, Some(space)) = (published, &mut meta.space) {
                space.give(host, self.geometry.block_bytes(), false);
            }
        }
    }

    /// Records that the map no longer refers to a block's space, after its entry has changed.
    pub(crate) fn unlink(&self, meta: &mut Meta, host: u64, bytes: u64) {
        meta.reclaim
            .unlink(&self.in_flight, [Freed { file: 0, first: host, count: bytes, punch: true }]);
    }

    /// Records the file's length after a possible growth.
    pub(crate) fn note_file_bytes(&self) -> Result<()> {
        let bytes = self.storage.len()?;
        self.file_bytes.store(bytes, std::sync::atomic::Ordering::Release);
        Ok(())
    }
}

impl Reserver for Vhdx {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        let mut meta = self.meta.lock();
        let (guest, pending) = meta.tickets.close(ticket);
        let result = self.show(&mut meta, &guest, &pending);
        if result.is_err() {
            self.wipe(&mut meta, &guest, &pending);
        }
        self.drop_hold(&mut meta, &pending);
        drop(meta);
        self.meta.ended();
        result
    }

    fn release(&self, ticket: Ticket) {
        let mut meta = self.meta.lock();
        let (guest, pending) = meta.tickets.close(ticket);
        self.wipe(&mut meta, &guest, &pending);
        self.drop_hold(&mut meta, &pending);
        drop(meta);
        self.meta.ended();
    }
}

/// The parts of a range that are in none of `others`.
fn without(range: Range<u64>, mut others: Vec<Range<u64>>) -> Vec<Range<u64>> {
    others.sort_unstable_by_key(|other| other.start);
    let mut gaps = Vec::new();
    let mut at = range.start;
    for other in others.iter().filter(|other| other.end > range.start && other.start < range.end) {
        if other.start > at {
            gaps.push(at..other.start);
        }
        at = at.max(other.end);
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_without_others() {
        let cut = |others: &[(u64, u64)]| -> Vec<(u64, u64)> {
            let others = others.iter().map(|&(start, end)| start..end).collect();
            without(10..20, others).into_iter().map(|gap| (gap.start, gap.end)).collect()
        };
        assert_eq!(cut(&[]), [(10, 20)]);
        assert_eq!(cut(&[(0, 10), (20, 30)]), [(10, 20)]);
        assert_eq!(cut(&[(12, 14), (0, 11), (13, 15), (18, 25)]), [(11, 12), (15, 18)]);
        assert_eq!(cut(&[(0, 30)]), []);
        assert_eq!(cut(&[(10, 15), (15, 20)]), []);
    }
}
