//! Resizes the guest disk.

use std::sync::atomic::Ordering;

use vdkit_block::{Error, HostOffset, Monitor, Result, ZeroMode};
use vdkit_meta::MutexGuard;

use crate::compact;
use crate::geometry::{Geometry, Slot};
use crate::image::{BlockImage, Envelope, State, end_of_blocks};
use crate::table::{STEP_ENTRIES, read_entries, write_blocks, write_holes};

impl<E: Envelope> BlockImage<E> {
    /// As [`vdkit_block::Format::resize`].
    pub(crate) fn resize_to(&self, guest_bytes: u64) -> Result<()> {
        if self.sectors.is_some() {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: another size of an image that stands on another one",
                "convert it to a new image",
            ));
        }
        // Before the size is judged by a geometry that another resize may change.
        let _alone = self.gate.close();
        let guest_bytes = self.envelope.judge_size(&self.geometry(), guest_bytes)?;
        let (_lead, mut state) = self.state.quiesce(self)?;
        let resized = self.resize_file(&state, guest_bytes);
        self.follow_file(&mut state, resized.as_ref().ok().copied());
        resized.map(drop)
    }

    /// Changes the file without the table cache, and uses the new size once it is in the header.
    /// Returns the end of the blocks. After an error, memory must be reloaded from the file.
    fn resize_file(&self, state: &MutexGuard<'_, State>, guest_bytes: u64) -> Result<u64> {
        let (old, before) = (self.guest_len(), self.geometry());
        // Of a damaged image, no block is zeroed or moved.
        compact::sound(&*self.storage, &before)?;
        let entries = guest_bytes.div_ceil(before.block_bytes);
        let grows = guest_bytes > old;
        let (after, mut end) = match grows {
            // The header last: it exposes the prepared table.
            true => self.prepare_growth(state, &before, entries)?,
            // The header first: a crash then leaves a smaller disk with unreferenced blocks.
            false => (Geometry { entries: entries.min(before.entries), ..before }, state.used_end),
        };
        self.envelope.resized(&after, guest_bytes, end)?;
        *self.geometry.write() = after;
        self.guest_bytes.store(guest_bytes, Ordering::Release);
        if !grows {
            end = compact::close_gaps(&*self.storage, &after, &Monitor::default())?.end;
        }
        self.envelope.finish(&after, end)?;
        self.storage.sync()?;
        Ok(end)
    }

    /// Reloads memory from the file after a change without the cache. `end` is the end of the
    /// blocks; `None` after a failed change: then the header is reread, since it may or may not
    /// have reached the file.
    pub(crate) fn follow_file(&self, state: &mut MutexGuard<'_, State>, end: Option<u64>) {
        self.table.clear();
        if end.is_none() {
            match self.envelope.stored() {
                Ok((geometry, guest_bytes)) => {
                    *self.geometry.write() = geometry;
                    self.guest_bytes.store(guest_bytes, Ordering::Release);
                    self.lost.store(false, Ordering::Release);
                }
                Err(_) => self.lost.store(true, Ordering::Release),
            }
        }
        let host_bytes = match self.storage.len() {
            Ok(bytes) => bytes,
            Err(_) => self.host_bytes.load(Ordering::Acquire),
        };
        self.host_bytes.store(host_bytes, Ordering::Release);
        state.unfinished = end.is_none();
        let found = || end_of_blocks(&*self.storage, &self.geometry(), host_bytes).ok();
        // If the table cannot be read, no block counts as free.
        let end = end.or_else(found).unwrap_or(host_bytes);
        (state.used_end, state.frontier) = (end, end);
        state.given_back.clear();
        if self.storage.caps().growable {
            state.room_end = end;
            state.fresh_from = host_bytes;
            state.tails.clear();
        }
    }

    /// Makes room for `entries` in the file; the new ones name no blocks yet. Returns the new
    /// geometry, and the new end of the blocks.
    fn prepare_growth(
        &self,
        state: &MutexGuard<'_, State>,
        geometry: &Geometry,
        entries: u64,
    ) -> Result<(Geometry, u64)> {
        self.zero_behind_the_end(geometry, entries)?;
        let (mut after, mut end) = (*geometry, state.used_end);
        if entries > geometry.entries {
            (after, end) = self.envelope.room_for(geometry, entries, end)?;
            after.entries = entries;
            let more = entries - geometry.entries;
            write_holes(&*self.storage, &after, geometry.entries, more)?;
            if self.envelope.all_allocated() {
                end = self.allocate_all(&after, geometry.entries, end)?;
            }
        }
        self.storage.sync()?;
        Ok((after, end))
    }

    /// Zeroes what a growth exposes: the rest of the last block, and blocks of entries beyond the
    /// current end of the disk. Such entries exist in a VHD after an interrupted shrink, and in
    /// images of other programs whose tables are longer than their disks.
    fn zero_behind_the_end(&self, geometry: &Geometry, entries: u64) -> Result<()> {
        let (old, block_bytes) = (self.guest_len(), geometry.block_bytes);
        let last = entries.min(geometry.entries);
        let mut first = old / block_bytes;
        while first < last {
            let mut words = vec![0; STEP_ENTRIES.min(last - first) as usize];
            read_entries(&*self.storage, geometry, first, &mut words)?;
            for (index, word) in (first..).zip(&words) {
                let Slot::At(start) = geometry.slot(*word) else { continue };
                let within = old.saturating_sub(index * block_bytes);
                let at = HostOffset(start + geometry.skip + within);
                self.storage.write_zeroes(at, block_bytes - within, ZeroMode::MayUnmap)?;
            }
            first += words.len() as u64;
        }
        Ok(())
    }

    /// Allocates a block after `end` for every new entry; returns their end.
    fn allocate_all(&self, geometry: &Geometry, first: u64, end: u64) -> Result<u64> {
        let last = end + (geometry.entries - first) * geometry.stride();
        let host_bytes = self.storage.len()?;
        if host_bytes > end {
            // Bytes after the last block must not become guest data.
            self.storage.write_zeroes(HostOffset(end), host_bytes - end, ZeroMode::MayUnmap)?;
        }
        self.storage.set_len(last + self.envelope.tail_bytes())?;
        write_blocks(&*self.storage, geometry, first..geometry.entries, end)?;
        Ok(last)
    }
}
