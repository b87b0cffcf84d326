//! Unpacked compressed units, so that small reads unpack each unit once.
//!
//! A unit is unpacked by the first reader who wants a part of it; others who want it meanwhile
//! wait for that one. No lock of the cache is held while a unit is read and unpacked.
//!
//! # Why nothing stale is served
//! A unit is known by its layer, its host offset and the *generation* in which it was resolved. The
//! host bytes at one offset become another unit only by publishing newly packed units, and the
//! generation moves on before each such publication. So within one generation a host offset means
//! one unit only. A reader takes the generation before it resolves and asks again after; where
//! the two differ it goes without the cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use vdkit_block::Result;

/// Unpacked bytes that the cache may hold, beyond which each shard keeps one unit.
const BUDGET_BYTES: usize = 4 << 20;

/// Shards where units are small enough.
const SHARDS: usize = 8;

/// What is known of one unit.
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

/// Nothing inside where unpacking failed.
type Unit = Arc<OnceLock<Option<Box<[u8]>>>>;

#[derive(Debug)]
struct Entry {
    key: UnitKey,
    unit: Unit,
    used: u64,
}

/// A small cache of unpacked units.
#[derive(Debug, Default)]
pub(crate) struct UnitCache {
    shards: [Mutex<Vec<Entry>>; SHARDS],
    clock: AtomicU64,
    generation: AtomicU64,
}

impl UnitCache {
    /// The current generation.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// To be called between reserving space for packed units and publishing them.
    pub(crate) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// Shards in use, and units in each, for units of this size.
    fn shape(unit_bytes: usize) -> (usize, usize) {
        let units = (BUDGET_BYTES / unit_bytes.max(1)).max(1);
        let shards = units.min(SHARDS);
        (shards, units / shards)
    }

    fn shard(&self, key: &UnitKey, shards: usize) -> &Mutex<Vec<Entry>> {
        // Units are at least 512 bytes apart, mostly less than 64 KiB; multiply and take high bits
        // so that neighbours land in different shards whatever the distance.
        let hash = (key.offset ^ key.depth as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.shards[(hash as usize) % shards]
    }

    /// Copies from a unit if it is here; says whether it was.
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

    /// Copies `to.len()` bytes from `from` on of a unit of `unit_bytes` bytes, which `unpack` makes
    /// where it is not here.
    ///
    /// # Errors
    /// What `unpack` returns.
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
        // Another reader failed to unpack it. Its error is its own; try for ourselves.
        let mut bytes = vec![0; unit_bytes];
        unpack(&mut bytes)?;
        if let Some(source) = bytes.get(from..from + to.len()) {
            to.copy_from_slice(source);
        }
        Ok(())
    }

    /// The place of a unit, perhaps not unpacked yet.
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

/// Copies from an unpacked unit; says whether it was there.
fn copy(unit: &Unit, from: usize, to: &mut [u8]) -> bool {
    let Some(Some(bytes)) = unit.get() else { return false };
    let Some(source) = bytes.get(from..from + to.len()) else { return false };
    to.copy_from_slice(source);
    true
}
