//! Resizes bitmaps with their disk.
//!
//! If every bitmap's table keeps its length, the bitmaps stay valid throughout: the added range is
//! marked before the disk grows. Otherwise tables and disk size would have to change atomically,
//! but they are in different sectors. So the bitmaps are first declared invalid, and valid again at
//! the end. A power cut in between invalidates them.

use std::sync::atomic::Ordering;

use vdkit_block::Result;

use super::commit::WantedTable;
use super::{flag, table_entries_for};
use crate::image::{Lead, Qcow2};

/// Result of [`Qcow2::bitmaps_before_resize`].
pub(crate) struct Resizing {
    /// Tables change their length, so the bitmaps are invalid meanwhile.
    suspended: bool,
    old: u64,
    new: u64,
}

impl Qcow2 {
    /// Must be called before a resize. The caller holds `admin` and the lead until after
    /// [`Qcow2::bitmaps_after_resize`].
    pub(crate) fn bitmaps_before_resize(&self, old: u64, new: u64) -> Result<Resizing> {
        let cluster = self.geometry.cluster_bytes();
        let entries = |bits: u64| table_entries_for(bits, cluster);
        let suspended = {
            let directory = self.bitmaps.directory.lock();
            let mut usable = directory.entries.iter().filter(|entry| entry.usable());
            usable.any(|e| entries(e.bitmap.bits(old)) != entries(e.bitmap.bits(new)))
        };
        let resizing = Resizing { suspended, old, new };
        if suspended {
            self.set_bitmaps_valid(&mut self.meta.lock(), false)?;
        } else if new > old {
            self.resize_trackers(new);
            self.note(old..new)?;
        }
        Ok(resizing)
    }

    /// Must be called after the resize, also after a failed one.
    pub(crate) fn bitmaps_after_resize(
        &self,
        lead: &mut Lead<'_>,
        resizing: &Resizing,
    ) -> Result<()> {
        let size = self.guest_len();
        if !resizing.suspended {
            self.resize_trackers(size);
            return Ok(());
        }
        if size == resizing.new
            && let Err(error) = self.resize_bitmaps(lead, resizing)
        {
            self.distrust_bitmaps();
            return Err(error);
        }
        self.set_bitmaps_valid(&mut self.meta.lock(), true)
    }

    fn resize_bitmaps(&self, lead: &mut Lead<'_>, resizing: &Resizing) -> Result<()> {
        self.resize_tables(lead, resizing.new)?;
        if resizing.new > resizing.old {
            self.note(resizing.old..resizing.new)?;
            self.meta.flush_led(self, lead)?;
        }
        Ok(())
    }

    /// Marks all bitmaps as in use, and so untrusted, in the next directory to be written, which
    /// will be declared valid.
    fn distrust_bitmaps(&self) {
        let mut trackers = self.bitmaps.trackers.write();
        self.bitmaps.active.store(false, Ordering::Release);
        trackers.clear();
        for entry in &mut self.bitmaps.directory.lock().entries {
            entry.bitmap.flags |= flag::IN_USE;
        }
    }

    fn resize_trackers(&self, guest_bytes: u64) {
        let mut trackers = self.bitmaps.trackers.write();
        let mut directory = self.bitmaps.directory.lock();
        for tracker in trackers.iter_mut() {
            if let Some(entry) = directory.by_id(tracker.id) {
                *tracker = tracker.resized(entry.bitmap.bits(guest_bytes)).into();
            }
        }
    }

    /// Writes each usable bitmap a table for the new size that keeps the remaining clusters.
    fn resize_tables(&self, lead: &mut Lead<'_>, guest_bytes: u64) -> Result<()> {
        let mut wanted = self.wanted();
        {
            let directory = self.bitmaps.directory.lock();
            for (entry, one) in directory.entries.iter().zip(&mut wanted) {
                if entry.usable() {
                    let bits = entry.bitmap.bits(guest_bytes);
                    let entries = table_entries_for(bits, self.geometry.cluster_bytes());
                    one.table = WantedTable::Resized(entry.id, entries);
                }
            }
        }
        self.commit_bitmaps(lead, wanted, false)
    }
}
