//! Bitmap operations of users.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vdkit_block::{BitmapStatus, Bitmaps, Error, HostOffset, Limits, NewBitmap, Result, Storage};

use super::bits::{Page, Tracker};
use super::commit::{Wanted, WantedTable};
use super::state::{Directory, Entry};
use super::{
    ALL_ONES, BITMAP_BYTES_MAX, BITMAPS_MAX, Bitmap, DIRECTORY_BYTES_MAX, GRANULARITY_BITS,
    NAME_BYTES_MAX, encode, flag, table_entries_for,
};
use crate::header::Header;
use crate::image::{Lead, Qcow2};

/// QEMU's choice of granularity is the cluster size within these bounds.
const GRANULARITY_DEFAULT: Range<u64> = 4 << 10..64 << 10;

impl Qcow2 {
    /// All bitmaps with their tables; a read-only image reads them on each call.
    fn entries(&self) -> Result<Vec<Entry>> {
        if self.writable {
            return Ok(self.bitmaps.directory.lock().entries.clone());
        }
        let (storage, limits): (&dyn Storage, &Limits) = (&*self.storage, &self.bitmaps.limits);
        let header = Header::read(storage, limits)?;
        Ok(Directory::read(&header, self.guest_len(), storage, limits, &mut Vec::new())?.entries)
    }

    fn entry(&self, name: &str) -> Result<Entry> {
        let found = self.entries()?.into_iter().find(|e| e.bitmap.name == name.as_bytes());
        let entry = found.ok_or_else(|| self.no_bitmap(name))?;
        if entry.usable() {
            return Ok(entry);
        }
        let why = if entry.table.is_none() {
            "is damaged"
        } else {
            "was in use when the image was last closed by other software"
        };
        Err(Error::invalid_for(
            &self.storage.name(),
            format!("bitmap '{name}' {why} and cannot be trusted; remove it and add a new one"),
        ))
    }

    /// Changes the directory: `change` edits the list of bitmaps.
    fn change(&self, change: impl FnOnce(&Self, &mut Vec<Wanted>) -> Result<()>) -> Result<()> {
        self.need_writable()?;
        let _admin = self.bitmaps.admin.lock();
        let mut wanted = self.wanted();
        change(self, &mut wanted)?;
        self.commit_bitmaps(&mut self.meta.lead(), wanted, true)?;
        self.writers_ended();
        Ok(())
    }

    /// [`Qcow2::change`] of one usable bitmap.
    fn change_one(&self, name: &str, change: impl FnOnce(&mut Wanted)) -> Result<()> {
        self.change(|image, wanted| {
            image.entry(name)?;
            match wanted.iter_mut().find(|w| w.bitmap.name == name.as_bytes()) {
                Some(one) => change(one),
                None => return Err(image.no_bitmap(name)),
            }
            Ok(())
        })
    }

    fn granularity_bits(&self, wanted: Option<u64>) -> Result<u8> {
        let bounds = GRANULARITY_DEFAULT;
        let bytes = wanted.unwrap_or(self.geometry.cluster_bytes().clamp(bounds.start, bounds.end));
        let bits = bytes.trailing_zeros() as u8;
        if !bytes.is_power_of_two() || !GRANULARITY_BITS.contains(&bits) {
            return Err(Error::invalid(format!(
                "a granularity of {bytes} bytes is not possible: it is a power of two from 512 to \
                 2 GiB"
            )));
        }
        let cluster = self.geometry.cluster_bytes();
        let entries = |bits: u8| table_entries_for(self.guest_len().div_ceil(1 << bits), cluster);
        let fits = |bits: u8| {
            entries(bits) * cluster <= BITMAP_BYTES_MAX
                && entries(bits) * 8 <= self.bitmaps.limits.table_bytes_max
        };
        if fits(bits) {
            return Ok(bits);
        }
        let least = GRANULARITY_BITS.into_iter().find(|&bits| fits(bits));
        Err(Error::invalid_for(
            &self.storage.name(),
            format!(
                "a bitmap with a granularity of {bytes} bytes would be larger than a bitmap can \
             be{}",
                least.map_or_else(String::new, |bits| format!(
                    "; at least {} will do",
                    1u64 << bits
                ))
            ),
        ))
    }

    fn new_bitmap(&self, new: &NewBitmap<'_>) -> Result<Wanted> {
        if new.name.is_empty() || new.name.len() > NAME_BYTES_MAX || new.name.contains('\0') {
            return Err(Error::invalid(format!(
                "a bitmap's name has 1 to {NAME_BYTES_MAX} bytes and no zero byte"
            )));
        }
        if self.header.version() < 3 {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: bitmaps in a version 2 image",
                "convert to compat=1.1",
            ));
        }
        let granularity_bits = self.granularity_bits(new.granularity)?;
        let mut bitmap = Bitmap {
            table_offset: HostOffset(0),
            table_entries: 0,
            flags: if new.enabled { flag::AUTO } else { 0 },
            granularity_bits,
            name: new.name.as_bytes().to_vec(),
            extra: Vec::new(),
        };
        let entries =
            table_entries_for(bitmap.bits(self.guest_len()), self.geometry.cluster_bytes());
        bitmap.table_entries = entries as u32;
        Ok(Wanted { bitmap, table: WantedTable::New(vec![0; entries as usize]) })
    }

    /// The directory for [`Bitmaps::mark_all_dirty`]; `None` if no bitmap records.
    fn all_dirty(&self) -> Option<Vec<Wanted>> {
        let mut wanted = self.wanted();
        let directory = self.bitmaps.directory.lock();
        let mut some = false;
        for (entry, one) in directory.entries.iter().zip(&mut wanted) {
            if entry.records() {
                let entries = entry.bitmap.table_entries as usize;
                one.table = WantedTable::New(vec![ALL_ONES; entries]);
                some = true;
            }
        }
        some.then_some(wanted)
    }

    /// [`Bitmaps::mark_all_dirty`] for callers that hold `bitmaps.admin` and the lead, such as
    /// applying a snapshot. Durable; does nothing if no bitmap records.
    pub(crate) fn mark_bitmaps_dirty(&self, lead: &mut Lead<'_>) -> Result<()> {
        match self.all_dirty() {
            Some(wanted) => self.commit_bitmaps(lead, wanted, true),
            None => Ok(()),
        }
    }

    /// Calls `found` for each dirty run of a bitmap; adjacent runs are merged.
    fn visit_dirty(
        &self,
        entry: &Entry,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let Some(table) = &entry.table else { return Ok(()) };
        let tracker = self.bitmaps.trackers.read().iter().find(|t| t.id == entry.id).cloned();
        let size = self.guest_len();
        let shift = u32::from(entry.bitmap.granularity_bits);
        let cluster = self.geometry.cluster_bytes();
        let mut run = 0..0;
        let mut add = |first: u64, count: u64| -> Result<()> {
            let start = (first << shift).min(size);
            let end = ((first + count) << shift).min(size);
            if start == run.end {
                run.end = end;
            } else {
                let done = std::mem::replace(&mut run, start..end);
                if !done.is_empty() {
                    found(done)?;
                }
            }
            Ok(())
        };
        let bits = entry.bitmap.bits(size);
        let mut bytes = vec![0; cluster as usize];
        for (index, &word) in table.iter().enumerate() {
            let first = index as u64 * cluster * 8;
            let count = (cluster * 8).min(bits.saturating_sub(first));
            if word == ALL_ONES {
                add(first, count)?;
                continue;
            }
            if word == 0 {
                bytes.fill(0);
            } else {
                self.storage.read_padded(&mut bytes, HostOffset(word))?;
            }
            let newer = tracker.as_deref().is_some_and(|t| overlay(t, first / 8, &mut bytes));
            if word != 0 || newer {
                for_runs(&bytes, count, |at, count| add(first + at, count))?;
            }
        }
        if run.is_empty() { Ok(()) } else { found(run) }
    }

    fn dirty_bytes(&self, entry: &Entry) -> Result<u64> {
        let mut sum = 0;
        self.visit_dirty(entry, &mut |run| {
            sum += run.end - run.start;
            Ok(())
        })?;
        Ok(sum)
    }

    /// Sets in one bitmap the bits that are set in another.
    fn merge_into(&self, tracker: &Tracker, source: &dyn Bitmaps, source_name: &str) -> Result<()> {
        let size = self.guest_len();
        source.for_each_dirty(source_name, &mut |run| {
            let run = run.start.min(size)..run.end.min(size);
            if run.is_empty() { Ok(()) } else { self.note_in(tracker, run) }
        })
    }
}

/// Overlays a bitmap cluster, which begins at byte `from` of the bitmap, with the pages in memory.
/// Returns whether there were any.
fn overlay(tracker: &Tracker, from: u64, bytes: &mut [u8]) -> bool {
    let step = tracker.page_bytes();
    let mut some = false;
    for (i, part) in bytes.chunks_exact_mut(step as usize).enumerate() {
        if let Some(Page::Bits(words)) = tracker.loaded((from / step) as usize + i) {
            for (out, word) in part.chunks_exact_mut(8).zip(words.copy()) {
                out.copy_from_slice(&word.to_le_bytes());
            }
            some = true;
        }
    }
    some
}

/// Calls `found` with the runs of set bits among the first `count`: first bit and number.
fn for_runs(bytes: &[u8], count: u64, mut found: impl FnMut(u64, u64) -> Result<()>) -> Result<()> {
    let mut start = None;
    for (i, raw) in bytes.as_chunks::<8>().0.iter().enumerate() {
        let at = i as u64 * 64;
        let word = u64::from_le_bytes(*raw);
        if at >= count {
            break;
        }
        // Most words do not end or begin a run.
        if (word == 0 && start.is_none()) || (word == u64::MAX && start.is_some()) {
            continue;
        }
        for bit in 0..64.min(count - at) {
            match (word >> bit & 1 != 0, start) {
                (true, None) => start = Some(at + bit),
                (false, Some(first)) => {
                    found(first, at + bit - first)?;
                    start = None;
                }
                _ => {}
            }
        }
    }
    let end = count.min(bytes.len() as u64 * 8);
    match start {
        Some(first) => found(first, end - first),
        None => Ok(()),
    }
}

impl Bitmaps for Qcow2 {
    fn list(&self) -> Result<Vec<BitmapStatus>> {
        // While the lead is held, no cluster changes its owner.
        let _lead = self.meta.lead();
        let status = |entry: &Entry| {
            let dirty_bytes = entry.usable().then(|| self.dirty_bytes(entry)).transpose()?;
            let mut info = entry.bitmap.info();
            info.in_use |= entry.table.is_none();
            Ok(BitmapStatus { info, dirty_bytes })
        };
        self.entries()?.iter().map(status).collect()
    }

    fn for_each_dirty(
        &self,
        name: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let _lead = self.meta.lead();
        let entry = self.entry(name)?;
        self.visit_dirty(&entry, found)
    }

    fn check_new(&self, new: &NewBitmap<'_>) -> Result<()> {
        self.new_bitmap(new).map(drop)
    }

    fn add(&self, new: &NewBitmap<'_>) -> Result<()> {
        self.change(|image, wanted| {
            let one = image.new_bitmap(new)?;
            let file = image.storage.name();
            if wanted.iter().any(|w| w.bitmap.name == one.bitmap.name) {
                return Err(Error::invalid_for(
                    &file,
                    format!("there is a bitmap named '{}' already", new.name),
                ));
            }
            wanted.push(one);
            let most = DIRECTORY_BYTES_MAX.min(image.bitmaps.limits.table_bytes_max);
            let bytes = encode(wanted.iter().map(|w| &w.bitmap)).len() as u64;
            if wanted.len() > BITMAPS_MAX as usize || bytes > most {
                return Err(Error::invalid_for(&file, "it has the maximum number of bitmaps"));
            }
            Ok(())
        })
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.change(|image, wanted| {
            let at = wanted.iter().position(|w| w.bitmap.name == name.as_bytes());
            wanted.remove(at.ok_or_else(|| image.no_bitmap(name))?);
            Ok(())
        })
    }

    fn clear(&self, name: &str) -> Result<()> {
        self.change_one(name, |one| {
            one.table = WantedTable::New(vec![0; one.bitmap.table_entries as usize]);
        })
    }

    fn set_enabled(&self, name: &str, enabled: bool) -> Result<()> {
        self.change_one(name, |one| {
            one.bitmap.flags &= !flag::AUTO;
            one.bitmap.flags |= if enabled { flag::AUTO } else { 0 };
        })
    }

    fn merge(&self, name: &str, source: &dyn Bitmaps, source_name: &str) -> Result<()> {
        self.need_writable()?;
        let _admin = self.bitmaps.admin.lock();
        let entry = self.entry(name)?;
        let recording = self.bitmaps.trackers.read().iter().find(|t| t.id == entry.id).cloned();
        if let Some(tracker) = recording {
            self.merge_into(&tracker, source, source_name)?;
            return self.meta.flush(self);
        }
        // The pages of a bitmap that does not record are in memory only during the merge.
        let tracker = entry.tracker(false, self.guest_len(), &self.geometry);
        self.bitmaps.trackers.write().push(Arc::clone(&tracker));
        self.bitmaps.active.store(true, Ordering::Release);
        let merged =
            self.merge_into(&tracker, source, source_name).and_then(|()| self.meta.flush(self));
        let mut trackers = self.bitmaps.trackers.write();
        trackers.retain(|t| t.id != entry.id);
        self.bitmaps.active.store(!trackers.is_empty(), Ordering::Release);
        merged
    }

    fn mark_all_dirty(&self) -> Result<()> {
        self.need_writable()?;
        let _admin = self.bitmaps.admin.lock();
        self.mark_bitmaps_dirty(&mut self.meta.lead())
    }
}
