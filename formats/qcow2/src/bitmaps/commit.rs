//! Commits a new directory of bitmaps: writes new tables, issues a barrier, switches the header in
//! one write, and then releases the old tables.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Result};
use vdkit_meta::MutexGuard;

use super::bits::Tracker;
use super::state::{Directory, Entry};
use super::{Bitmap, encode};
use crate::image::{Lead, Meta, Qcow2};
use crate::pool::Space;
use crate::structures::encode_words;

/// One bitmap of the new directory.
pub(super) struct Wanted {
    /// Name, flags, granularity.
    pub(super) bitmap: Bitmap,
    /// Its table: kept or new.
    pub(super) table: WantedTable,
}

/// The table of a bitmap of the new directory.
pub(super) enum WantedTable {
    /// The table of the bitmap with this id.
    Keep(u64),
    /// The table of the bitmap with this id, with another number of entries. It stays that bitmap.
    Resized(u64, u64),
    /// A new table. Any clusters that it names must belong to a bitmap of the current directory.
    New(Vec<u64>),
}

impl Qcow2 {
    /// The current directory, as a starting point for changes.
    pub(super) fn wanted(&self) -> Vec<Wanted> {
        let directory = self.bitmaps.directory.lock();
        let keep = |e: &Entry| Wanted { bitmap: e.bitmap.clone(), table: WantedTable::Keep(e.id) };
        directory.entries.iter().map(keep).collect()
    }

    /// Switches to a new directory and sets whether it is `valid`. The caller holds `admin` and the
    /// lead. Flushes all earlier writes first.
    pub(super) fn commit_bitmaps(
        &self,
        lead: &mut Lead<'_>,
        wanted: Vec<Wanted>,
        valid: bool,
    ) -> Result<()> {
        // Also allocates clusters for pages that have none yet.
        self.meta.flush_led(self, lead)?;
        let mut meta = self.meta.lock();
        self.before_change(&mut meta)?;
        let (mut new, mut spaces) = (self.new_directory(wanted), Vec::new());
        let written = self
            .reserve_directory(&mut meta, &mut new, &mut spaces)
            .and_then(|()| self.flush_locked(&mut meta))
            .and_then(|()| self.write_directory(&mut new, &spaces))
            .and_then(|()| {
                let count = new.entries.len() as u32;
                self.switch_directory(&mut meta, count, new.place, valid)
            });
        if let Err(error) = written {
            Self::unreserve(&mut meta, spaces);
            return Err(error);
        }
        self.install(&mut meta, new);
        Ok(())
    }

    /// The entries of the new directory; new tables have no offset yet. Under the lead, after a flush:
    /// no table changes meanwhile.
    fn new_directory(&self, wanted: Vec<Wanted>) -> Directory {
        let old = self.bitmaps.directory.lock();
        let mut new = Directory { entries: Vec::new(), place: None, next_id: old.next_id };
        for Wanted { mut bitmap, table } in wanted {
            let kept = |id| match old.entries.iter().find(|entry| entry.id == id) {
                Some(kept) => kept.clone(),
                None => unreachable!("under the admin lock"),
            };
            let entry = match table {
                WantedTable::Keep(id) => Entry { bitmap, ..kept(id) },
                WantedTable::Resized(id, entries) => {
                    let mut table = kept(id).table.unwrap_or_default();
                    table.resize(entries as usize, 0);
                    bitmap.table_offset = HostOffset(0);
                    bitmap.table_entries = entries as u32;
                    Entry { id, bitmap, table: Some(table), unwritten: BTreeSet::new() }
                }
                WantedTable::New(table) => {
                    bitmap.table_offset = HostOffset(0);
                    bitmap.table_entries = table.len() as u32;
                    let id = new.next_id;
                    new.next_id += 1;
                    Entry { id, bitmap, table: Some(table), unwritten: BTreeSet::new() }
                }
            };
            new.entries.push(entry);
        }
        new
    }

    /// Reserves space for the new tables, then for the directory itself.
    fn reserve_directory(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        new: &mut Directory,
        spaces: &mut Vec<Space>,
    ) -> Result<()> {
        for entry in new.entries.iter_mut().filter(|entry| entry.bitmap.table_offset.0 == 0) {
            let space = self.reserve_table(meta, u64::from(entry.bitmap.table_entries) * 8)?;
            spaces.push(space);
            entry.bitmap.table_offset = HostOffset(space.first << self.geometry.cluster_bits);
        }
        if !new.entries.is_empty() {
            let bytes = encode(new.entries.iter().map(|entry| &entry.bitmap)).len() as u64;
            let space = self.reserve_table(meta, bytes)?;
            spaces.push(space);
            new.place = Some((HostOffset(space.first << self.geometry.cluster_bits), bytes));
        }
        Ok(())
    }

    fn write_directory(&self, new: &mut Directory, spaces: &[Space]) -> Result<()> {
        for space in spaces {
            let at = HostOffset(space.first << self.geometry.cluster_bits);
            let table = new.entries.iter().find(|entry| entry.bitmap.table_offset == at);
            let raw = match table {
                Some(Entry { table: Some(table), .. }) => encode_words(table),
                _ => encode(new.entries.iter().map(|entry| &entry.bitmap)),
            };
            self.write_table(space, &raw)?;
        }
        Ok(())
    }

    /// Installs the new directory, and releases clusters that only the old one named.
    fn install(&self, meta: &mut Meta, new: Directory) {
        let mut trackers = self.bitmaps.trackers.write();
        let mut directory = self.bitmaps.directory.lock();
        let clusters = |directory: &Directory| -> FxHashSet<u64> {
            let tables = directory.entries.iter().flat_map(|e| e.clusters(&self.geometry));
            directory.clusters(&self.geometry).chain(tables).collect()
        };
        let (before, after) = (clusters(&directory), clusters(&new));
        let mut gone: Vec<u64> = before.difference(&after).copied().collect();
        gone.sort_unstable();
        for run in gone.chunk_by(|a, b| a + 1 == *b) {
            self.retire(meta, run[0]..run[run.len() - 1] + 1);
        }
        self.metadata.write().extend(after.difference(&before).copied());
        let guest_bytes = self.guest_len();
        let kept = |entry: &Entry| trackers.iter().find(|t| t.id == entry.id && t.recording);
        let new_trackers: Vec<Arc<Tracker>> = new
            .entries
            .iter()
            .filter(|entry| entry.records())
            .map(|entry| match (kept(entry), entry.bitmap.bits(guest_bytes)) {
                (Some(tracker), bits) if tracker.bits() == bits => tracker.clone(),
                // Has bits that were set since the flush.
                (Some(tracker), bits) => tracker.resized(bits).into(),
                (None, _) => entry.tracker(true, guest_bytes, &self.geometry),
            })
            .collect();
        self.bitmaps.active.store(!new_trackers.is_empty(), Ordering::Release);
        *trackers = new_trackers;
        *directory = new;
    }

    /// Waits until all writes have ended that began before this call, and so before a new bitmap
    /// could record them.
    pub(super) fn writers_ended(&self) {
        let mut meta = self.meta.lock();
        let moment = meta.tickets.moment();
        self.meta.wait_until(&mut meta, |meta| meta.tickets.all_ended_before(moment));
        drop(meta);
        self.drain();
    }

    pub(super) fn no_bitmap(&self, name: &str) -> Error {
        Error::invalid_for(&self.storage.name(), format!("no bitmap is named '{name}'"))
    }
}
