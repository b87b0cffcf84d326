//! Detects holes of host files beneath mapped data.
//!
//! A format may map clusters that were never written (preallocation). The host file then has a hole
//! there, which is known to be zero without reading. Answers of the file system are cached, since
//! some examine each page up to the next hole.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{HostOffset, Result, Storage, StorageExtent};
use vdkit_chain::Disk;

/// A short request that does not follow the previous one queries only its own range: a longer query
/// could cost more than reading the bytes.
const ALONE_BYTES_MAX: u64 = 1 << 20;

/// Queries storages for holes, in the order of a map walk.
#[derive(Debug, Default)]
pub(crate) struct Holes {
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Asked {
    storage: Arc<dyn Storage>,
    /// Whether queries are worthwhile.
    may_have_holes: bool,
    /// The last run found.
    known: Range<u64>,
    known_data: bool,
    /// End of the previous request.
    next: u64,
}

impl Holes {
    /// Whether data of a layer may be in host holes unknown to its format. Not for formats that use
    /// the file's own map (raw), nor for encrypted data, whose holes do not read as zero.
    pub(crate) fn hides_holes(disk: &Disk, depth: usize) -> bool {
        disk.encryption(depth).is_none()
            && disk.layers().get(depth).is_none_or(|layer| layer.format().caps().fill_bytes > 1)
    }

    /// The run at `offset`, at most `len` bytes.
    pub(crate) fn run_at(
        &mut self,
        storage: &Arc<dyn Storage>,
        offset: HostOffset,
        len: u64,
    ) -> Result<StorageExtent> {
        let asked = match &mut self.asked {
            Some(asked) if Arc::ptr_eq(&asked.storage, storage) => asked,
            other => other.insert(Asked {
                storage: storage.clone(),
                may_have_holes: storage.may_have_holes()?,
                known: 0..0,
                known_data: true,
                next: offset.0,
            }),
        };
        if !asked.may_have_holes {
            return Ok(StorageExtent { data: true, len });
        }
        let follows = asked.next == offset.0;
        asked.next = offset.0.saturating_add(len);
        if !asked.known.contains(&offset.0) {
            if !follows && len <= ALONE_BYTES_MAX {
                return storage.extent_at(offset, len);
            }
            let rest = i64::MAX as u64 - offset.0.min(i64::MAX as u64);
            let found = storage.extent_at(offset, rest.max(len))?;
            asked.known = offset.0..offset.0.saturating_add(found.len);
            asked.known_data = found.data;
        }
        let len = len.min(asked.known.end - offset.0);
        Ok(StorageExtent { data: asked.known_data, len })
    }
}

#[cfg(test)]
mod tests {
    use vdkit_storage::MemoryStorage;

    use super::*;

    fn storage() -> Arc<dyn Storage> {
        let storage = MemoryStorage::with_len("m", 16 << 20);
        storage.write_at(&[1; 8192], HostOffset(1 << 20)).unwrap();
        Arc::new(storage)
    }

    #[test]
    fn answers_are_the_storages_own_in_any_order() {
        let storage = storage();
        let mut holes = Holes::default();
        let mut order: Vec<u64> = (0..64).map(|i| i * (128 << 10)).collect();
        for reversed in [false, true] {
            if reversed {
                order.reverse();
            }
            for &at in &order {
                for (skip, len) in [(0, 4096), (4096, 128 << 10)] {
                    let offset = HostOffset(at + skip);
                    let found = holes.run_at(&storage, offset, len).unwrap();
                    let direct = storage.extent_at(offset, len).unwrap();
                    assert_eq!((found.data, found.len), (direct.data, direct.len), "{offset}");
                }
            }
        }
    }

    #[test]
    fn another_storage_is_asked_anew() {
        let mut holes = Holes::default();
        let (a, b) = (storage(), storage());
        b.write_at(&[1; 4096], HostOffset(0)).unwrap();
        assert!(!holes.run_at(&a, HostOffset(0), 4096).unwrap().data);
        assert!(holes.run_at(&b, HostOffset(0), 4096).unwrap().data);
        assert!(!holes.run_at(&a, HostOffset(0), 4096).unwrap().data);
    }
}
