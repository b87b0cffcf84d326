//! The table of blocks, read in pieces as they are needed.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, MapCacheStats, Result, Storage};

use crate::geometry::{Geometry, HOLE};

/// Entries of a page: 4 KiB of the table.
pub(crate) const PAGE_ENTRIES: usize = 1024;
const PAGE_BYTES: u64 = PAGE_ENTRIES as u64 * 4;

/// Few pages are kept at least, so that the smallest cache works.
const PAGES_MIN: usize = 16;

/// Entries of one step of a walk over a whole table.
const STEP_ENTRIES: u64 = 256 << 10;

type Page = Box<[u32; PAGE_ENTRIES]>;

#[derive(Debug, Default)]
struct Pages {
    kept: FxHashMap<u64, Page>,
    /// Changed since they were read or written.
    dirty: BTreeSet<u64>,
    /// Being written: what is on disk may be older than what is here.
    writing: BTreeSet<u64>,
}

/// The cached table.
#[derive(Debug)]
pub(crate) struct Table {
    pages: RwLock<Pages>,
    pages_max: usize,
    /// One page is read at a time, so that nobody puts back what was read before a change.
    loading: Mutex<()>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Changed pages, to be written.
pub(crate) type Changed = Vec<(u64, Page)>;

impl Table {
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self {
            pages: RwLock::default(),
            pages_max: ((cache_bytes / PAGE_BYTES) as usize).max(PAGES_MIN),
            loading: Mutex::default(),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Shows the entries of one page from entry `index` on; nothing where they are not kept.
    pub(crate) fn look<T>(&self, index: u64, look: impl FnOnce(&[u32]) -> T) -> Option<T> {
        let pages = self.pages.read();
        let page = pages.kept.get(&(index / PAGE_ENTRIES as u64))?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        Some(look(&page[index as usize % PAGE_ENTRIES..]))
    }

    /// Reads the page of an entry, where it is not kept. Entries behind the end of the table are
    /// holes.
    pub(crate) fn load(
        &self,
        index: u64,
        geometry: &Geometry,
        storage: &dyn Storage,
    ) -> Result<()> {
        let _one = self.loading.lock();
        let number = index / PAGE_ENTRIES as u64;
        if self.pages.read().kept.contains_key(&number) {
            return Ok(());
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let first = number * PAGE_ENTRIES as u64;
        let count = geometry.entries.saturating_sub(first).min(PAGE_ENTRIES as u64);
        let mut page: Page = Box::new([HOLE; PAGE_ENTRIES]);
        read_entries(storage, geometry, first, &mut page[..count as usize])?;
        let mut pages = self.pages.write();
        if pages.kept.len() >= self.pages_max {
            let Pages { kept, dirty, writing } = &mut *pages;
            kept.retain(|number, _| dirty.contains(number) || writing.contains(number));
        }
        pages.kept.insert(number, page);
        Ok(())
    }

    /// Changes the entries from `first` on, all of them or none: `false` where a page is not kept.
    pub(crate) fn set(&self, first: u64, words: &[u32]) -> bool {
        let page_of = |n: usize| (first + n as u64) / PAGE_ENTRIES as u64;
        let mut pages = self.pages.write();
        if !(0..words.len()).all(|n| pages.kept.contains_key(&page_of(n))) {
            return false;
        }
        for (n, word) in words.iter().enumerate() {
            if let Some(page) = pages.kept.get_mut(&page_of(n)) {
                page[(first as usize + n) % PAGE_ENTRIES] = *word;
                pages.dirty.insert(page_of(n));
            }
        }
        true
    }

    /// Whether pages have changed.
    pub(crate) fn dirty(&self) -> bool {
        !self.pages.read().dirty.is_empty()
    }

    /// Whether so many have changed that they should be written before there are more.
    pub(crate) fn crowded(&self) -> bool {
        self.pages.read().dirty.len() > self.pages_max / 2
    }

    /// Takes copies of the changed pages, which are kept until [`Table::written`].
    pub(crate) fn take_changed(&self) -> Changed {
        let mut pages = self.pages.write();
        pages.writing = std::mem::take(&mut pages.dirty);
        let Pages { kept, writing, .. } = &*pages;
        writing.iter().filter_map(|n| Some((*n, kept.get(n)?.clone()))).collect()
    }

    /// Notes what became of the pages that were taken.
    pub(crate) fn written(&self, done: bool) {
        let mut pages = self.pages.write();
        let writing = std::mem::take(&mut pages.writing);
        if !done {
            pages.dirty.extend(writing);
        }
    }

    /// Forgets all pages; none may be dirty.
    pub(crate) fn forget(&self) {
        *self.pages.write() = Pages::default();
    }

    pub(crate) fn stats(&self, geometry: &Geometry) -> MapCacheStats {
        MapCacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            used_bytes: self.pages.read().kept.len() as u64 * PAGE_BYTES,
            capacity_bytes: self.pages_max as u64 * PAGE_BYTES,
            map_bytes: geometry.table_bytes(),
        }
    }
}

/// Writes pages that were taken.
pub(crate) fn write_pages(
    storage: &dyn Storage,
    geometry: &Geometry,
    pages: &[(u64, Page)],
) -> Result<()> {
    for (number, page) in pages {
        let first = number * PAGE_ENTRIES as u64;
        let count = geometry.entries.saturating_sub(first).min(PAGE_ENTRIES as u64);
        write_entries(storage, geometry, first, &page[..count as usize])?;
    }
    Ok(())
}

/// Reads entries from `first` on.
///
/// # Errors
/// Those of the storage; a table that ends behind the end of the file is one.
pub fn read_entries(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    out: &mut [u32],
) -> Result<()> {
    let mut bytes = vec![0; out.len() * 4];
    storage.read_at(&mut bytes, HostOffset(geometry.entry_at(first)))?;
    for (word, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = geometry.order.read(*bytes);
    }
    Ok(())
}

/// Writes entries from `first` on.
///
/// # Errors
/// Those of the storage.
pub fn write_entries(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    words: &[u32],
) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| geometry.order.bytes(*word)).collect();
    storage.write_at(&bytes, HostOffset(geometry.entry_at(first)))
}

/// Writes `count` entries of blocks that are not there.
///
/// # Errors
/// Those of the storage.
pub fn write_holes(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    count: u64,
) -> Result<()> {
    let piece = vec![HOLE; STEP_ENTRIES.min(count) as usize];
    let mut done = 0;
    while done < count {
        let step = STEP_ENTRIES.min(count - done);
        write_entries(storage, geometry, first + done, &piece[..step as usize])?;
        done += step;
    }
    Ok(())
}

/// Shows all entries of a table, some at a time: the first one's index, and what is there. What
/// `look` changes is written where it says so.
pub(crate) fn walk(
    storage: &dyn Storage,
    geometry: &Geometry,
    mut look: impl FnMut(u64, &mut [u32]) -> Result<bool>,
) -> Result<()> {
    let mut words = vec![0; STEP_ENTRIES.min(geometry.entries) as usize];
    let mut first = 0;
    while first < geometry.entries {
        let count = STEP_ENTRIES.min(geometry.entries - first) as usize;
        read_entries(storage, geometry, first, &mut words[..count])?;
        if look(first, &mut words[..count])? {
            write_entries(storage, geometry, first, &words[..count])?;
        }
        first += count as u64;
    }
    Ok(())
}
