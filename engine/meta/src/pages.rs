//! Cache of a map's pages: tables, pieces of tables, bitmaps. The format defines what a page is.
//!
//! A lookup holds the read lock of the page's shard. Pages are loaded without a lock; the shard's
//! generation shows whether a page that was read may be stale. Changed pages are never evicted
//! before they are written: the image flushes before they fill the cache.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use rustc_hash::{FxBuildHasher, FxHashMap};
use vdkit_block::{MapCacheStats, Result};

const SHARDS: usize = 8;

/// The cache, of pages `P` by keys `K`; see the module's documentation.
#[derive(Debug)]
pub struct PageCache<K, P> {
    shards: [Shard<K, P>; SHARDS],
    /// Most pages of a shard, not counting changed ones.
    pages_max: usize,
    page_bytes: u64,
}

#[derive(Debug)]
struct Shard<K, P> {
    inner: RwLock<Inner<K, P>>,
    /// Number of times that a changed page was evicted.
    generation: AtomicU64,
    /// Lookups that found their page, including repeated ones after a load.
    found: AtomicU64,
    loaded: AtomicU64,
}

#[derive(Debug)]
struct Inner<K, P> {
    pages: FxHashMap<K, Page<P>>,
    /// Keys in insertion order, for eviction.
    order: VecDeque<K>,
    dirty: BTreeSet<K>,
    /// Copied for a flush that has not ended: the file may be older.
    writing: BTreeSet<K>,
}

#[derive(Debug)]
struct Page<P> {
    content: P,
    used: AtomicBool,
    /// Changed since the page was loaded, so a concurrent reader may hold older bytes from the
    /// file.
    changed: bool,
}

impl<K: Copy + Hash + Ord, P> PageCache<K, P> {
    /// A cache of at most `budget` bytes for pages of `page_bytes`, but at least `pages_min` pages.
    pub fn new(budget: u64, page_bytes: u64, pages_min: usize) -> Self {
        let pages = (budget / page_bytes.max(1)) as usize;
        let pages_max = (pages / SHARDS).max(pages_min.div_ceil(SHARDS));
        Self { shards: std::array::from_fn(|_| Shard::new()), pages_max, page_bytes }
    }

    /// Most pages of the whole cache.
    pub fn capacity(&self) -> usize {
        self.pages_max * SHARDS
    }

    /// Counts since the image was opened, and the current size. `map_bytes` is copied to the
    /// result.
    pub fn stats(&self, map_bytes: u64) -> MapCacheStats {
        let capacity_bytes = self.capacity() as u64 * self.page_bytes;
        let mut stats = MapCacheStats { capacity_bytes, map_bytes, ..MapCacheStats::default() };
        for shard in &self.shards {
            let loaded = shard.loaded.load(Ordering::Relaxed);
            // A load is followed by a second lookup, which hits.
            stats.hits += shard.found.load(Ordering::Relaxed).saturating_sub(loaded);
            stats.misses += loaded;
            stats.used_bytes += shard.inner.read().pages.len() as u64 * self.page_bytes;
        }
        stats
    }

    fn shard(&self, key: K) -> &Shard<K, P> {
        // The hash maps in the shards use the lowest and the highest bits.
        &self.shards[(FxBuildHasher.hash_one(key) >> 20) as usize % SHARDS]
    }

    /// Calls `visit` with a page, if it is cached.
    pub fn with<R>(&self, key: K, visit: impl FnOnce(&P) -> R) -> Option<R> {
        let shard = self.shard(key);
        let inner = shard.inner.read();
        let page = inner.pages.get(&key)?;
        shard.found.fetch_add(1, Ordering::Relaxed);
        // Storing only on change keeps the cache line shared between readers.
        if !page.used.load(Ordering::Relaxed) {
            page.used.store(true, Ordering::Relaxed);
        }
        Some(visit(&page.content))
    }

    /// Calls `visit` with a page; `read` loads it if it is not cached.
    ///
    /// # Errors
    /// What `read` returns.
    pub fn with_loaded<R>(
        &self,
        key: K,
        read: impl Fn() -> Result<P>,
        mut visit: impl FnMut(&P) -> R,
    ) -> Result<R> {
        loop {
            if let Some(found) = self.with(key, &mut visit) {
                return Ok(found);
            }
            self.load(key, &read)?;
        }
    }

    /// Loads a page with `read` unless it is cached.
    ///
    /// # Errors
    /// What `read` returns.
    pub fn load(&self, key: K, read: impl Fn() -> Result<P>) -> Result<()> {
        let shard = self.shard(key);
        loop {
            let generation = {
                let inner = shard.inner.read();
                if inner.pages.contains_key(&key) {
                    return Ok(());
                }
                shard.generation.load(Ordering::Acquire)
            };
            let content = read()?;
            shard.loaded.fetch_add(1, Ordering::Relaxed);
            let mut inner = shard.inner.write();
            if inner.pages.contains_key(&key) {
                return Ok(());
            }
            // Since the read, another thread may have loaded, changed, written and dropped this
            // page.
            if shard.generation.load(Ordering::Acquire) != generation {
                continue;
            }
            while inner.pages.len() >= self.pages_max
                && let Some(gone) = inner.evict()
            {
                shard.generation.fetch_add(u64::from(gone.changed), Ordering::Release);
            }
            inner.pages.insert(key, Page { content, used: AtomicBool::new(false), changed: false });
            inner.order.push_back(key);
            return Ok(());
        }
    }

    /// Changes a page, if it is cached; if `change` returns true, marks it dirty.
    pub fn change(&self, key: K, change: impl FnOnce(&mut P) -> bool) -> Option<()> {
        let mut inner = self.shard(key).inner.write();
        let page = inner.pages.get_mut(&key)?;
        if change(&mut page.content) {
            page.changed = true;
            inner.dirty.insert(key);
        }
        Some(())
    }

    /// Changes a page and marks it dirty; `read` loads it if it is not cached.
    ///
    /// # Errors
    /// Those of `read`; nothing is changed then.
    pub fn change_loaded(
        &self,
        key: K,
        read: impl Fn() -> Result<P>,
        mut change: impl FnMut(&mut P),
    ) -> Result<()> {
        let mut changed = |page: &mut P| {
            change(page);
            true
        };
        while self.change(key, &mut changed).is_none() {
            self.load(key, &read)?;
        }
        Ok(())
    }

    /// Number of dirty pages.
    pub fn dirty(&self) -> usize {
        self.shards.iter().map(|shard| shard.inner.read().dirty.len()).sum()
    }

    /// Results of `copy` for the dirty pages, in key order. The pages become clean, but stay cached
    /// until [`PageCache::end_write`]. One write at a time: the engine's leader calls this.
    pub fn begin_write<T>(&self, mut copy: impl FnMut(&P) -> T) -> Vec<(K, T)> {
        let mut copies = Vec::new();
        for shard in &self.shards {
            let mut inner = shard.inner.write();
            debug_assert!(inner.writing.is_empty(), "two writes of pages at a time");
            inner.writing = std::mem::take(&mut inner.dirty);
            let Inner { pages, writing, .. } = &*inner;
            let page = |key: &K| Some((*key, copy(&pages.get(key)?.content)));
            copies.extend(writing.iter().filter_map(page));
        }
        copies.sort_unstable_by_key(|(key, _)| *key);
        copies
    }

    /// Ends a write: if not `done`, the copied pages become dirty again.
    pub fn end_write(&self, done: bool) {
        for shard in &self.shards {
            let mut inner = shard.inner.write();
            let writing = std::mem::take(&mut inner.writing);
            if !done {
                inner.dirty.extend(writing);
            }
        }
    }

    /// Drops all pages; none may be dirty.
    pub fn clear(&self) {
        for shard in &self.shards {
            let mut inner = shard.inner.write();
            debug_assert!(inner.dirty.is_empty() && inner.writing.is_empty());
            *inner = Inner::new();
            shard.generation.fetch_add(1, Ordering::Release);
        }
    }
}

impl<K, P> Shard<K, P> {
    fn new() -> Self {
        let [generation, found, loaded] = std::array::from_fn(|_| AtomicU64::new(0));
        Self { inner: RwLock::new(Inner::new()), generation, found, loaded }
    }
}

impl<K, P> Inner<K, P> {
    fn new() -> Self {
        let (pages, order) = (FxHashMap::default(), VecDeque::new());
        Self { pages, order, dirty: BTreeSet::new(), writing: BTreeSet::new() }
    }
}

impl<K: Copy + Hash + Ord, P> Inner<K, P> {
    /// Evicts the oldest clean page that was not used since eviction last skipped it.
    fn evict(&mut self) -> Option<Page<P>> {
        for _ in 0..2 * self.order.len() {
            let key = self.order.pop_front()?;
            let unused = |page: &mut Page<P>| !page.used.swap(false, Ordering::Relaxed);
            if self.dirty.contains(&key)
                || self.writing.contains(&key)
                || !self.pages.get_mut(&key).is_some_and(unused)
            {
                self.order.push_back(key);
                continue;
            }
            return self.pages.remove(&key);
        }
        // All pages are dirty: exceeds the budget rather than lose one.
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(pages_min: usize) -> PageCache<u64, Vec<u64>> {
        PageCache::new(0, 128, pages_min)
    }

    fn load(cache: &PageCache<u64, Vec<u64>>, key: u64) -> u64 {
        cache.with_loaded(key, || Ok(vec![key; 16]), |page| page[3]).unwrap()
    }

    fn held(cache: &PageCache<u64, Vec<u64>>) -> usize {
        cache.stats(0).used_bytes as usize / 128
    }

    #[test]
    fn the_budget_holds_but_for_what_is_changed() {
        let cache = cache(16);
        for key in 0..100 {
            assert_eq!(load(&cache, key), key);
        }
        assert!(held(&cache) <= cache.capacity());
        for key in 0..100 {
            cache.change_loaded(key, || Ok(vec![key; 16]), |page| page[0] = 7).unwrap();
        }
        assert_eq!((held(&cache), cache.dirty()), (100, 100));
        assert_eq!(cache.begin_write(|_| ()).len(), 100);
        cache.end_write(true);
        (200..300).for_each(|key| assert_eq!(load(&cache, key), key));
        assert!(held(&cache) <= cache.capacity());
    }

    #[test]
    fn changed_pages_stay_until_they_are_written_and_come_back_where_they_are_not() {
        let cache = cache(64);
        let loaded = |key: u64| load(&cache, key);
        for key in 0..1000 {
            loaded(key);
            let changes = key < 100;
            let change = |page: &mut Vec<u64>| {
                page[3] = if changes { 1_000_000 } else { page[3] };
                changes
            };
            cache.change(key, change).unwrap();
        }
        let copies = cache.begin_write(|page| page[3]);
        assert!(
            copies.iter().map(|(key, word)| (*key, *word)).eq((0..100).map(|n| (n, 1_000_000)))
        );
        (0..1000).for_each(|key| _ = loaded(key));
        // Not written yet: the file still has the old content.
        assert_eq!((loaded(5), cache.dirty()), (1_000_000, 0));
        cache.end_write(false);
        assert_eq!(cache.begin_write(|_| ()).len(), 100);
        cache.end_write(true);
        cache.clear();
        assert_eq!(loaded(5), 5);
    }

    #[test]
    fn a_page_that_was_changed_and_dropped_while_it_was_read_is_read_again() {
        let cache = cache(1);
        let (reads, file) = (AtomicU64::new(0), AtomicU64::new(1));
        let read = || {
            let old = file.load(Ordering::Relaxed);
            if reads.fetch_add(1, Ordering::Relaxed) == 0 {
                cache.change_loaded(5, || Ok(vec![old; 16]), |page| page[3] = 2).unwrap();
                let copies = cache.begin_write(|page| page[3]);
                file.store(copies[0].1, Ordering::Relaxed);
                cache.end_write(true);
                (100..200).for_each(|key| _ = load(&cache, key));
            }
            Ok(vec![old; 16])
        };
        assert_eq!(cache.with_loaded(5, read, |page| page[3]).unwrap(), 2);
        assert_eq!(reads.into_inner(), 2);
    }
}
