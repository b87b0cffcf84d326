//! Writes metadata in an order that keeps the disk consistent at each moment.
//!
//! | when | what | syncs |
//! |---|---|---|
//! | before the first change since opening | a header with new GUIDs | 1 |
//! | a flush, if guest data or the file's new length must precede the map | these | 1 |
//! | a flush, if the log is unused or full | an empty entry, then a header with the log's new GUID | 1, shared with the row above, and 1 more |
//! | a flush with metadata changes | one log entry with all changed pages | 1 |
//! | after that | the pages in place | none |
//! | a flush without metadata changes | guest data | 1 |
//! | closing | pages, then a header without the log's GUID | 2 |
//!
//! So a flush after any number of allocating writes costs one sync if they went to space that was
//! durable and read as zero, else two, and one more each time that the log is full.
//!
//! A crash may lose pages written in place: the log still has them until a header gives it another
//! GUID, and a sync precedes that.

use std::sync::atomic::Ordering;

use uuid::Uuid;
use vdkit_block::{HostOffset, Result, ZeroMode, random_uuid};
use vdkit_meta::{Freed, Metadata, MutexGuard};

use crate::header::Header;
use crate::image::{Lead, Log, Meta, Vhdx};
use crate::layout::{BITMAP_BYTES, MIB, PAGE_BYTES};
use crate::log::entry::LoggedPage;
use crate::log::pages_max;

/// Longest log or table that is allocated in advance.
const RESERVED_BYTES_MAX: u64 = 4 * MIB;

/// Copies of dirty metadata at one moment.
pub struct Copies {
    pages: Vec<LoggedPage>,
    data_first: bool,
    file_bytes: u64,
}

impl Metadata for Vhdx {
    type State = Meta;
    type LeaderState = Log;
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

    fn end_write(&self, meta: &mut Meta, _copies: Copies, durable: bool) {
        self.pages.end_write(durable);
        meta.data_first |= !durable;
    }

    fn is_dirty(&self, _meta: &Meta) -> bool {
        self.pages.dirty() > 0
    }

    /// Discards unreferenced blocks in the file system, and returns them to the allocator. In this
    /// order: a late hole would erase a new owner's data.
    fn recycle(&self) -> Result<()> {
        let mut meta = self.meta.lock();
        if meta.reclaim.released().next().is_none() {
            return Ok(());
        }
        self.space(&mut meta)?;
        let ready = meta.reclaim.take_expired(&self.in_flight);
        for freed in ready.iter().map(|freed| freed.run) {
            let (host, bytes) = (HostOffset(freed.first), freed.count);
            let zero = self.storage.write_zeroes(host, bytes, ZeroMode::MayUnmap).is_ok();
            self.space(&mut meta)?.give(freed.first, freed.count, zero);
        }
        Ok(())
    }

    fn finish(&self, state: &mut Log) -> Result<()> {
        if !self.session.load(Ordering::Acquire) {
            return Ok(());
        }
        // All logged pages are durable in place: the preceding commit had no pages to log.
        state.log.close(&mut state.headers, &*self.storage)?;
        self.session.store(false, Ordering::Release);
        self.cut(state)?;
        let file_bytes = self.file_bytes.load(Ordering::Acquire);
        self.barrier(state, file_bytes)
    }
}

impl Vhdx {
    /// Ensures that the headers have new GUIDs before this session's first change.
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
        let headers = &mut lead.leader_state().headers;
        let now = headers.current;
        let next = Header {
            file_write: random_uuid()?,
            data_write: if data { random_uuid()? } else { now.data_write },
            log: Uuid::nil(),
            ..now
        };
        headers.update(&*self.storage, next)?;
        if data {
            self.reserve_metadata(next.log_offset, next.log_bytes);
        }
        // One header with the new GUIDs is durable now.
        self.session.store(true, Ordering::Release);
        Ok(())
    }

    /// Allocates the log and the block allocation table, so that changes can be committed where guest
    /// data has filled the file system. Without that, all of a session's new blocks would be lost. Not
    /// every file system can allocate.
    fn reserve_metadata(&self, log_offset: u64, log_bytes: u64) {
        let table = self.geometry.bat_entries(self.guest_len()) * 8;
        let table = (self.entry_offset(0), table.next_multiple_of(PAGE_BYTES));
        let (caps, len) = (self.storage.caps(), self.storage.len().unwrap_or(0));
        for (at, bytes) in [(log_offset, log_bytes), table] {
            let within = at.checked_add(bytes).is_some_and(|end| end <= len);
            if caps.growable && within && bytes <= RESERVED_BYTES_MAX {
                let _ = self.storage.allocate(HostOffset(at), bytes);
            }
        }
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

    /// Logs these pages durably, after emptying the log. [`Vhdx::apply_late`] writes them in place.
    pub(crate) fn log_alone(&self, state: &mut Log, pages: &[LoggedPage]) -> Result<()> {
        self.empty_log(state)?;
        let header = state.headers.current;
        state.log.append(&*self.storage, &header, state.durable_bytes, pages)?;
        state.headers.synced();
        state.unapplied = pages.to_vec();
        Ok(())
    }

    /// Makes all logged pages durable in place, and gives the log another GUID, so that a replay no
    /// longer applies them.
    fn empty_log(&self, state: &mut Log) -> Result<()> {
        let file_bytes = self.file_bytes.load(Ordering::Acquire);
        self.apply_late(state)?;
        state.log.restart(&mut state.headers, &*self.storage, state.durable_bytes)?;
        state.durable_bytes = file_bytes;
        Ok(())
    }

    /// Frees the space of sector bitmaps whose entries are cleared in memory. Empties the log
    /// first: a replay could write logged pages of these bitmaps over new owners' data.
    pub(crate) fn give_bitmaps_back(&self, lead: &mut Lead<'_>, hosts: &[u64]) -> Result<()> {
        if hosts.is_empty() {
            return Ok(());
        }
        self.meta.flush_led(self, lead)?;
        self.empty_log(lead.leader_state())?;
        let freed = |host: &u64| Freed { file: 0, first: *host, count: BITMAP_BYTES, punch: true };
        self.meta.lock().reclaim.release(&self.in_flight, hosts.iter().map(freed));
        self.recycle()
    }

    /// Splits pages into entries of at most `most` pages. Pages of the block allocation table come
    /// last, since the structures that they name must exist first. One entry suffices as long as
    /// [`Vhdx::relieve`] is called in time.
    fn in_order(&self, pages: &[LoggedPage], most: usize) -> Vec<Vec<LoggedPage>> {
        let table = self.entry_offset(0);
        let end = self.entry_offset(self.geometry.bat_entries(self.guest_len()));
        let mut pages = pages.to_vec();
        if pages.len() > most {
            pages.sort_by_key(|(at, _)| (table..end).contains(at));
        }
        pages.chunks(most).map(<[_]>::to_vec).collect()
    }

    /// Writes logged pages in place.
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

    /// Flushes before dirty pages exceed one log entry.
    pub(crate) fn relieve(&self) -> Result<()> {
        if self.pages.dirty() > 100 { self.meta.flush(self) } else { Ok(()) }
    }

    /// Truncates free space at the end of the file. The log must be closed: its entries record a
    /// longer file.
    fn cut(&self, state: &mut Log) -> Result<()> {
        let mut meta = self.meta.lock();
        let in_use = meta.reclaim.released().next().is_some() || !meta.tickets.is_empty();
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
