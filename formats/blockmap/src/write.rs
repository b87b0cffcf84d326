//! Reserves blocks for a write and publishes them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{
    Error, FileIndex, Fill, GuestOffset, HostOffset, Reservation, Reserver, Result, Ticket,
    align_down, align_up,
};
use vdkit_meta::MutexGuard;

use crate::geometry::Slot;
use crate::image::{BlockImage, Envelope, NewBlocks, Pending, State};
use crate::sectors::{self, run_of};
use crate::table::PAGE_ENTRIES;

const SECTOR: u64 = 512;
/// Most bytes of a reservation.
const RESERVE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of the first growth of the file; each growth doubles, up to the second value.
const BATCH_MIN: u64 = 4 << 20;
const BATCH_MAX: u64 = 64 << 20;

impl<E: Envelope> BlockImage<E> {
    /// As [`vdkit_block::Format::reserve`].
    pub(crate) fn reserve_blocks(
        &self,
        at: GuestOffset,
        len: u64,
    ) -> Result<Option<Reservation<'_>>> {
        // Dirty pages and bitmaps cannot be evicted.
        let mostly_dirty =
            self.sectors.as_ref().is_some_and(|maps| maps.dirty() > maps.capacity() / 2);
        if mostly_dirty || self.table.dirty() > self.table.capacity() / 2 {
            self.state.flush(self)?;
        }
        let block_bytes = self.geometry().block_bytes;
        let first = at.0 / block_bytes;
        let last = (at.0 + len - 1) / block_bytes;
        let mut state = self.state.lock();
        self.state.wait_until(&mut state, |state| !state.holds(first));
        // While this thread waited, the disk may have shrunk or a resize failed.
        self.refuse_lost()?;
        self.in_range(at, len, vdkit_block::IoAction::Write)?;
        if self.sectors.is_some() {
            return self.reserve_sectors(state, at, len);
        }
        if self.has_place(first)? {
            return Ok(None);
        }
        let most = (RESERVE_BYTES_MAX / block_bytes).max(1);
        let mut count = 1;
        while first + count <= last
            && count < most
            && !state.holds(first + count)
            && !self.has_place(first + count)?
        {
            count += 1;
        }
        let space = self.allocate(&mut state, count)?;
        Ok(Some(self.hand_out(&mut state, at, len, first, space)))
    }

    /// With a parent, a block is first allocated without present sectors. Then the caller reserves
    /// sectors of it, for its bytes and the rest of these sectors.
    fn reserve_sectors(
        &self,
        mut state: MutexGuard<'_, State>,
        at: GuestOffset,
        len: u64,
    ) -> Result<Option<Reservation<'_>>> {
        let geometry = self.geometry();
        let block = at.0 / geometry.block_bytes;
        let Slot::At(start) = geometry.slot(self.word(block)?) else {
            let space = self.allocate(&mut state, 1)?;
            let ticket = state.tickets.open(block..block + 1, Pending { space, patch: None });
            drop(state);
            self.publish(ticket)?;
            // The map has changed: the caller must resolve again.
            return Ok(None);
        };
        let within = at.0 % geometry.block_bytes;
        let most = len.min(geometry.block_bytes - within);
        self.load_sectors(at)?;
        let run = |bitmap: &Vec<u8>| run_of(bitmap, within, most);
        let run = self.sectors.as_ref().and_then(|sectors| sectors.with(start, run));
        let Some((false, len)) = run else { return Ok(None) };
        let first = align_down(at.0, SECTOR);
        let end = align_up(at.0 + len, SECTOR).unwrap_or(u64::MAX).min(self.guest_len());
        let patch = first % geometry.block_bytes..first % geometry.block_bytes + (end - first);
        let host = HostOffset(start + geometry.skip + patch.start);
        let space = NewBlocks { start, count: 0, fresh: false };
        let ticket = state.tickets.open(block..block + 1, Pending { space, patch: Some(patch) });
        let write = at.0..at.0 + len;
        let side = |whole: bool| if whole { Fill::Ready } else { Fill::Copy };
        let (head, tail) = (side(write.start == first), side(write.end == end));
        let file = FileIndex(0);
        Ok(Some(Reservation::new(self, ticket, first..end, write, file, host, head, tail)))
    }

    fn has_place(&self, block: u64) -> Result<bool> {
        Ok(matches!(self.geometry().slot(self.word(block)?), Slot::At(_)))
    }

    fn hand_out(
        &self,
        state: &mut MutexGuard<'_, State>,
        at: GuestOffset,
        len: u64,
        first: u64,
        space: NewBlocks,
    ) -> Reservation<'_> {
        let geometry = self.geometry();
        let block_bytes = geometry.block_bytes;
        let blocks = first..first + space.count;
        let guest = first * block_bytes..(blocks.end * block_bytes).min(self.guest_len());
        let write = at.0..(at.0 + len).min(guest.end);
        let ticket = state.tickets.open(blocks, Pending { space, patch: None });
        let fill = if space.fresh { Fill::Ready } else { Fill::Zero };
        let head = if write.start == guest.start { Fill::Ready } else { fill };
        let tail = if write.end == guest.end { Fill::Ready } else { fill };
        let host = HostOffset(space.start + geometry.skip);
        Reservation::new(self, ticket, guest, write, FileIndex(0), host, head, tail)
            .zeroed(space.fresh)
            .untouched(space.fresh)
    }

    /// Allocates consecutive host blocks, possibly fewer than `count`. Formats with bytes before
    /// each block's data get one at a time.
    pub(crate) fn allocate(
        &self,
        state: &mut MutexGuard<'_, State>,
        count: u64,
    ) -> Result<NewBlocks> {
        if let Some(start) = state.given_back.pop() {
            return Ok(NewBlocks { start, count: 1, fresh: false });
        }
        let geometry = self.geometry();
        let stride = geometry.stride();
        let count = if geometry.skip > 0 { 1 } else { count };
        let start = geometry.place(state.frontier);
        let mut count = count;
        if start < geometry.table_at {
            count = count.min((geometry.table_at - start) / stride).max(1);
        }
        let end = start + count * stride;
        if geometry.word(end - stride).is_none() {
            return Err(self.no_space(format!("the table has no number for a block at {start:#x}")));
        }
        if geometry.skip == 0 && (end - geometry.base) / stride > geometry.entries {
            let what = "the file has blocks that nothing uses; a repair of leaks frees them";
            return Err(self.no_space(what.to_owned()));
        }
        self.make_room(state, end)?;
        state.frontier = end;
        let data = start + geometry.skip;
        let tail_bytes = self.envelope.tail_bytes();
        // If the table separates blocks, a footer that was written in advance may be within a
        // block.
        let tail = state.tails.iter().any(|at| *at < end && data < at + tail_bytes);
        let fresh = data >= state.fresh_from && !tail;
        state.tails.retain(|at| at + tail_bytes > end);
        Ok(NewBlocks { start, count, fresh })
    }

    fn no_space(&self, what: String) -> Error {
        Error::no_space(self.storage.name(), what)
    }

    /// Grows the file for blocks up to `end`, and in advance for more.
    fn make_room(&self, state: &mut MutexGuard<'_, State>, end: u64) -> Result<()> {
        if end <= state.room_end {
            return Ok(());
        }
        if !self.storage.caps().growable {
            return Err(self.no_space(format!("blocks up to {end:#x} on a device")));
        }
        let geometry = self.geometry();
        let stride = geometry.stride();
        state.batch = (state.batch * 2).clamp(BATCH_MIN, BATCH_MAX);
        // At most what the whole disk can need, in whole blocks from here on.
        let first = geometry.first_block.max(geometry.table_end());
        let all = first + geometry.entries * stride;
        let blocks = (state.batch / stride).min(all.saturating_sub(end) / stride);
        let ahead = end + blocks * stride;
        state.unfinished = true;
        // The blocks may end before the table.
        let tail_at = geometry.file_end(ahead).next_multiple_of(SECTOR);
        let tail_bytes = self.envelope.tail_bytes();
        let host_bytes = self.storage.len()?;
        if tail_at + tail_bytes > host_bytes {
            self.storage.set_len(tail_at + tail_bytes)?;
            state.tails.push(tail_at);
            if let Err(error) = self.envelope.grown(tail_at) {
                // Restores the length, so that the file still ends with its tail and the next
                // attempt retries.
                let _ = self.storage.set_len(host_bytes);
                return Err(error);
            }
        }
        state.room_end = ahead;
        self.host_bytes.fetch_max(tail_at + tail_bytes, Ordering::AcqRel);
        Ok(())
    }

    /// Writes the structures before new blocks and changes their entries: of all blocks or of none.
    fn show(&self, blocks: &Range<u64>, pending: &Pending) -> Result<()> {
        if let (Some(patch), Some(sectors)) = (&pending.patch, &self.sectors) {
            let start = pending.space.start;
            let read = || sectors::read(&*self.storage, start, self.geometry().skip);
            return sectors.change_loaded(start, read, |bitmap| sectors::mark(bitmap, patch));
        }
        let geometry = self.geometry();
        let stride = geometry.stride();
        let mut words = Vec::with_capacity(pending.space.count as usize);
        for n in 0..pending.space.count {
            let start = pending.space.start + n * stride;
            self.envelope.new_block(start)?;
            let word = geometry.word(start);
            words.push(word.ok_or_else(|| self.no_space(format!("no number for {start:#x}")))?);
        }
        // Under the lock, so that a flush knows the end of the blocks before it sees the entries.
        let mut state = self.state.lock();
        let entries = PAGE_ENTRIES as u64;
        let pages = blocks.start / entries..blocks.end.div_ceil(entries);
        for page in pages.clone() {
            // Marks the pages dirty, so that they stay cached and the next loop cannot fail.
            self.table.change_loaded(page, || self.read_page(page), |_| ())?;
        }
        for page in pages {
            let first = blocks.start.max(page * entries);
            let last = blocks.end.min((page + 1) * entries);
            let new = &words[(first - blocks.start) as usize..(last - blocks.start) as usize];
            let _ = self.table.change(page, |page| {
                let at = (first % entries) as usize;
                page[at..at + new.len()].copy_from_slice(new);
                true
            });
        }
        let end = pending.space.start + pending.space.count * stride;
        state.used_end = state.used_end.max(end);
        Ok(())
    }

    /// The blocks may have been written, so they are no longer fresh.
    fn give_back(&self, state: &mut MutexGuard<'_, State>, space: NewBlocks) {
        let stride = self.geometry().stride();
        state.given_back.extend((0..space.count).map(|n| space.start + n * stride));
    }
}

impl<E: Envelope> Reserver for BlockImage<E> {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        let (blocks, pending) = self.state.lock().tickets.get(ticket).clone();
        let done = self.show(&blocks, &pending);
        let mut state = self.state.lock();
        state.tickets.close(ticket);
        match done {
            Ok(()) => state.unfinished = true,
            Err(_) => self.give_back(&mut state, pending.space),
        }
        drop(state);
        self.state.ended();
        done
    }

    fn release(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        let pending = state.tickets.close(ticket).1;
        self.give_back(&mut state, pending.space);
        drop(state);
        self.state.ended();
    }
}

impl State {
    fn holds(&self, block: u64) -> bool {
        self.tickets.overlap(&(block..block + 1))
    }
}
