//! Reserves grains for a write and publishes them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use vdkit_block::{
    Fill, GuestOffset, HostOffset, Reservation, Reserver, Result, Ticket, align_down,
};
use vdkit_meta::{Freed, MutexGuard};

use crate::header::SECTOR;
use crate::image::{Grains, Kind, Meta, Vmdk};
use crate::map::{Chunk, Key};
use crate::space::Run;
use crate::sparse::{Entry, Sparse};

/// Entries of one sector of a table, the unit in which tables are written.
pub(crate) const SECTOR_ENTRIES: u64 = 128;

/// A reservation that is neither published nor released.
#[derive(Debug)]
pub(crate) struct Pending {
    extent: u32,
    run: Run,
    /// The data must be durable before the entry that exposes it.
    data_first: bool,
}

impl Vmdk {
    /// As [`vdkit_block::Format::reserve`], for a range on the disk.
    pub(crate) fn reserve_grains(
        &self,
        at: GuestOffset,
        len: u64,
    ) -> Result<Option<Reservation<'_>>> {
        let (index, piece) = self.extent_of(at.0);
        if !piece.writable {
            return Err(self.refuse(piece));
        }
        let Kind::Sparse(sparse) = &piece.kind else { return Ok(None) };
        let of = Grains { index, piece, sparse };
        self.relieve_cache()?;
        let mut meta = self.meta.lock();
        let end = self.claim(&mut meta, of, at.0, at.0 + len);
        let grain = sparse.grain_bytes;
        let start = piece.start + align_down(at.0 - piece.start, grain);
        let first = self.entry_at(of, start)?;
        if matches!(first, Entry::At(_)) {
            return Ok(None);
        }
        self.require_sound(&mut meta, of)?;
        let (mut last, mut grains_end) = (first, start + grain);
        let mut hides = self.hides_data(first);
        while grains_end < end {
            let next = self.entry_at(of, grains_end)?;
            if matches!(next, Entry::At(_)) {
                break;
            }
            hides |= self.hides_data(next);
            (last, grains_end) = (next, grains_end + grain);
        }
        let span = sparse.table_span();
        let tables = (start - piece.start) / span..=(grains_end - 1 - piece.start) / span;
        self.make_tables(&mut meta, of, *tables.start(), *tables.end())?;
        let run = self.allocate(&mut meta, of, (grains_end - start) / grain)?;
        if start + run.bytes < grains_end {
            // Fewer grains than planned, so the last one is written whole.
            (last, grains_end) = (Entry::Zero, start + run.bytes);
        }
        let write = at.0..end.min(grains_end);
        // The part of a grain beyond its extent is unused.
        let guest = start..grains_end.min(piece.end());
        let head = if write.start == guest.start { Fill::Ready } else { self.fill(first, run) };
        let tail = if write.end == guest.end { Fill::Ready } else { self.fill(last, run) };
        let data_first = hides || !run.fresh || head == Fill::Copy || tail == Fill::Copy;
        let ticket = meta.tickets.open(guest.clone(), Pending { extent: index, run, data_first });
        drop(meta);
        self.touch(sparse.file);
        let host = HostOffset(run.host);
        let reserved = Reservation::new(self, ticket, guest, write, sparse.file, host, head, tail);
        Ok(Some(reserved.zeroed(run.fresh).untouched(run.fresh)))
    }

    /// Whether the guest can read data other than zeroes from a grain without data of its own.
    fn hides_data(&self, entry: Entry) -> bool {
        entry == Entry::Hole && self.backing.is_some()
    }

    fn fill(&self, entry: Entry, run: Run) -> Fill {
        match entry {
            Entry::Hole if self.backing.is_some() => Fill::Copy,
            _ if run.fresh => Fill::Ready,
            _ => Fill::Zero,
        }
    }

    /// Waits until no other reservation holds the grain of `at`; returns the end of the following
    /// grains that none holds, within the extent.
    fn claim(&self, meta: &mut MutexGuard<'_, Meta>, of: Grains<'_>, at: u64, end: u64) -> u64 {
        let Grains { piece, sparse, .. } = of;
        let start = piece.start + align_down(at - piece.start, sparse.grain_bytes);
        let end = end.min(piece.end());
        loop {
            match meta.tickets.find(&(start..end), at, |_| true) {
                Some(end) => return end,
                None => self.meta.wait(meta),
            }
        }
    }

    /// The table entry of a guest offset.
    pub(crate) fn entry_at(&self, of: Grains<'_>, at: u64) -> Result<Entry> {
        let Grains { piece, sparse, .. } = of;
        let inside = at - piece.start;
        if sparse.table(inside / sparse.table_span()).is_none() {
            return Ok(Entry::Hole);
        }
        let (key, slot) = of.slot(at);
        let read = || self.read_chunk(key);
        let word = self.tables.with_loaded(key, read, |words| words[slot])?;
        let limit = piece.limit.load(Ordering::Acquire);
        sparse.entry(word, limit).ok_or_else(|| self.entry_fault(of, inside, word))
    }

    fn link(&self, meta: &mut Meta, guest: &Range<u64>, pending: &Pending) -> Result<()> {
        let run = pending.run;
        let end_of_run = run.host + run.bytes;
        meta.dirty.data_first |= pending.data_first;
        meta.dirty.length_first |= end_of_run > meta.space[pending.extent as usize].durable;
        self.change_entries(meta, self.grains(pending.extent), guest, |at, _| {
            Some((run.host + (at - guest.start)) / SECTOR)
        })
    }

    /// Changes the entries of whole grains of one extent (the extent's last grain may be partial),
    /// whose tables exist. `new` maps a guest offset and old entry to the new word, or to `None` to
    /// keep it.
    pub(crate) fn change_entries(
        &self,
        meta: &mut Meta,
        of: Grains<'_>,
        grains: &Range<u64>,
        mut new: impl FnMut(u64, Entry) -> Option<u64>,
    ) -> Result<()> {
        let Grains { index, piece, sparse } = of;
        let grain = sparse.grain_bytes;
        let limit = piece.limit.load(Ordering::Acquire);
        let mut at = grains.start;
        while at < grains.end {
            let (key, slot) = of.slot(at);
            let count = ((grains.end - at).div_ceil(grain) as usize)
                .min(sparse.chunk_entries() as usize - slot);
            let mut fault = None;
            let mut freed = Vec::new();
            let mut bits = 0;
            let mut change = |words: &mut Chunk| {
                for (n, word) in words[slot..slot + count].iter_mut().enumerate() {
                    let Some(old) = sparse.entry(*word, limit) else {
                        fault = Some((at + n as u64 * grain, *word));
                        break;
                    };
                    let Some(next) = new(at + n as u64 * grain, old) else { continue };
                    if next == *word {
                        continue;
                    }
                    *word = next;
                    bits |= 1 << piece_of(sparse, slot + n);
                    if let Entry::At(host) = old {
                        freed.push(Freed { file: index, first: host, count: grain, punch: true });
                    }
                }
                bits != 0
            };
            while self.tables.change(key, &mut change).is_none() {
                self.load(key)?;
            }
            if bits != 0 {
                *meta.dirty.tables.entry(key).or_default() |= bits;
                self.touch(sparse.file);
            }
            meta.reclaim.unlink(&self.in_flight, freed);
            if let Some((at, word)) = fault {
                return Err(self.entry_fault(of, at - piece.start, word));
            }
            at += count as u64 * grain;
        }
        Ok(())
    }

    /// Marks a whole table as changed.
    pub(crate) fn mark_table(&self, meta: &mut Meta, of: Grains<'_>, table: u64) {
        let Grains { index, sparse, .. } = of;
        let tables = sparse.chunk_tables();
        let key = (index, table / tables);
        // An uncached chunk needs no change: the flush reads it from disk.
        let pieces = sparse.table_entries.div_ceil(SECTOR_ENTRIES);
        let first = table % tables * pieces;
        let bits = (first..first + pieces).fold(0, |bits, bit| bits | 1 << bit);
        *meta.dirty.tables.entry(key).or_default() |= bits;
        let _ = self.tables.change(key, |_| true);
    }
}

impl Grains<'_> {
    /// The chunk and the index within it of a guest offset.
    fn slot(&self, at: u64) -> (Key, usize) {
        let grain = (at - self.piece.start) / self.sparse.grain_bytes;
        let entries = self.sparse.chunk_entries();
        ((self.index, grain / entries), (grain % entries) as usize)
    }
}

impl Reserver for Vmdk {
    fn publish(&self, ticket: Ticket) -> Result<()> {
        let mut meta = self.meta.lock();
        let (guest, pending) = meta.tickets.close(ticket);
        let result = self.link(&mut meta, &guest, &pending);
        drop(meta);
        self.meta.ended();
        result
    }

    fn release(&self, ticket: Ticket) {
        let mut meta = self.meta.lock();
        let pending = meta.tickets.close(ticket).1;
        // The caller may have written there.
        meta.space[pending.extent as usize].give_back(pending.run.host, pending.run.bytes);
        drop(meta);
        self.meta.ended();
    }
}

/// The dirty bit of a chunk's slot: the sector of its table.
fn piece_of(sparse: &Sparse, slot: usize) -> u64 {
    let (table, entry) = (slot as u64 / sparse.table_entries, slot as u64 % sparse.table_entries);
    table * sparse.table_entries.div_ceil(SECTOR_ENTRIES) + entry / SECTOR_ENTRIES
}
