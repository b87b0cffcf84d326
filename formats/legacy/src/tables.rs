//! A bounded cache of table pieces.

use vdkit_block::{HostOffset, MapCacheStats, Result, Storage};
use vdkit_meta::PageCache;

const PIECE_BYTES: u64 = 4096;
const CACHE_BYTES: u64 = 8 << 20;

/// Cached pieces of an image's tables, by number.
#[derive(Debug)]
pub(crate) struct Tables(PageCache<u64, Vec<u8>>);

impl Tables {
    pub(crate) fn new() -> Self {
        Self(PageCache::new(CACHE_BYTES, PIECE_BYTES, 1))
    }

    /// `N` bytes at an offset, read if not cached. Fails beyond the end of the file. If `N` is a
    /// power of two and the offset a multiple of it, they lie within one piece.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn bytes<const N: usize>(&self, storage: &dyn Storage, at: u64) -> Result<[u8; N]> {
        let (number, from) = (at / PIECE_BYTES, (at % PIECE_BYTES) as usize);
        let read = || {
            let mut piece = vec![0; PIECE_BYTES as usize];
            let got = storage.read_up_to(&mut piece, HostOffset(number * PIECE_BYTES))?;
            piece.truncate(got);
            Ok(piece)
        };
        if from + N <= PIECE_BYTES as usize {
            let kept = |piece: &Vec<u8>| piece.get(from..from + N)?.try_into().ok();
            if let Some(found) = self.0.with_loaded(number, read, kept)? {
                return Ok(found);
            }
        }
        // Crosses a boundary, which is rare, or the file ends here: the storage returns the error.
        let mut found = [0; N];
        storage.read_at(&mut found, HostOffset(at))?;
        Ok(found)
    }

    pub(crate) fn stats(&self, map_bytes: u64) -> MapCacheStats {
        self.0.stats(map_bytes)
    }
}
