//! Loom models of the bits of bitmaps (see `recording`), and of the cache of L2 slices, over all
//! interleavings of their threads: a slice that is read from disk while another thread changes, writes
//! and drops it must not come back stale.

#![allow(dead_code, reason = "a model uses a part of the protocol")]

mod sync {
    pub use vdkit_testbase::loom_sync::*;
}

#[path = "../../src/bitmaps/bits.rs"]
mod bits;
mod recording;
#[path = "../../src/slices.rs"]
mod slices;

use std::fmt;

use slices::{Seen, SliceCache};
use sync::{Arc, Mutex, check, thread};
use vdkit_block::{HostOffset, Result, Storage, StorageCaps};

/// Bytes of a slice, and the number of slices.
const SLICE: u64 = 512;
const SLICES: usize = 3;

/// A disk of a few slices, with one word each.
struct Disk(Mutex<[u64; SLICES]>);

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Disk")
    }
}

impl Storage for Disk {
    fn name(&self) -> &str {
        "disk"
    }
    fn caps(&self) -> StorageCaps {
        unreachable!("not asked")
    }
    fn len(&self) -> Result<u64> {
        Ok(SLICE * SLICES as u64)
    }
    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let slices = *self.0.lock();
        buf.fill(0);
        for (slice, word) in
            buf.chunks_mut(SLICE as usize).zip(&slices[(offset.0 / SLICE) as usize..])
        {
            slice[..8].copy_from_slice(&word.to_be_bytes());
        }
        Ok(buf.len())
    }
    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let word = u64::from_be_bytes(buf[..8].try_into().expect("eight bytes"));
        self.0.lock()[(offset.0 / SLICE) as usize] = word;
        Ok(())
    }
    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

struct Image {
    cache: SliceCache,
    disk: Disk,
}

impl Image {
    fn word(&self, key: u64) -> u64 {
        loop {
            if let Some(word) = self.cache.with(key, |words| words[0]) {
                return word;
            }
            self.cache.load(key, &self.disk).unwrap();
        }
    }

    /// Changes a slice and writes it, as a flush does.
    fn change_and_flush(&self, key: u64, word: u64) {
        while self.cache.change(key, |words| words[0] = word).is_none() {
            self.cache.load(key, &self.disk).unwrap();
        }
        let mut bytes = [0; SLICE as usize];
        self.cache.begin_writes(key, &mut bytes);
        self.disk.write_at(&bytes, HostOffset(key)).unwrap();
        self.cache.written(key);
    }
}

/// One thread loads a slice. Another changes it, writes it, and loads another slice, which evicts
/// it.
#[test]
fn a_slice_that_was_evicted_does_not_come_back_as_it_was() {
    check(2, move || {
        let image = Arc::new(Image {
            cache: SliceCache::of_slices(SLICE, 1, 1),
            disk: Disk(Mutex::new([7; SLICES])),
        });
        let other = image.clone();
        let reader = thread::spawn(move || other.word(0));
        image.change_and_flush(0, 8);
        image.cache.load(SLICE, &image.disk).unwrap();
        let seen = reader.join().unwrap();
        assert!(seen == 7 || seen == 8, "a word that was never there");
        assert_eq!(image.word(0), 8, "an old slice came back");
    });
}

/// One thread walks two slices, as a map scan does, and caches what it has read ahead. Another
/// changes the first slice, writes it, and loads a third one, which evicts it.
#[test]
fn a_walk_does_not_bring_back_a_slice_that_was_evicted() {
    check(2, move || {
        let image = Arc::new(Image {
            cache: SliceCache::of_slices(SLICE, 1, 1),
            disk: Disk(Mutex::new([7; SLICES])),
        });
        let other = image.clone();
        let walker = thread::spawn(move || {
            let mut seen = Vec::new();
            let visit = |words: &[u64]| {
                seen.push(words[0]);
                Seen::LastAndRest
            };
            other.cache.walk(0, 2, &other.disk, visit).unwrap();
            seen
        });
        image.change_and_flush(0, 8);
        image.cache.load(2 * SLICE, &image.disk).unwrap();
        let seen = walker.join().unwrap();
        assert!(
            seen.iter().all(|word| [7, 8].contains(word)),
            "words that were never there: {seen:?}"
        );
        assert_eq!(image.word(0), 8, "an old slice came back");
        assert_eq!(image.word(SLICE), 7);
    });
}
