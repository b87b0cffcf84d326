//! Makes changes durable in their order, and closes the image.

use vdkit_block::{HostOffset, Monitor, Result};
use vdkit_meta::{Metadata, MutexGuard};

use crate::compact;
use crate::image::{BlockImage, Envelope, State};
use crate::table::{Page, write_pages};

/// Copies of changed table pages and sector bitmaps at one moment.
pub struct Copies {
    /// Table pages by number.
    pages: Vec<(u64, Page)>,
    /// Host offset and bytes of sector bitmaps.
    bitmaps: Vec<(u64, Vec<u8>)>,
    /// End of the blocks that these pages name.
    end: u64,
}

impl<E: Envelope> Metadata for BlockImage<E> {
    type State = State;
    type LeaderState = ();
    type Dirty = Copies;

    fn take(&self, state: &mut MutexGuard<'_, State>, _alone: bool) -> Result<Copies> {
        let bitmaps = self.sectors.as_ref().map(|sectors| sectors.begin_write(Vec::clone));
        let (pages, bitmaps) = (self.table.begin_write(Page::clone), bitmaps.unwrap_or_default());
        Ok(Copies { pages, bitmaps, end: state.used_end })
    }

    fn write(&self, copies: &Copies, _order: &mut ()) -> Result<()> {
        let (storage, geometry) = (&*self.storage, self.geometry());
        if copies.pages.is_empty() && copies.bitmaps.is_empty() {
            return storage.sync();
        }
        self.envelope.before_map(&geometry, copies.end)?;
        // Makes the blocks' data, the file's length, and the envelope's writes durable.
        storage.sync()?;
        write_pages(storage, &geometry, &copies.pages)?;
        for (start, bytes) in &copies.bitmaps {
            storage.write_at(bytes, HostOffset(*start))?;
        }
        storage.sync()
    }

    fn end_write(&self, _state: &mut State, _copies: Copies, durable: bool) {
        self.table.end_write(durable);
        if let Some(sectors) = &self.sectors {
            sectors.end_write(durable);
        }
    }

    fn is_dirty(&self, _state: &State) -> bool {
        self.table.dirty() > 0 || self.sectors.as_ref().is_some_and(|sectors| sectors.dirty() > 0)
    }

    fn recycle(&self) -> Result<()> {
        Ok(())
    }

    /// Also closes gaps that failed writes left.
    fn trim(&self, state: &mut MutexGuard<'_, State>, _order: &mut ()) -> Result<()> {
        self.find_again(state)?;
        if !state.unfinished {
            return Ok(());
        }
        let trimmed = self.trim_file(state);
        self.follow_file(state, trimmed.as_ref().ok().copied());
        state.batch = 0;
        trimmed.map(drop)
    }
}

impl<E: Envelope> BlockImage<E> {
    /// Truncates the file after the blocks; returns their end.
    fn trim_file(&self, state: &State) -> Result<u64> {
        let geometry = self.geometry();
        let mut end = state.used_end;
        if geometry.skip == 0 && state.given_back.iter().any(|start| *start < end) {
            end = compact::close_gaps(&*self.storage, &geometry, &Monitor::default())?.end;
        }
        self.envelope.finish(&geometry, end)?;
        Ok(end)
    }
}
