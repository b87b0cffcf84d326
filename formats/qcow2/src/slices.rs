//! Cache of L2 tables, in slices of 4 KiB.
//!
//! A lookup reads a slice under the read lock of its shard and never takes it out, so a hit needs
//! no allocation and no reference count. Slices are loaded without any lock: the shard's generation
//! shows whether a slice read from disk may be stale.
//!
//! Eviction is CLOCK with one reference bit: O(1) amortized, and a scan that touches each slice
//! once cannot evict slices that are used repeatedly. Dirty slices are never evicted; the image
//! flushes before they fill the cache.

use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, MapCacheStats, Result, Storage};

use crate::sync::{AtomicBool, AtomicU64, Ordering, RwLock};

/// Bytes of a slice, unless the cluster is smaller.
const SLICE_BYTES: u64 = 4096;
const SLICE_WORDS: usize = SLICE_BYTES as usize / 8;
pub(crate) const SHARDS: usize = 16;
/// Most slices of a new table that are cached: those of a 64 KiB table.
const SLICES_ADDED_MAX: u64 = 16;
/// Most slices of one read-ahead: 64 KiB.
const AHEAD_MAX: u64 = 16;

/// The cache; see the module's documentation.
#[derive(Debug)]
pub(crate) struct SliceCache {
    shards: Box<[Shard]>,
    slice_bytes: u64,
    slices_max: usize,
}

#[derive(Debug, Default)]
struct Shard {
    inner: RwLock<Inner>,
    /// Number of times that a changed slice left the shard.
    generation: AtomicU64,
    /// Lookups that found their slice, including repeated ones after a load. On the cache line of
    /// the lock, which a lookup holds anyway, so counting is nearly free.
    found: AtomicU64,
    /// Slices read from the image.
    loaded: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    index: FxHashMap<u64, usize>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    hand: usize,
}

#[derive(Debug, Default)]
struct Slot {
    key: u64,
    words: Box<[u64]>,
    referenced: AtomicBool,
    state: SlotState,
    /// Changed since the slice was loaded, so a concurrent reader may hold older bytes from disk.
    changed: bool,
}

/// Whether a walk continues, and whether the slice is cached; see [`SliceCache::walk`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Seen {
    /// The slice continues the run, and the walk goes on. The slice is cached.
    Kept,
    /// The same, but the slice is not cached: a map scan rarely reads it again.
    Passed,
    /// The walk ends in the slice, and the next will begin there. This slice and those already read
    /// after it are cached.
    LastAndRest,
    /// The walk ends in the slice after many slices. Only this slice is cached, since the next walk
    /// will be long too.
    Last,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SlotState {
    #[default]
    Free,
    Clean,
    /// In the image's set of dirty slices.
    Dirty,
    /// A copy is being written; clean afterwards unless changed again.
    Writing,
}

impl SliceCache {
    /// A cache of at most `budget_bytes` for tables of one cluster each.
    pub(crate) fn new(cluster_bytes: u64, budget_bytes: u64) -> Self {
        let slice_bytes = SLICE_BYTES.min(cluster_bytes);
        // At least 8 slices per shard, so that a small budget still holds a working set.
        let slices_max = ((budget_bytes / slice_bytes) as usize / SHARDS).max(8);
        Self::of_slices(slice_bytes, SHARDS, slices_max)
    }

    /// A cache of at most [`SHARDS`] shards with `slices_max` slices each.
    pub(crate) fn of_slices(slice_bytes: u64, shards: usize, slices_max: usize) -> Self {
        let shards = (0..shards).map(|_| Shard::default()).collect();
        Self { shards, slice_bytes, slices_max }
    }

    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_bytes
    }

    /// Most slices of the whole cache.
    pub(crate) fn capacity(&self) -> usize {
        self.slices_max * self.shards.len()
    }

    /// Counts since the image was opened, and the current size. The image fills in `map_bytes`.
    pub(crate) fn stats(&self) -> MapCacheStats {
        let mut stats = MapCacheStats {
            capacity_bytes: self.capacity() as u64 * self.slice_bytes,
            ..MapCacheStats::default()
        };
        for shard in &self.shards {
            let loaded = shard.loaded.load(Ordering::Relaxed);
            // A load is followed by a second lookup, which hits.
            stats.hits += shard.found.load(Ordering::Relaxed).saturating_sub(loaded);
            stats.misses += loaded;
            stats.used_bytes += shard.inner.read().index.len() as u64 * self.slice_bytes;
        }
        stats
    }

    /// Addresses of the words of all slots.
    #[cfg(test)]
    pub(crate) fn memory(&self) -> Vec<*const u64> {
        let mut found = Vec::new();
        for shard in &self.shards {
            found.extend(shard.inner.read().slots.iter().map(|slot| slot.words.as_ptr()));
        }
        found
    }

    fn shard(&self, key: u64) -> &Shard {
        &self.shards[self.shard_index(key)]
    }

    fn shard_index(&self, key: u64) -> usize {
        let mixed = (key / self.slice_bytes).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 60) as usize % self.shards.len()
    }

    /// Calls `look` with the cached slice at host offset `key`.
    pub(crate) fn with<R>(&self, key: u64, look: impl FnOnce(&[u64]) -> R) -> Option<R> {
        self.find(key, |slot| {
            // Storing only on change keeps the cache line shared between readers.
            if !slot.referenced.load(Ordering::Relaxed) {
                slot.referenced.store(true, Ordering::Relaxed);
            }
            look(&slot.words)
        })
    }

    /// As [`SliceCache::with`], for map scans: does not mark the slice as used.
    pub(crate) fn peek<R>(&self, key: u64, look: impl FnOnce(&[u64]) -> R) -> Option<R> {
        self.find(key, |slot| look(&slot.words))
    }

    fn find<R>(&self, key: u64, look: impl FnOnce(&Slot) -> R) -> Option<R> {
        let shard = self.shard(key);
        let inner = shard.inner.read();
        let slot = &inner.slots[*inner.index.get(&key)?];
        shard.found.fetch_add(1, Ordering::Relaxed);
        Some(look(slot))
    }

    /// Frees a slice that a map scan has passed, unless it is dirty or in use; the next slice
    /// reuses its memory.
    pub(crate) fn pass(&self, key: u64) {
        let mut inner = self.shard(key).inner.write();
        let Some(&at) = inner.index.get(&key) else { return };
        let slot = &mut inner.slots[at];
        if slot.state == SlotState::Clean
            && !slot.changed
            && !slot.referenced.load(Ordering::Relaxed)
        {
            slot.state = SlotState::Free;
            inner.index.remove(&key);
            inner.free.push(at);
        }
    }

    /// Reads a slice into the cache unless it is cached.
    pub(crate) fn load(&self, key: u64, storage: &dyn Storage) -> Result<()> {
        let shard = self.shard(key);
        loop {
            if shard.inner.read().index.contains_key(&key) {
                return Ok(());
            }
            let generation = shard.generation.load(Ordering::Acquire);
            let mut words = [0; SLICE_WORDS];
            let words = self.read(key, storage, &mut words)?;
            shard.loaded.fetch_add(1, Ordering::Relaxed);
            let mut inner = shard.inner.write();
            if inner.index.contains_key(&key) {
                return Ok(());
            }
            // Since the read, another thread may have loaded, changed, written and dropped this
            // slice; then these words are out of date.
            if shard.generation.load(Ordering::Acquire) == generation {
                self.insert(shard, &mut inner, key, words);
                return Ok(());
            }
        }
    }

    /// Calls `look` for `count` consecutive slices, at most [`AHEAD_MAX`], until it ends the walk.
    /// One read fetches all of them. Only slices that are likely to be read again are cached; see
    /// [`Seen`].
    pub(crate) fn walk(
        &self,
        key: u64,
        count: u64,
        storage: &dyn Storage,
        mut look: impl FnMut(&[u64]) -> Seen,
    ) -> Result<()> {
        let mut generations = [0; SHARDS];
        for (generation, shard) in generations.iter_mut().zip(&self.shards) {
            *generation = shard.generation.load(Ordering::Acquire);
        }
        let mut bytes = vec![0; (count.min(AHEAD_MAX) * self.slice_bytes) as usize];
        storage.read_padded(&mut bytes, HostOffset(key))?;
        let mut words = [0; SLICE_WORDS];
        let step = self.slice_bytes as usize;
        let mut seen = Seen::Kept;
        for (slice, key) in bytes.chunks(step).zip((key..).step_by(step)) {
            let index = self.shard_index(key);
            let shard = &self.shards[index];
            let words = from_disk(slice, &mut words);
            if let Seen::Kept | Seen::Passed = seen {
                // A cached slice may be newer.
                seen = match self.with(key, &mut look) {
                    Some(seen) => seen,
                    None if shard.generation.load(Ordering::Acquire) == generations[index] => {
                        look(words)
                    }
                    // Changed, written and dropped since the read: the caller retries.
                    None => return Ok(()),
                };
            }
            if let Seen::Passed = seen {
                continue;
            }
            let mut inner = shard.inner.write();
            if !inner.index.contains_key(&key)
                && shard.generation.load(Ordering::Acquire) == generations[index]
            {
                shard.loaded.fetch_add(1, Ordering::Relaxed);
                self.insert(shard, &mut inner, key, words);
            }
            if let Seen::Last = seen {
                break;
            }
        }
        Ok(())
    }

    /// Reads a slice into the front of `words`.
    fn read<'w>(
        &self,
        key: u64,
        storage: &dyn Storage,
        words: &'w mut [u64; SLICE_WORDS],
    ) -> Result<&'w [u64]> {
        let mut bytes = [0; SLICE_BYTES as usize];
        let bytes = &mut bytes[..self.slice_bytes as usize];
        // The file may end before the cluster of the image's last table.
        storage.read_padded(bytes, HostOffset(key))?;
        Ok(from_disk(bytes, words))
    }

    /// Inserts a clean slice. Reuses the memory of an evicted slice: if threads freed memory that
    /// other threads allocated, the allocator could hold twice the cache.
    fn insert(&self, shard: &Shard, inner: &mut Inner, key: u64, words: &[u64]) {
        let at = if let Some(at) = inner.free.pop() {
            at
        } else if inner.slots.len() >= self.slices_max
            && let Some(at) = inner.victim()
        {
            let old = &inner.slots[at];
            if old.changed {
                shard.generation.fetch_add(1, Ordering::Release);
            }
            let old_key = old.key;
            inner.index.remove(&old_key);
            at
        } else {
            // Everything is dirty: exceeds the budget rather than lose a slice or block.
            inner.slots.push(Slot::default());
            inner.slots.len() - 1
        };
        inner.slots[at].fill(key, words);
        inner.index.insert(key, at);
    }

    /// Caches the slices of a new, zeroed table, so that they need not be read. Those of a large
    /// table are read on demand.
    pub(crate) fn add_zeroes(&self, table: HostOffset, table_bytes: u64) {
        if table_bytes / self.slice_bytes > SLICES_ADDED_MAX {
            return;
        }
        for key in (table.0..table.0 + table_bytes).step_by(self.slice_bytes as usize) {
            let shard = self.shard(key);
            let mut inner = shard.inner.write();
            if !inner.index.contains_key(&key) {
                let words = &[0; SLICE_WORDS][..self.slice_bytes as usize / 8];
                self.insert(shard, &mut inner, key, words);
            }
        }
    }

    /// Changes a cached slice and marks it dirty. The caller holds the image's metadata lock, so
    /// only one thread changes slices. Returns `None` if the slice is not cached.
    pub(crate) fn change<R>(&self, key: u64, change: impl FnOnce(&mut [u64]) -> R) -> Option<R> {
        let mut inner = self.shard(key).inner.write();
        let at = *inner.index.get(&key)?;
        let slot = &mut inner.slots[at];
        slot.state = SlotState::Dirty;
        slot.changed = true;
        Some(change(&mut slot.words))
    }

    /// Copies consecutive dirty slices into `out` in on-disk byte order; they stay cached until
    /// [`SliceCache::written`].
    pub(crate) fn begin_writes(&self, first: u64, out: &mut [u8]) {
        let step = self.slice_bytes as usize;
        for (key, out) in (first..).step_by(step).zip(out.chunks_mut(step)) {
            let mut inner = self.shard(key).inner.write();
            let at = inner.index.get(&key).copied().expect("dirty slices are never evicted");
            let slot = &mut inner.slots[at];
            slot.state = SlotState::Writing;
            for (out, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(&slot.words) {
                *out = word.to_be_bytes();
            }
        }
    }

    /// The copy of a slice reached the storage: the slice may be evicted unless changed again.
    pub(crate) fn written(&self, key: u64) {
        let mut inner = self.shard(key).inner.write();
        if let Some(&at) = inner.index.get(&key)
            && inner.slots[at].state == SlotState::Writing
        {
            inner.slots[at].state = SlotState::Clean;
        }
    }

    /// The copy did not reach the storage: the slice is dirty again. Returns `false` if the slice
    /// was dropped meanwhile.
    pub(crate) fn write_failed(&self, key: u64) -> bool {
        let mut inner = self.shard(key).inner.write();
        let Some(&at) = inner.index.get(&key) else { return false };
        inner.slots[at].state = SlotState::Dirty;
        true
    }

    /// Drops the slices of a table whose cluster was freed, including dirty ones.
    pub(crate) fn forget(&self, table: HostOffset, table_bytes: u64) {
        for key in (table.0..table.0 + table_bytes).step_by(self.slice_bytes as usize) {
            let shard = self.shard(key);
            let mut inner = shard.inner.write();
            shard.generation.fetch_add(1, Ordering::Release);
            if let Some(at) = inner.index.remove(&key) {
                inner.slots[at].state = SlotState::Free;
                inner.slots[at].words = Box::default();
                inner.free.push(at);
            }
        }
    }
}

/// Decodes a slice from on-disk bytes into the front of `words`.
fn from_disk<'w>(bytes: &[u8], words: &'w mut [u64; SLICE_WORDS]) -> &'w [u64] {
    let words = &mut words[..bytes.len() / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_be_bytes(*bytes);
    }
    words
}

impl Slot {
    /// Fills the slot with a clean slice.
    fn fill(&mut self, key: u64, words: &[u64]) {
        if self.words.len() == words.len() {
            self.words.copy_from_slice(words);
        } else {
            self.words = words.into();
        }
        (self.key, self.state, self.changed) = (key, SlotState::Clean, false);
        self.referenced.store(false, Ordering::Relaxed);
    }
}

impl Inner {
    /// A clean slot to replace.
    fn victim(&mut self) -> Option<usize> {
        // Two rounds: the first may only clear reference bits.
        for _ in 0..2 * self.slots.len() {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let slot = &self.slots[at];
            if slot.state == SlotState::Clean && !slot.referenced.swap(false, Ordering::Relaxed) {
                return Some(at);
            }
        }
        None
    }
}
