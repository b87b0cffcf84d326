//! Tests of the slice cache; in a separate file, since the loom model includes `slices.rs`.

use std::collections::BTreeSet;

use vdkit_block::{HostOffset, Storage};
use vdkit_storage::MemoryStorage;

use crate::slices::{SHARDS, SliceCache};

#[test]
fn a_full_cache_uses_its_memory_again() {
    const SLICE: u64 = 512;
    let storage = MemoryStorage::with_len("image", 4096 * SLICE);
    let cache = SliceCache::new(SLICE, 0);
    let load = |slices: std::ops::Range<u64>| {
        for number in slices {
            storage.write_at(&number.to_be_bytes(), HostOffset(number * SLICE)).unwrap();
            cache.load(number * SLICE, &storage).unwrap();
            assert_eq!(cache.with(number * SLICE, |words| words[0]), Some(number));
        }
    };
    let addresses = || cache.memory().into_iter().collect::<BTreeSet<_>>();
    load(0..2048);
    let before = addresses();
    assert_eq!(before.len(), cache.capacity());
    load(2048..4096);
    assert_eq!(addresses(), before);
    assert_eq!(cache.stats().used_bytes, cache.capacity() as u64 * SLICE);
}

#[test]
fn what_a_map_has_passed_gives_its_memory_unless_it_is_in_use() {
    const SLICE: u64 = 512;
    let storage = MemoryStorage::with_len("image", 4096 * SLICE);
    let cache = SliceCache::new(SLICE, 1 << 20);
    for key in (0..1024).map(|number| number * SLICE) {
        cache.load(key, &storage).unwrap();
        assert_eq!(cache.peek(key, |words| words[0]), Some(0));
        cache.pass(key);
        assert_eq!(cache.peek(key, |words| words[0]), None);
    }
    let slots = cache.memory().len();
    assert!(slots <= SHARDS, "{slots} slots");
    // One slice used by a request, one dirty, one written since it was loaded.
    for key in [0, 1, 2].map(|number| number * SLICE) {
        cache.load(key, &storage).unwrap();
    }
    cache.with(0, |_| ()).unwrap();
    for key in [SLICE, 2 * SLICE] {
        cache.change(key, |words| words[0] = 1).unwrap();
    }
    cache.begin_writes(2 * SLICE, &mut [0; SLICE as usize]);
    cache.written(2 * SLICE);
    for key in [0, SLICE, 2 * SLICE] {
        cache.pass(key);
        assert!(cache.peek(key, |_| ()).is_some(), "{key}");
    }
}
