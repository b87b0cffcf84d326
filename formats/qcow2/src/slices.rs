//! The cache of L2 tables, in slices of 4 KiB.
//!
//! A slice is looked up under the read lock of its shard and never leaves it, so a hit costs no
//! allocation and no reference count. Slices are loaded without any lock: a shard's generation
//! tells whether a slice that was read from disk may have become stale meanwhile.
//!
//! Eviction is CLOCK with one reference bit: O(1) amortised, and a scan that touches each slice
//! once cannot push out slices that are used again. Dirty slices are never evicted; the image
//! flushes before they fill the cache.

use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, MapCacheStats, Result, Storage};

use crate::sync::{AtomicBool, AtomicU64, Ordering, RwLock};

/// Bytes of a slice where the cluster is not smaller.
const SLICE_BYTES: u64 = 4096;
const SLICE_WORDS: usize = SLICE_BYTES as usize / 8;
pub(crate) const SHARDS: usize = 16;
/// Slices of a new table that are put into the cache: as many as a table of 64 KiB has.
const SLICES_ADDED_MAX: u64 = 16;
/// Slices that are read ahead at once: 64 KiB.
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
    /// Counts the times that a changed slice left the shard.
    generation: AtomicU64,
    /// Look-ups that found their slice, those that found it after loading it too. It lies on the
    /// line of the lock, which a look-up has at hand: counting costs next to nothing.
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
    /// Differs from what a reader could have found on disk when the slice was loaded.
    changed: bool,
}

/// What a walk is told of the slice that it has shown; see [`SliceCache::walk`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Seen {
    /// All of it goes on what was found before, and more is wanted.
    Kept,
    /// The same, and it is not kept: whoever has the map of so much will hardly ask for a part of it.
    Passed,
    /// The walk ends in it, and the next will begin there. It is kept, and with it those behind it
    /// that have been read already.
    LastAndRest,
    /// The walk ends in it after many slices: it alone is kept, since the next walk will be long too.
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
        // Few slices make for few shards' worth of each; never less than 8 in a shard, so that a
        // small budget still holds a working set.
        let slices_max = ((budget_bytes / slice_bytes) as usize / SHARDS).max(8);
        Self::of_slices(slice_bytes, SHARDS, slices_max)
    }

    /// A cache of at most [`SHARDS`] shards with so many slices each.
    pub(crate) fn of_slices(slice_bytes: u64, shards: usize, slices_max: usize) -> Self {
        let shards = (0..shards).map(|_| Shard::default()).collect();
        Self { shards, slice_bytes, slices_max }
    }

    /// Bytes of a slice.
    pub(crate) fn slice_bytes(&self) -> u64 {
        self.slice_bytes
    }

    /// How many slices fit in all.
    pub(crate) fn capacity(&self) -> usize {
        self.slices_max * self.shards.len()
    }

    /// Counts since the image was opened, and what is held now. `map_bytes` is the image's matter.
    pub(crate) fn stats(&self) -> MapCacheStats {
        let mut stats = MapCacheStats {
            capacity_bytes: self.capacity() as u64 * self.slice_bytes,
            ..MapCacheStats::default()
        };
        for shard in &self.shards {
            let loaded = shard.loaded.load(Ordering::Relaxed);
            // Who loads a slice looks again, and finds it.
            stats.hits += shard.found.load(Ordering::Relaxed).saturating_sub(loaded);
            stats.misses += loaded;
            stats.used_bytes += shard.inner.read().index.len() as u64 * self.slice_bytes;
        }
        stats
    }

    /// Where the words of all slots are.
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

    /// Looks at a cached slice by its host offset.
    pub(crate) fn with<R>(&self, key: u64, look: impl FnOnce(&[u64]) -> R) -> Option<R> {
        self.find(key, |slot| {
            // Storing only on change keeps the line shared between readers.
            if !slot.referenced.load(Ordering::Relaxed) {
                slot.referenced.store(true, Ordering::Relaxed);
            }
            look(&slot.words)
        })
    }

    /// As [`SliceCache::with`], for who draws a map: the slice counts as no more used than before.
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

    /// Lets go of a slice that a map has gone through, unless somebody else uses it: the next one
    /// takes its memory.
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

    /// Makes sure that a slice is cached, reading it where it is not.
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
            // Somebody may have loaded, changed, written and dropped this very slice since we
            // read it; what we hold is then out of date.
            if shard.generation.load(Ordering::Acquire) == generation {
                self.insert(shard, &mut inner, key, words);
                return Ok(());
            }
        }
    }

    /// Shows `count` slices that lie behind each other, at most [`AHEAD_MAX`], to `look` in turn until
    /// it has seen enough, for who goes through a table from front to back: one read does for all
    /// that are not cached. Only what is likely to be asked for again comes into the cache; see
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
                // What is cached may be newer.
                seen = match self.with(key, &mut look) {
                    Some(seen) => seen,
                    None if shard.generation.load(Ordering::Acquire) == generations[index] => {
                        look(words)
                    }
                    // Changed, written and dropped since it was read: whoever walks comes again.
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
        // The last table of an image may end with the file before its cluster does.
        storage.read_padded(bytes, HostOffset(key))?;
        Ok(from_disk(bytes, words))
    }

    /// Puts a clean slice in. Where another one has to go its memory is used again: threads that
    /// free what others have made would leave the allocator with twice the cache.
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
            // Where everything is dirty: past the budget rather than lose or block.
            inner.slots.push(Slot::default());
            inner.slots.len() - 1
        };
        inner.slots[at].fill(key, words);
        inner.index.insert(key, at);
    }

    /// A new table of zeroes at `table`: its slices need not be read. Those of a large table are
    /// left to be read as they are needed.
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

    /// Changes a cached slice and marks it dirty. Only one thread changes slices at a time (it
    /// holds the image's metadata lock). Returns nothing where the slice is not cached.
    pub(crate) fn change<R>(&self, key: u64, change: impl FnOnce(&mut [u64]) -> R) -> Option<R> {
        let mut inner = self.shard(key).inner.write();
        let at = *inner.index.get(&key)?;
        let slot = &mut inner.slots[at];
        slot.state = SlotState::Dirty;
        slot.changed = true;
        Some(change(&mut slot.words))
    }

    /// Copies dirty slices, which lie behind each other, in on-disk byte order into `out`; until
    /// [`SliceCache::written`] they stay in the cache.
    pub(crate) fn begin_writes(&self, first: u64, out: &mut [u8]) {
        let step = self.slice_bytes as usize;
        for (key, out) in (first..).step_by(step).zip(out.chunks_mut(step)) {
            self.begin_write(key, out);
        }
    }

    fn begin_write(&self, key: u64, out: &mut [u8]) {
        let mut inner = self.shard(key).inner.write();
        let at = inner.index.get(&key).copied().expect("dirty slices are never evicted");
        let slot = &mut inner.slots[at];
        slot.state = SlotState::Writing;
        for (out, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(&slot.words) {
            *out = word.to_be_bytes();
        }
    }

    /// The copy of a slice reached the storage; it may be evicted unless changed again.
    pub(crate) fn written(&self, key: u64) {
        let mut inner = self.shard(key).inner.write();
        if let Some(&at) = inner.index.get(&key)
            && inner.slots[at].state == SlotState::Writing
        {
            inner.slots[at].state = SlotState::Clean;
        }
    }

    /// The copy did not reach the storage: the slice is dirty again.
    /// `false` where it was forgotten meanwhile.
    pub(crate) fn write_failed(&self, key: u64) -> bool {
        let mut inner = self.shard(key).inner.write();
        let Some(&at) = inner.index.get(&key) else { return false };
        inner.slots[at].state = SlotState::Dirty;
        true
    }

    /// Forgets the slices of a table whose cluster was freed, also the dirty ones.
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

/// The words of a slice as it lies on disk, put into the front of `words`.
fn from_disk<'w>(bytes: &[u8], words: &'w mut [u64; SLICE_WORDS]) -> &'w [u64] {
    let words = &mut words[..bytes.len() / 8];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_be_bytes(*bytes);
    }
    words
}

impl Slot {
    /// Holds a clean slice from now on.
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
        // Two rounds: the first may do no more than clear reference bits.
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
