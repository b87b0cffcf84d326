//! Pages of metadata in memory: of the block allocation table and of sector bitmaps, 4 KiB each, by
//! their offset in the file.
//!
//! A changed page stays until it is written; others go when there are too many.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, MapCacheStats, Result, Storage};

use crate::layout::PAGE_BYTES;
use crate::log::entry::LoggedPage;

const PAGE: usize = PAGE_BYTES as usize;
/// So few pages would make each request read.
const PAGES_MIN: usize = 64;

#[derive(Debug, Default)]
struct Inner {
    pages: FxHashMap<u64, Box<[u8; PAGE]>>,
    dirty: BTreeSet<u64>,
    /// Copied for a flush that has not ended: what is in the file may be older.
    writing: BTreeSet<u64>,
    /// How often pages went: what was read before then may be old.
    evictions: u64,
}

/// The pages.
#[derive(Debug)]
pub(crate) struct Pages {
    inner: RwLock<Inner>,
    capacity: usize,
    hits: AtomicU64,
    misses: AtomicU64,
}

impl Pages {
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self {
            inner: RwLock::default(),
            capacity: ((cache_bytes / PAGE_BYTES) as usize).max(PAGES_MIN),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Looks at a page, if it is in memory.
    pub(crate) fn with<R>(&self, at: u64, look: impl FnOnce(&[u8; PAGE]) -> R) -> Option<R> {
        let inner = self.inner.read();
        let page = inner.pages.get(&at);
        let counter = if page.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        page.map(|page| look(page))
    }

    /// Looks at a page, read where it is not in memory.
    pub(crate) fn with_loaded<R>(
        &self,
        at: u64,
        storage: &dyn Storage,
        look: impl Fn(&[u8; PAGE]) -> R,
    ) -> Result<R> {
        loop {
            if let Some(result) = self.with(at, &look) {
                return Ok(result);
            }
            self.load(at, storage)?;
        }
    }

    fn load(&self, at: u64, storage: &dyn Storage) -> Result<()> {
        loop {
            let before = self.inner.read().evictions;
            let mut page = Box::new([0; PAGE]);
            storage.read_padded(&mut page[..], HostOffset(at))?;
            let mut inner = self.inner.write();
            if inner.pages.contains_key(&at) {
                return Ok(());
            }
            if inner.evictions != before {
                // It may have been here, changed, written, and gone, since it was read.
                continue;
            }
            inner.make_room(self.capacity);
            inner.pages.insert(at, page);
            return Ok(());
        }
    }

    /// Changes a page, read where it is not in memory. Returns whether it is newly dirty.
    pub(crate) fn change(
        &self,
        at: u64,
        storage: &dyn Storage,
        change: impl FnOnce(&mut [u8; PAGE]),
    ) -> Result<()> {
        loop {
            let mut inner = self.inner.write();
            if let Some(page) = inner.pages.get_mut(&at) {
                change(page);
                inner.dirty.insert(at);
                return Ok(());
            }
            drop(inner);
            self.load(at, storage)?;
        }
    }

    /// How many pages are dirty.
    pub(crate) fn dirty(&self) -> usize {
        self.inner.read().dirty.len()
    }

    /// Copies of all dirty pages, which count as clean from now on, but stay until
    /// [`Pages::written`] or [`Pages::failed`].
    pub(crate) fn begin_write(&self) -> Vec<LoggedPage> {
        let mut inner = self.inner.write();
        let dirty = std::mem::take(&mut inner.dirty);
        let copies =
            dirty.iter().filter_map(|at| Some((*at, inner.pages.get(at)?.clone()))).collect();
        inner.writing = dirty;
        copies
    }

    /// What was copied is in the file.
    pub(crate) fn written(&self) {
        let mut inner = self.inner.write();
        inner.writing.clear();
        inner.make_room(self.capacity);
    }

    /// What was copied may not be in the file.
    pub(crate) fn failed(&self) {
        let mut inner = self.inner.write();
        let mut writing = std::mem::take(&mut inner.writing);
        inner.dirty.append(&mut writing);
    }

    /// Forgets everything; nothing may be dirty.
    pub(crate) fn clear(&self) {
        let mut inner = self.inner.write();
        debug_assert!(inner.dirty.is_empty() && inner.writing.is_empty());
        inner.pages.clear();
        inner.evictions += 1;
    }

    pub(crate) fn stats(&self, map_bytes: u64) -> MapCacheStats {
        MapCacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            used_bytes: self.inner.read().pages.len() as u64 * PAGE_BYTES,
            capacity_bytes: self.capacity as u64 * PAGE_BYTES,
            map_bytes,
        }
    }
}

impl Inner {
    /// Lets a quarter of the pages go where there are as many as may be.
    fn make_room(&mut self, capacity: usize) {
        if self.pages.len() < capacity {
            return;
        }
        let (dirty, writing) = (&self.dirty, &self.writing);
        let clean = self.pages.keys().filter(|at| !dirty.contains(at) && !writing.contains(at));
        let gone: Vec<u64> = clean.take(capacity / 4).copied().collect();
        if !gone.is_empty() {
            self.evictions += 1;
        }
        for at in gone {
            self.pages.remove(&at);
        }
    }
}

#[cfg(test)]
mod tests {
    use vdkit_storage::MemoryStorage;

    use super::*;

    #[test]
    fn changed_pages_stay_and_others_go() {
        let storage = MemoryStorage::with_len("m", 64 << 20);
        let pages = Pages::new(0);
        for i in 0..1000 {
            pages.with_loaded(i * PAGE_BYTES, &storage, |_| ()).unwrap();
            if i < 100 {
                pages.change(i * PAGE_BYTES, &storage, |page| page[0] = i as u8).unwrap();
            }
        }
        assert!(pages.stats(0).used_bytes <= 200 * PAGE_BYTES);
        let copies = pages.begin_write();
        assert_eq!(copies.len(), 100);
        for i in 0..1000 {
            pages.with_loaded(i * PAGE_BYTES, &storage, |_| ()).unwrap();
        }
        // Not written yet: the file would say otherwise.
        assert_eq!(pages.with_loaded(5 * PAGE_BYTES, &storage, |p| p[0]).unwrap(), 5);
        pages.failed();
        assert_eq!(pages.dirty(), 100);
        for (at, page) in pages.begin_write() {
            storage.write_at(&page[..], HostOffset(at)).unwrap();
        }
        pages.written();
        assert_eq!(pages.dirty(), 0);
        assert_eq!(pages.with_loaded(5 * PAGE_BYTES, &storage, |p| p[0]).unwrap(), 5);
    }
}
