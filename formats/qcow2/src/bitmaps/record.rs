//! Records writes, and adds the changes to each flush.
//!
//! A bit is set in memory before its write is issued. A flush writes pages with new bits in its
//! first group, before the map entries that expose new data, and table entries for new clusters of
//! a bitmap in the second. So at each moment the bitmap on disk is a superset of what was flushed,
//! and it never has to be marked as in use.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vdkit_block::{ErrorKind, HostOffset, Result, ZeroMode};
use vdkit_meta::MutexGuard;

use super::ALL_ONES;
use super::bits::{Page, Tracker, Words};
use crate::image::{Meta, Qcow2};
use crate::pool::Space;

/// Copies of dirty pages and table entries at one moment.
#[derive(Debug, Default)]
pub(crate) struct BitmapCopies {
    /// Host offset and bytes of pages, adjacent ones merged: for the first group.
    pub(crate) pages: Vec<(u64, Vec<u8>)>,
    /// Host offset and bytes of table entries: for the second group.
    pub(crate) tables: Vec<(u64, Vec<u8>)>,
    taken: Vec<(Arc<Tracker>, usize, Vec<u64>)>,
    linked: Vec<(u64, usize)>,
}

impl BitmapCopies {
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.tables.is_empty()
    }
}

impl Qcow2 {
    /// As [`vdkit_block::Format::note_write`]. Must not be called under the metadata lock.
    pub(crate) fn note(&self, guest: Range<u64>) -> Result<()> {
        if !self.bitmaps.active.load(Ordering::Acquire) || guest.is_empty() {
            return Ok(());
        }
        let trackers = self.bitmaps.trackers.read();
        for tracker in trackers.iter().filter(|tracker| tracker.recording) {
            self.note_in(tracker, guest.clone())?;
        }
        Ok(())
    }

    /// Sets bits in one bitmap.
    pub(super) fn note_in(&self, tracker: &Tracker, guest: Range<u64>) -> Result<()> {
        tracker.mark(guest, |page| self.load_page(tracker, page)).map(|_| ())
    }

    /// The place of a page: its table entry, the index of that entry, and the offset in the
    /// cluster.
    fn page_place(&self, tracker: &Tracker, page: usize) -> (Option<u64>, usize, u64) {
        let at = page as u64 * tracker.page_bytes();
        let index = (at >> self.geometry.cluster_bits) as usize;
        let mut directory = self.bitmaps.directory.lock();
        let table = directory.by_id(tracker.id).and_then(|entry| entry.table.as_ref());
        let word = table.and_then(|table| table.get(index)).copied();
        (word, index, at & (self.geometry.cluster_bytes() - 1))
    }

    fn load_page(&self, tracker: &Tracker, page: usize) -> Result<Page> {
        let mut bytes = vec![0; tracker.page_bytes() as usize];
        match self.page_place(tracker, page) {
            (Some(ALL_ONES), ..) => return Ok(Page::Ones),
            (None | Some(0), ..) => {}
            (Some(cluster), _, inside) => {
                self.storage.read_padded(&mut bytes, HostOffset(cluster + inside))?;
            }
        }
        Ok(Page::Bits(Arc::new(Words::from_disk(&bytes))))
    }

    fn trackers(&self) -> Vec<Arc<Tracker>> {
        if !self.bitmaps.active.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.bitmaps.trackers.read().clone()
    }

    /// Whether a bitmap has unwritten changes.
    pub(crate) fn bitmaps_unwritten(&self) -> bool {
        self.trackers().iter().any(|tracker| {
            let mut directory = self.bitmaps.directory.lock();
            let linked = directory.by_id(tracker.id).is_none_or(|e| e.unwritten.is_empty());
            !linked || !tracker.dirty_pages().is_empty()
        })
    }

    /// Allocates clusters for dirty pages that have none. The caller holds the lead, and no copies
    /// are being written. If no space is left, the table entry becomes "all bits set", which needs
    /// no cluster and is still a superset.
    pub(crate) fn place_bitmaps(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<()> {
        for tracker in self.trackers() {
            for page in tracker.dirty_pages() {
                let (Some(0), index, _) = self.page_place(&tracker, page) else { continue };
                let word = match self.bitmap_cluster(meta) {
                    Ok(offset) => offset.0,
                    Err(error) if error.kind() == ErrorKind::NoSpace => ALL_ONES,
                    Err(error) => return Err(error),
                };
                let mut directory = self.bitmaps.directory.lock();
                if let Some(entry) = directory.by_id(tracker.id)
                    && let Some(table) = &mut entry.table
                {
                    table[index] = word;
                    entry.unwritten.insert(index);
                }
            }
        }
        Ok(())
    }

    /// Allocates a cluster that reads as zero.
    fn bitmap_cluster(&self, meta: &mut MutexGuard<'_, Meta>) -> Result<HostOffset> {
        let space = loop {
            if let Some(space) = self.allocate_table(meta)? {
                break space;
            }
        };
        let offset = HostOffset(space.first << self.geometry.cluster_bits);
        if !space.fresh {
            let cluster = self.geometry.cluster_bytes();
            if let Err(error) = self.storage.write_zeroes(offset, cluster, ZeroMode::KeepAllocated)
            {
                meta.space.pool.add(Space { fresh: false, ..space });
                return Err(error);
            }
        }
        self.metadata.write().insert(space.first);
        Ok(offset)
    }

    /// Takes copies of everything dirty, to be written.
    pub(crate) fn copy_bitmaps(&self) -> BitmapCopies {
        let mut copies = BitmapCopies::default();
        for tracker in self.trackers() {
            for page in tracker.take_dirty() {
                let (word, _, inside) = self.page_place(&tracker, page);
                let cluster = match word {
                    Some(ALL_ONES) | None => continue,
                    Some(0) => {
                        // Became dirty after clusters were allocated, so the next flush writes it:
                        // its guest write had not ended when this flush was requested.
                        tracker.set_dirty(page);
                        continue;
                    }
                    Some(cluster) => cluster,
                };
                let Some(Page::Bits(words)) = tracker.loaded(page) else { continue };
                let words = words.copy();
                let bytes = words.iter().flat_map(|word| word.to_le_bytes());
                match copies.pages.last_mut() {
                    Some((at, last)) if *at + last.len() as u64 == cluster + inside => {
                        last.extend(bytes);
                    }
                    _ => copies.pages.push((cluster + inside, bytes.collect())),
                }
                copies.taken.push((tracker.clone(), page, words));
            }
            if let Some(entry) = self.bitmaps.directory.lock().by_id(tracker.id)
                && let Some(table) = &entry.table
            {
                for index in std::mem::take(&mut entry.unwritten) {
                    let at = entry.bitmap.table_offset.0 + index as u64 * 8;
                    copies.tables.push((at, table[index].to_be_bytes().to_vec()));
                    copies.linked.push((tracker.id, index));
                }
            }
        }
        copies
    }

    pub(crate) fn bitmaps_flushed(&self, copies: BitmapCopies) {
        for (tracker, page, words) in copies.taken {
            tracker.settle(page, &words);
        }
    }

    /// The flush failed: the copies are dirty again.
    pub(crate) fn bitmaps_failed(&self, copies: BitmapCopies) {
        for (tracker, page, _) in copies.taken {
            tracker.set_dirty(page);
        }
        let mut directory = self.bitmaps.directory.lock();
        for (id, index) in copies.linked {
            if let Some(entry) = directory.by_id(id) {
                entry.unwritten.insert(index);
            }
        }
    }
}
