//! Making metadata durable in an order that is consistent at each moment.
//!
//! | when | what | syncs |
//! |---|---|---|
//! | before the first change since opening | a header with new GUIDs | 1 |
//! | a flush, where guest data or the file's new length must come before the map | those | 1 |
//! | a flush, where the log is not in use yet or is full | an empty entry, then a header with the log's new GUID | 1, as the one before, and 1 more |
//! | a flush with changes of metadata | one entry of the log, with all changed pages | 1 |
//! | after that | the pages in their place | none |
//! | a flush without changes of metadata | guest data | 1 |
//! | closing | pages, then a header without the log's GUID | 2 |
//!
//! So a flush after any number of allocating writes costs one sync where they went to space that
//! was durable and read as zero, else two; and one more each time that the log is full.
//!
//! Pages in their place may be lost in a crash: the log has them, until a header gives it another
//! GUID, and before that comes a sync.

use std::sync::atomic::Ordering;
use vdkit_block::random_uuid;

use vdkit_block::{HostOffset, Result, ZeroMode};
use vdkit_meta::{Freed, Metadata, MutexGuard};

use crate::header::Header;
use crate::image::{Lead, Log, Meta, Vhdx};
use crate::layout::BITMAP_BYTES;
use crate::log::entry::LoggedPage;
use crate::log::pages_max;
use uuid::Uuid;

/// Dirty metadata as it was at one moment.
pub struct Copies {
    pages: Vec<LoggedPage>,
    data_first: bool,
    file_bytes: u64,
}

impl Metadata for Vhdx {
    type State = Meta;
    type Order = Log;
    type Dirty = Copies;

    fn take(&self, meta: &mut MutexGuard<'_, Meta>, _alone: bool) -> Result<Copies> {
        self.check_spoiled(meta)?;
        Ok(Copies {
            pages: self.pages.begin_write(Clone::clone),
            data_first: std::mem::take(&mut meta.data_first),
            file_bytes: self.file_bytes.load(Ordering::Acquire),
        })
    }

    fn write(&self, copies: &Copies, order: &mut Log) -> Result<()> {
        self.write_copies(order, copies)
    }

    fn settle(&self, meta: &mut Meta, _copies: Copies, durable: bool) {
        self.pages.end_write(durable);
        meta.data_first |= !durable;
    }

    fn is_dirty(&self, _meta: &Meta) -> bool {
        self.pages.dirty() > 0
    }

    /// Gives blocks back that nothing shows or uses any more: to the file system, and to the
    /// allocator, which may hand them out again. Not before: a late hole would erase a new owner's
    /// data.
    fn recycle(&self) -> Result<()> {
        let mut meta = self.meta.lock();
        if meta.reclaim.released().next().is_none() {
            return Ok(());
        }
        if meta.space.is_none() && !self.finds_gaps() {
            self.space(&mut meta)?;
        }
        let ready = meta.reclaim.expired(&self.in_flight);
        meta.freed |= !ready.is_empty();
        for freed in ready.iter().map(|freed| freed.run) {
            let (host, bytes) = (HostOffset(freed.first), freed.count);
            let zero = self.storage.write_zeroes(host, bytes, ZeroMode::MayUnmap).is_ok();
            // An allocator that does not exist yet will find the gap.
            if let Some(space) = &mut meta.space {
                space.give(freed.first, freed.count, zero);
            }
        }
        Ok(())
    }

    fn finish(&self, state: &mut Log) -> Result<()> {
        if !self.session.load(Ordering::Acquire) {
            return Ok(());
        }
        // What the log has is durable in its place: the commit before this had no pages to log.
        state.log.close(&mut state.headers, &*self.storage)?;
        self.session.store(false, Ordering::Release);
        self.cut(state)?;
        let file_bytes = self.file_bytes.load(Ordering::Acquire);
        self.barrier(state, file_bytes)
    }
}

impl Vhdx {
    /// Sees to it that the headers tell of this session before anything else is changed.
    pub(crate) fn begin_session(&self) -> Result<()> {
        self.begin(true)
    }

    /// As [`Vhdx::begin_session`], for a session that changes nothing that the guest reads.
    pub(crate) fn begin_metadata_session(&self) -> Result<()> {
        self.begin(false)
    }

    fn begin(&self, data: bool) -> Result<()> {
        if self.session.load(Ordering::Acquire) {
            return Ok(());
        }
        self.need_writable()?;
        let mut lead = self.meta.lead();
        if self.session.load(Ordering::Acquire) {
            return Ok(());
        }
        let headers = &mut lead.order().headers;
        let now = headers.current;
        let next = Header {
            file_write: random_uuid()?,
            data_write: if data { random_uuid()? } else { now.data_write },
            log: Uuid::nil(),
            ..now
        };
        headers.update(&*self.storage, next)?;
        // A header with the new GUIDs is durable now.
        self.session.store(true, Ordering::Release);
        Ok(())
    }

    fn write_copies(&self, state: &mut Log, copies: &Copies) -> Result<()> {
        self.apply_late(state)?;
        if copies.pages.is_empty() {
            return self.barrier(state, copies.file_bytes);
        }
        let mut synced = false;
        let most = pages_max(&state.headers.current).max(1) as usize;
        for pages in self.in_order(&copies.pages, most) {
            if !state.log.has_room(pages.len(), &state.headers.current) {
                state.log.restart(&mut state.headers, &*self.storage, state.durable_bytes)?;
                state.durable_bytes = copies.file_bytes;
                synced = true;
            }
            if !synced && (copies.data_first || state.durable_bytes < copies.file_bytes) {
                self.barrier(state, copies.file_bytes)?;
            }
            synced = true;
            let header = state.headers.current;
            state.log.append(&*self.storage, &header, state.durable_bytes, &pages)?;
            state.headers.synced();
            state.durable_bytes = copies.file_bytes;
            state.unapplied = pages;
            self.apply_late(state)?;
        }
        Ok(())
    }

    /// Changes these pages, through a log that is emptied first. They are durable in the log, and get to
    /// their place with [`Vhdx::apply_late`].
    pub(crate) fn log_alone(&self, state: &mut Log, pages: &[LoggedPage]) -> Result<()> {
        self.empty_log(state)?;
        let header = state.headers.current;
        state.log.append(&*self.storage, &header, state.durable_bytes, pages)?;
        state.headers.synced();
        state.unapplied = pages.to_vec();
        Ok(())
    }

    /// Makes what the log has durable in its place, and gives the log another GUID: a replay changes
    /// nothing of it any more.
    fn empty_log(&self, state: &mut Log) -> Result<()> {
        let file_bytes = self.file_bytes.load(Ordering::Acquire);
        self.apply_late(state)?;
        state.log.restart(&mut state.headers, &*self.storage, state.durable_bytes)?;
        state.durable_bytes = file_bytes;
        Ok(())
    }

    /// Gives the space of sector bitmaps back whose entries are gone in memory. The log may have pages
    /// of them, which a replay would write over what the space is used for next: so it is emptied
    /// first.
    pub(crate) fn give_bitmaps_back(&self, lead: &mut Lead<'_>, hosts: &[u64]) -> Result<()> {
        if hosts.is_empty() {
            return Ok(());
        }
        self.meta.flush_led(self, lead)?;
        self.empty_log(lead.order())?;
        let freed = |host: &u64| Freed { file: 0, first: *host, count: BITMAP_BYTES, punch: true };
        self.meta.lock().reclaim.release(&self.in_flight, hosts.iter().map(freed));
        self.recycle()
    }

    /// Entries of at most so many pages: pages of the block allocation table last, as what they
    /// show must be there. One entry is enough as long as [`Vhdx::relieve`] is called in time.
    fn in_order(&self, pages: &[LoggedPage], most: usize) -> Vec<Vec<LoggedPage>> {
        let table = self.entry_offset(0);
        let end = self.entry_offset(self.geometry.bat_entries(self.guest_len()));
        let mut pages = pages.to_vec();
        if pages.len() > most {
            pages.sort_by_key(|(at, _)| (table..end).contains(at));
        }
        pages.chunks(most).map(<[_]>::to_vec).collect()
    }

    /// Writes pages that the log has to their place.
    pub(crate) fn apply_late(&self, state: &mut Log) -> Result<()> {
        for (at, page) in &state.unapplied {
            self.storage.write_at(&page[..], HostOffset(*at))?;
        }
        state.unapplied.clear();
        Ok(())
    }

    fn barrier(&self, state: &mut Log, file_bytes: u64) -> Result<()> {
        self.storage.sync()?;
        state.headers.synced();
        state.durable_bytes = state.durable_bytes.max(file_bytes);
        Ok(())
    }

    /// Flushes when dirty pages would soon not fit into one entry of the log.
    pub(crate) fn relieve(&self) -> Result<()> {
        if self.pages.dirty() > 100 { self.meta.flush(self) } else { Ok(()) }
    }

    /// Cuts off what is free at the file's end. No entry of the log may count any more: it would
    /// say that the file was longer.
    fn cut(&self, state: &mut Log) -> Result<()> {
        let mut meta = self.meta.lock();
        let in_use = meta.reclaim.released().next().is_some() || !meta.tickets.is_empty();
        if std::mem::take(&mut meta.freed) && !in_use && !self.fixed {
            // Where nothing was allocated, it is not known yet what is free at the end.
            self.space(&mut meta)?;
        }
        let Some(space) = meta.space.as_mut().filter(|_| !in_use) else { return Ok(()) };
        let end = space.end();
        if self.storage.caps().growable && end < self.storage.len()? {
            self.storage.set_len(end)?;
            space.cut(end);
            self.file_bytes.store(end, Ordering::Release);
            state.durable_bytes = 0;
        }
        Ok(())
    }
}
