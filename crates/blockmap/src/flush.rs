//! Making changes durable, in their order, and closing.

use std::sync::atomic::Ordering;

use vdkit_block::{HostOffset, Result, Storage};

use crate::compact;
use crate::image::{BlockImage, Envelope};
use crate::sectors::SectorMaps;
use crate::table::write_pages;

fn write_bitmaps(storage: &dyn Storage, bitmaps: &[(u64, Vec<u8>)]) -> Result<()> {
    bitmaps.iter().try_for_each(|(start, bytes)| storage.write_at(bytes, HostOffset(*start)))
}

impl<E: Envelope> BlockImage<E> {
    /// One flush for all who asked before it began.
    pub(crate) fn flush_grouped(&self) -> Result<()> {
        let request = self.flush_requests.fetch_add(1, Ordering::AcqRel) + 1;
        let mut completed = self.flushing.lock();
        if *completed >= request {
            return Ok(());
        }
        let served = self.flush_requests.load(Ordering::Acquire);
        self.flush_now()?;
        *completed = served;
        Ok(())
    }

    fn flush_now(&self) -> Result<()> {
        let geometry = self.geometry();
        let (changed, bitmaps, end) = {
            let state = self.state.lock();
            self.dirty.store(false, Ordering::Release);
            let bitmaps = self.sectors.as_ref().map(SectorMaps::take_changed).unwrap_or_default();
            (self.table.take_changed(), bitmaps, state.used_end)
        };
        if changed.is_empty() && bitmaps.is_empty() {
            return self.storage.sync();
        }
        let done = self
            .envelope
            .before_map(&*self.storage, &geometry, end)
            // The blocks' data, the file's length, and what the envelope wrote.
            .and_then(|()| self.storage.sync())
            .and_then(|()| write_pages(&*self.storage, &geometry, &changed))
            .and_then(|()| write_bitmaps(&*self.storage, &bitmaps))
            .and_then(|()| self.storage.sync());
        self.table.written(done.is_ok());
        if let Some(sectors) = &self.sectors {
            sectors.written(done.is_ok());
        }
        if done.is_err() {
            self.dirty.store(true, Ordering::Release);
        }
        done
    }

    /// Flushes, gives back what was reserved ahead, and closes gaps that failed writes have left.
    pub(crate) fn close_cleanly(&self) -> Result<()> {
        self.flush_grouped()?;
        let _flushing = self.flushing.lock();
        let mut state = self.state.lock();
        if !state.unfinished
            || !state.pending.is_empty()
            || self.table.dirty()
            || self.sectors.as_ref().is_some_and(SectorMaps::dirty)
        {
            return Ok(());
        }
        let geometry = self.geometry();
        let mut end = state.used_end;
        let gaps = state.given_back.iter().any(|start| *start < end);
        if gaps && geometry.skip == 0 {
            let report = compact::close_gaps(&*self.storage, &geometry, None)?;
            self.table.forget();
            end = report.end;
        }
        self.envelope.finish(&*self.storage, &geometry, end)?;
        self.storage.sync()?;
        state.used_end = end;
        state.frontier = end;
        state.given_back.clear();
        let tail = self.envelope.tail_bytes();
        if self.storage.caps().growable {
            state.room_end = end;
            state.fresh_from = end + tail;
            self.host_bytes.store(end + tail, Ordering::Release);
        }
        state.batch = 0;
        state.unfinished = false;
        Ok(())
    }
}
