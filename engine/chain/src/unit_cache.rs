//! A cache of decompressed units, so that small reads decompress each unit once.
//!
//! The first reader of a unit decompresses it; concurrent readers of the unit wait for that reader.
//! No lock of the cache is held meanwhile.
//!
//! # Why nothing stale is served
//! The key of a unit is its layer, its host offset and the *generation* in which it was resolved.
//! Only publishing compressed units changes the unit at a host offset, and the generation advances
//! before each publication. So within one generation a host offset identifies one unit. A reader
//! takes the generation before it resolves and checks it again after; if they differ, it bypasses
//! the cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vdkit_block::Result;

/// Capacity in bytes; in addition, each shard keeps at least one unit.
const BUDGET_BYTES: usize = 4 << 20;

/// Number of shards, if units are small enough.
const SHARDS: usize = 8;

/// Key of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitKey {
    /// The layer; host offsets of different layers are not comparable.
    pub(crate) depth: usize,
    /// The storage within the layer.
    pub(crate) file: u16,
    /// Host offset of the compressed bytes.
    pub(crate) offset: u64,
    /// The generation in which it was resolved.
    pub(crate) generation: u64,
}

/// `None` inside if decompression failed.
type Unit = Arc<OnceLock<Option<Box<[u8]>>>>;

#[derive(Debug)]
struct Entry {
    key: UnitKey,
    unit: Unit,
    used: u64,
}

/// A small cache of decompressed units.
#[derive(Debug, Default)]
pub(crate) struct UnitCache {
    shards: [Mutex<Vec<Entry>>; SHARDS],
    clock: AtomicU64,
    generation: AtomicU64,
}

impl UnitCache {
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Advances the generation. Call it after reserving space for compressed units and before
    /// publishing them.
    pub(crate) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of shards, and units per shard, for this unit size.
    fn shape(unit_bytes: usize) -> (usize, usize) {
        let units = (BUDGET_BYTES / unit_bytes.max(1)).max(1);
        let shards = units.min(SHARDS);
        (shards, units / shards)
    }

    fn shard(&self, key: &UnitKey, shards: usize) -> &Mutex<Vec<Entry>> {
        // Units are at least 512 bytes apart, mostly less than 64 KiB. Multiply and take high bits,
        // so that neighbors use different shards at any distance.
        let hash = (key.offset ^ key.depth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.shards[(hash as usize) % shards]
    }

    /// Copies from a cached unit; returns whether it was cached.
    pub(crate) fn copy_if_present(
        &self,
        key: &UnitKey,
        from: usize,
        to: &mut [u8],
        unit_bytes: usize,
    ) -> bool {
        let (shards, _) = Self::shape(unit_bytes);
        let unit = {
            let shard = self.shard(key, shards).lock();
            shard.iter().find(|entry| entry.key == *key).map(|entry| entry.unit.clone())
        };
        unit.is_some_and(|unit| copy(&unit, from, to))
    }

    /// Copies `to.len()` bytes at `from` of a unit of `unit_bytes` bytes; `unpack` decompresses a
    /// unit that is not cached.
    ///
    /// # Errors
    /// Errors of `unpack`.
    pub(crate) fn copy_or_unpack(
        &self,
        key: UnitKey,
        from: usize,
        to: &mut [u8],
        unit_bytes: usize,
        unpack: impl Fn(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let unit = self.claim(key, unit_bytes);
        let mut failure = None;
        unit.get_or_init(|| {
            let mut bytes = vec![0; unit_bytes].into_boxed_slice();
            match unpack(&mut bytes) {
                Ok(()) => Some(bytes),
                Err(error) => {
                    failure = Some(error);
                    None
                }
            }
        });
        if copy(&unit, from, to) {
            return Ok(());
        }
        self.forget(&key, unit_bytes);
        if let Some(error) = failure {
            return Err(error);
        }
        // Another reader failed to decompress it and has its own error. Try again here.
        let mut bytes = vec![0; unit_bytes];
        unpack(&mut bytes)?;
        if let Some(source) = bytes.get(from..from + to.len()) {
            to.copy_from_slice(source);
        }
        Ok(())
    }

    /// The cache entry of a unit, perhaps not decompressed yet.
    fn claim(&self, key: UnitKey, unit_bytes: usize) -> Unit {
        let (shards, units) = Self::shape(unit_bytes);
        let used = self.clock.fetch_add(1, Ordering::Relaxed);
        let mut shard = self.shard(&key, shards).lock();
        if let Some(entry) = shard.iter_mut().find(|entry| entry.key == key) {
            entry.used = used;
            return entry.unit.clone();
        }
        while shard.len() >= units {
            let oldest = shard.iter().enumerate().min_by_key(|(_, entry)| entry.used);
            let Some((oldest, _)) = oldest else { break };
            shard.swap_remove(oldest);
        }
        let unit = Unit::default();
        shard.push(Entry { key, unit: unit.clone(), used });
        unit
    }

    fn forget(&self, key: &UnitKey, unit_bytes: usize) {
        let (shards, _) = Self::shape(unit_bytes);
        self.shard(key, shards).lock().retain(|entry| entry.key != *key);
    }
}

/// Copies from a decompressed unit; returns whether it was there.
fn copy(unit: &Unit, from: usize, to: &mut [u8]) -> bool {
    let Some(Some(bytes)) = unit.get() else { return false };
    let Some(source) = bytes.get(from..from + to.len()) else { return false };
    to.copy_from_slice(source);
    true
}
