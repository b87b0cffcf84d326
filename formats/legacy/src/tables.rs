//! A bounded cache of table pieces.

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, Result, Storage};

/// Bytes per piece.
pub(crate) const PIECE_BYTES: u64 = 4096;
/// Maximum cached pieces.
const PIECES_MAX: usize = 2048;

/// Cached pieces of an image's tables, by offset.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    pieces: Mutex<FxHashMap<u64, Arc<[u8]>>>,
}

impl Tables {
    /// `N` cached bytes at an offset; `None` if they are not cached. If `N` is a power of two and
    /// the offset a multiple of it, they lie within one piece.
    fn kept<const N: usize>(&self, at: u64) -> Option<[u8; N]> {
        let piece = self.pieces.lock().get(&(at / PIECE_BYTES)).cloned()?;
        let from = (at % PIECE_BYTES) as usize;
        piece.get(from..from + N)?.try_into().ok()
    }

    /// `N` bytes at an offset, read if not cached. Fails beyond the end of the file.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn bytes<const N: usize>(&self, storage: &dyn Storage, at: u64) -> Result<[u8; N]> {
        if let Some(found) = self.kept(at) {
            return Ok(found);
        }
        let first = at / PIECE_BYTES;
        if (at % PIECE_BYTES) + N as u64 > PIECE_BYTES {
            // Crosses a boundary: rare, and not worth caching.
            let mut found = [0; N];
            storage.read_at(&mut found, HostOffset(at))?;
            return Ok(found);
        }
        let mut piece = vec![0; PIECE_BYTES as usize];
        let got = storage.read_up_to(&mut piece, HostOffset(first * PIECE_BYTES))?;
        piece.truncate(got);
        let mut pieces = self.pieces.lock();
        if pieces.len() >= PIECES_MAX {
            pieces.clear();
        }
        pieces.insert(first, piece.into());
        drop(pieces);
        match self.kept(at) {
            Some(found) => Ok(found),
            // The file ends here; the storage returns the error.
            None => {
                let mut found = [0; N];
                storage.read_at(&mut found, HostOffset(at))?;
                Ok(found)
            }
        }
    }

    /// Bytes in the cache.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.pieces.lock().len() as u64 * PIECE_BYTES
    }
}
