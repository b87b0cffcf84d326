//! Making changes durable, in their order, and closing.

use vdkit_block::{HostOffset, Result};
use vdkit_meta::{Metadata, MutexGuard};

use crate::compact;
use crate::image::{BlockImage, Envelope, State};
use crate::sectors::SectorMaps;
use crate::table::{Changed, write_pages};

/// Changed pages of the table and bitmaps of sectors as they were at one moment.
pub struct Copies {
    pages: Changed,
    /// Host offset and bytes.
    bitmaps: Vec<(u64, Vec<u8>)>,
    /// Where the blocks end that these pages name.
    end: u64,
}

impl<E: Envelope> Metadata for BlockImage<E> {
    type State = State;
    type Order = ();
    type Dirty = Copies;

    fn take(&self, state: &mut MutexGuard<'_, State>, _order: &mut ()) -> Result<Copies> {
        let bitmaps = self.sectors.as_ref().map(SectorMaps::take_changed).unwrap_or_default();
        Ok(Copies { pages: self.table.take_changed(), bitmaps, end: state.used_end })
    }

    fn write(&self, copies: &Copies, _order: &mut ()) -> Result<()> {
        let (storage, geometry) = (&*self.storage, self.geometry());
        if copies.pages.is_empty() && copies.bitmaps.is_empty() {
            return storage.sync();
        }
        self.envelope.before_map(storage, &geometry, copies.end)?;
        // The blocks' data, the file's length, and what the envelope wrote.
        storage.sync()?;
        write_pages(storage, &geometry, &copies.pages)?;
        for (start, bytes) in &copies.bitmaps {
            storage.write_at(bytes, HostOffset(*start))?;
        }
        storage.sync()
    }

    fn settle(&self, _state: &mut State, _copies: Copies, durable: bool) {
        self.table.written(durable);
        if let Some(sectors) = &self.sectors {
            sectors.written(durable);
        }
    }

    fn recycle(&self) -> Result<()> {
        Ok(())
    }
}

impl<E: Envelope> BlockImage<E> {
    /// Flushes, gives back what was reserved ahead, and closes gaps that failed writes have left.
    pub(crate) fn close_cleanly(&self) -> Result<()> {
        self.state.flush(self)?;
        self.check_lost()?;
        let _lead = self.state.lead();
        let mut state = self.state.lock();
        if !state.unfinished
            || !state.tickets.is_empty()
            || self.table.dirty()
            || self.sectors.as_ref().is_some_and(SectorMaps::dirty)
        {
            return Ok(());
        }
        let geometry = self.geometry();
        let mut end = state.used_end;
        let gaps = state.given_back.iter().any(|start| *start < end);
        if gaps && geometry.skip == 0 {
            match compact::close_gaps(&*self.storage, &geometry, None) {
                Ok(closed) => end = closed.end,
                Err(error) => {
                    self.follow_file(&mut state, None);
                    return Err(error);
                }
            }
        }
        self.envelope.finish(&*self.storage, &geometry, end)?;
        self.storage.sync()?;
        self.follow_file(&mut state, Some(end));
        state.batch = 0;
        Ok(())
    }
}
