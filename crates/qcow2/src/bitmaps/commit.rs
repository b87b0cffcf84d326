//! A new directory of bitmaps: new tables, a barrier, one switch in the header, and then the old
//! ones are let go.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;
use rustc_hash::FxHashSet;
use vdkit_block::{Error, HostOffset, Result};

use super::bits::Tracker;
use super::state::{Directory, Entry};
use super::{Bitmap, encode};
use crate::image::{FlushState, Freed, Meta, Qcow2};
use crate::pool::Space;

/// One bitmap of the new directory.
pub(super) struct Wanted {
    /// Name, flags, granularity.
    pub(super) bitmap: Bitmap,
    /// The id of the bitmap whose table it keeps, or a new table without clusters.
    pub(super) table: WantedTable,
}

/// The table of a bitmap of the new directory.
pub(super) enum WantedTable {
    /// That of the bitmap with this id.
    Keep(u64),
    /// A new one. It names clusters only if the bitmap with the id names them now.
    New(Vec<u64>),
}

impl Qcow2 {
    /// What the directory says now, to be changed.
    pub(super) fn wanted(&self) -> Vec<Wanted> {
        let directory = self.bitmaps.directory.lock();
        let keep = |e: &Entry| Wanted { bitmap: e.bitmap.clone(), table: WantedTable::Keep(e.id) };
        directory.entries.iter().map(keep).collect()
    }

    /// Switches to a new directory, which is `valid`. The caller holds `admin` and `flushing`; all
    /// that was written before is flushed first.
    pub(super) fn commit_bitmaps(
        &self,
        _flushing: &MutexGuard<'_, FlushState>,
        wanted: Vec<Wanted>,
        valid: bool,
    ) -> Result<()> {
        self.flush_once()?;
        let mut meta = self.meta.lock();
        self.before_change(&mut meta)?;
        let mut taken = Vec::new();
        let written = self
            .write_directory(&mut meta, wanted, &mut taken)
            .and_then(|new| self.write_refcounts(&mut meta).map(|()| new));
        let new = match written {
            Ok(new) => new,
            Err(error) => {
                for space in taken {
                    meta.pool.add(Space { fresh: false, ..space });
                }
                return Err(error);
            }
        };
        // Where this fails nobody knows which one the header names: the space stays reserved.
        self.switch_directory(new.entries.len() as u32, new.place, valid)?;
        self.install(&mut meta, new);
        Ok(())
    }

    fn write_directory(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        wanted: Vec<Wanted>,
        taken: &mut Vec<Space>,
    ) -> Result<Directory> {
        let (old, next_id) = {
            let directory = self.bitmaps.directory.lock();
            (directory.entries.clone(), directory.next_id)
        };
        let mut new = Directory { entries: Vec::new(), place: None, next_id };
        for Wanted { mut bitmap, table } in wanted {
            let entry = match table {
                WantedTable::Keep(id) => {
                    let kept = old.iter().find(|entry| entry.id == id);
                    let Some(kept) = kept else { unreachable!("under the admin lock") };
                    Entry { bitmap, ..kept.clone() }
                }
                WantedTable::New(table) => {
                    let raw: Vec<u8> = table.iter().flat_map(|w| w.to_be_bytes()).collect();
                    bitmap.table_offset = self.write_new(meta, &raw, taken)?;
                    bitmap.table_entries = table.len() as u32;
                    let id = new.next_id;
                    new.next_id += 1;
                    Entry { id, bitmap, table: Some(table), unwritten: BTreeSet::new() }
                }
            };
            new.entries.push(entry);
        }
        if !new.entries.is_empty() {
            let raw = encode(new.entries.iter().map(|entry| &entry.bitmap));
            new.place = Some((self.write_new(meta, &raw, taken)?, raw.len() as u64));
        }
        Ok(new)
    }

    /// Writes bytes to new clusters.
    fn write_new(
        &self,
        meta: &mut MutexGuard<'_, Meta>,
        raw: &[u8],
        taken: &mut Vec<Space>,
    ) -> Result<HostOffset> {
        let clusters = (raw.len() as u64).div_ceil(self.geometry.cluster_bytes());
        let space = self.allocate_whole(meta, clusters)?;
        taken.push(space);
        let at = HostOffset(space.first << self.geometry.cluster_bits);
        self.storage.write_at(raw, at)?;
        Ok(at)
    }

    /// Makes the refcounts durable, with all that was written before.
    fn write_refcounts(&self, meta: &mut Meta) -> Result<()> {
        let dirty = meta.refcounts.take_dirty();
        let written = dirty
            .writes
            .iter()
            .try_for_each(|(at, bytes)| self.storage.write_at(bytes, HostOffset(*at)))
            .and_then(|()| self.storage.sync());
        match written {
            Ok(()) => {
                meta.refcounts.written(dirty);
                Ok(())
            }
            Err(error) => {
                meta.refcounts.restore_dirty(dirty);
                Err(error)
            }
        }
    }

    /// Takes the new directory into use, and lets go of clusters that only the old one named.
    fn install(&self, meta: &mut Meta, new: Directory) {
        let mut trackers = self.bitmaps.trackers.write();
        let mut directory = self.bitmaps.directory.lock();
        let clusters = |directory: &Directory| -> FxHashSet<u64> {
            let tables = directory.entries.iter().flat_map(|e| e.clusters(&self.geometry));
            directory.clusters(&self.geometry).chain(tables).collect()
        };
        let (before, after) = (clusters(&directory), clusters(&new));
        let stamp = self.in_flight.stamp();
        let mut gone: Vec<u64> = before.difference(&after).copied().collect();
        gone.sort_unstable();
        let mut metadata = self.metadata.write();
        for cluster in gone {
            metadata.remove(&cluster);
            meta.released.push(Freed { first: cluster, count: 1, stamp, punch: false });
        }
        metadata.extend(after.difference(&before));
        let guest_bytes = self.guest_len();
        let kept = |entry: &Entry| trackers.iter().find(|t| t.id == entry.id && t.recording);
        let new_trackers: Vec<Arc<Tracker>> = new
            .entries
            .iter()
            .filter(|entry| entry.records())
            .map(|entry| match kept(entry) {
                Some(tracker) => tracker.clone(),
                None => entry.tracker(true, guest_bytes, &self.geometry),
            })
            .collect();
        self.bitmaps.active.store(!new_trackers.is_empty(), Ordering::Release);
        *trackers = new_trackers;
        *directory = new;
    }

    /// Waits until each write that had begun has ended: those that began before a bitmap was there
    /// to record them.
    pub(super) fn writers_ended(&self) {
        let mut meta = self.meta.lock();
        let upto = meta.next_ticket;
        while meta.pending.keys().any(|ticket| ticket.0 < upto) {
            self.ended.wait(&mut meta);
        }
        drop(meta);
        let stamp = self.in_flight.stamp();
        while !self.in_flight.passed(stamp) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// The error for a bitmap that is not there.
    pub(super) fn no_bitmap(&self, name: &str) -> Error {
        Error::Invalid(format!("{}: no bitmap is named '{name}'", self.storage.name()))
    }
}
