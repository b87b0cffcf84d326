//! The cache of grain tables.
//!
//! Tables are read and kept in *chunks* of several, 32 KiB on disk where a table is smaller, since
//! they lie side by side as a rule: one read then serves 512 MiB of the disk. A chunk is looked up
//! under the read lock of its shard. It is loaded without a lock; a shard's generation tells
//! whether what was read may have become stale meanwhile. Changed chunks are never dropped: the
//! image flushes before they fill the cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use vdkit_block::{MapCacheStats, Result};

/// Bytes on disk of one chunk, where a table is not larger.
pub(crate) const CHUNK_BYTES: u64 = 32 << 10;
const SHARDS: usize = 8;
/// Chunks that a shard holds at least, however small the budget.
const CHUNKS_MIN: usize = 2;

/// Names a chunk: the extent and the chunk within it.
pub(crate) type Key = (u32, u64);

/// The cache; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Tables {
    shards: Vec<Shard>,
    chunks_max: usize,
    chunk_memory: u64,
}

#[derive(Debug, Default)]
struct Shard {
    inner: RwLock<Inner>,
    /// Counts the times that a changed chunk left.
    generation: AtomicU64,
    found: AtomicU64,
    loaded: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    chunks: FxHashMap<Key, Chunk>,
    /// Keys in the order in which they came, for eviction.
    order: std::collections::VecDeque<Key>,
}

#[derive(Debug)]
struct Chunk {
    words: Box<[u64]>,
    used: AtomicBool,
    /// Changes of it that are not on disk yet, being written included.
    pinned: bool,
    changed: bool,
}

impl Tables {
    /// A cache of at most `budget` bytes for chunks of at most `words` entries.
    pub(crate) fn new(budget: u64, words: u64) -> Self {
        let chunk_memory = words * 8;
        let chunks_max = (budget / chunk_memory.max(1)) as usize / SHARDS;
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { shards, chunks_max: chunks_max.max(CHUNKS_MIN), chunk_memory }
    }

    /// How many chunks fit in all.
    pub(crate) fn capacity(&self) -> usize {
        self.chunks_max * SHARDS
    }

    pub(crate) fn stats(&self) -> MapCacheStats {
        let mut stats = MapCacheStats {
            capacity_bytes: self.capacity() as u64 * self.chunk_memory,
            ..MapCacheStats::default()
        };
        for shard in &self.shards {
            let loaded = shard.loaded.load(Ordering::Relaxed);
            stats.hits += shard.found.load(Ordering::Relaxed).saturating_sub(loaded);
            stats.misses += loaded;
            let inner = shard.inner.read();
            stats.used_bytes +=
                inner.chunks.values().map(|c| c.words.len() as u64 * 8).sum::<u64>();
        }
        stats
    }

    fn shard(&self, key: Key) -> &Shard {
        let mixed = (u64::from(key.0) << 32 ^ key.1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(mixed >> 61) as usize % SHARDS]
    }

    /// Looks at a cached chunk.
    pub(crate) fn with<R>(&self, key: Key, look: impl FnOnce(&[u64]) -> R) -> Option<R> {
        let shard = self.shard(key);
        let inner = shard.inner.read();
        let chunk = inner.chunks.get(&key)?;
        shard.found.fetch_add(1, Ordering::Relaxed);
        if !chunk.used.load(Ordering::Relaxed) {
            chunk.used.store(true, Ordering::Relaxed);
        }
        Some(look(&chunk.words))
    }

    /// Makes sure that a chunk is cached; `read` gives its words.
    pub(crate) fn load(&self, key: Key, read: impl Fn() -> Result<Vec<u64>>) -> Result<()> {
        let shard = self.shard(key);
        loop {
            let generation = {
                let inner = shard.inner.read();
                if inner.chunks.contains_key(&key) {
                    return Ok(());
                }
                shard.generation.load(Ordering::Acquire)
            };
            let words = read()?.into_boxed_slice();
            shard.loaded.fetch_add(1, Ordering::Relaxed);
            let mut inner = shard.inner.write();
            if inner.chunks.contains_key(&key) {
                return Ok(());
            }
            // Somebody may have loaded, changed, written and dropped this very chunk since.
            if shard.generation.load(Ordering::Acquire) != generation {
                continue;
            }
            if inner.chunks.len() >= self.chunks_max && inner.evict() {
                shard.generation.fetch_add(1, Ordering::Release);
            }
            let chunk =
                Chunk { words, used: AtomicBool::new(false), pinned: false, changed: false };
            inner.chunks.insert(key, chunk);
            inner.order.push_back(key);
            return Ok(());
        }
    }

    /// Changes a cached chunk; `change` returns what it changed, and where that is not 0 the chunk
    /// stays until [`Tables::unpin`]. Only one thread changes chunks at a time. Nothing where it is
    /// not cached.
    pub(crate) fn change(&self, key: Key, change: impl FnOnce(&mut [u64]) -> u64) -> Option<u64> {
        let mut inner = self.shard(key).inner.write();
        let chunk = inner.chunks.get_mut(&key)?;
        let changed = change(&mut chunk.words);
        if changed != 0 {
            (chunk.pinned, chunk.changed) = (true, true);
        }
        Some(changed)
    }

    /// A chunk's changes are on disk.
    pub(crate) fn unpin(&self, key: Key) {
        if let Some(chunk) = self.shard(key).inner.write().chunks.get_mut(&key) {
            chunk.pinned = false;
        }
    }
}

impl Inner {
    /// Drops the oldest chunk that was not used since it was last passed over. Whether it had
    /// been changed.
    fn evict(&mut self) -> bool {
        for _ in 0..2 * self.order.len() {
            let Some(key) = self.order.pop_front() else { break };
            let Some(chunk) = self.chunks.get(&key) else { continue };
            if chunk.pinned || chunk.used.swap(false, Ordering::Relaxed) {
                self.order.push_back(key);
                continue;
            }
            return self.chunks.remove(&key).is_some_and(|chunk| chunk.changed);
        }
        // All of it is changed: beyond the budget rather than lose something.
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_holds_but_for_what_is_changed() {
        let tables = Tables::new(0, 16);
        let load = |n: u64| tables.load((0, n), || Ok(vec![n; 16])).unwrap();
        for n in 0..100 {
            load(n);
            assert_eq!(tables.with((0, n), |words| words[3]), Some(n));
        }
        let held = |tables: &Tables| tables.stats().used_bytes / 128;
        assert!(held(&tables) <= tables.capacity() as u64);
        for n in 0..100 {
            load(n);
            let change = |words: &mut [u64]| {
                words[0] = 7;
                1
            };
            assert_eq!(tables.change((0, n), change), Some(1));
        }
        assert_eq!(held(&tables), 100);
        for n in 0..100 {
            tables.unpin((0, n));
        }
        load(200);
        load(201);
        assert!(held(&tables) <= 102);
        assert_eq!(tables.with((0, 200), |words| words[0]), Some(200));
    }
}
