//! Which sectors of a block are in an image over a parent: a bitmap before each block's data, the most
//! significant bit first (VHD).

use std::collections::BTreeSet;
use std::ops::Range;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use vdkit_block::{HostOffset, Result, Storage};

const SECTOR: u64 = 512;
/// Bytes of bitmaps that are kept; changed ones are never dropped and may exceed it.
const KEPT_BYTES_MAX: usize = 8 << 20;

#[derive(Debug, Default)]
struct Kept {
    bitmaps: FxHashMap<u64, Vec<u8>>,
    bytes: usize,
    dirty: BTreeSet<u64>,
    /// Being written.
    writing: BTreeSet<u64>,
}

/// The bitmaps of an open image, by where their blocks begin.
#[derive(Debug, Default)]
pub struct SectorMaps {
    kept: Mutex<Kept>,
}

fn bit(bitmap: &[u8], sector: u64) -> bool {
    bitmap.get((sector / 8) as usize).is_some_and(|byte| byte & 0x80 >> (sector % 8) != 0)
}

impl SectorMaps {
    /// Whether the sector at `from` bytes within a block is in the image, and for how many bytes the
    /// answer holds, at most `len`; nothing where the bitmap is not kept.
    pub(crate) fn run(&self, start: u64, from: u64, len: u64) -> Option<(bool, u64)> {
        let kept = self.kept.lock();
        let bitmap = kept.bitmaps.get(&start)?;
        let first = from / SECTOR;
        let present = bit(bitmap, first);
        let last = (from + len - 1) / SECTOR;
        let end = (first + 1..=last).find(|sector| bit(bitmap, *sector) != present);
        let end = end.unwrap_or(last + 1) * SECTOR;
        Some((present, len.min(end - from)))
    }

    /// Reads the bitmap of a block, where it is not kept.
    pub(crate) fn load(&self, storage: &dyn Storage, start: u64, bytes: u64) -> Result<()> {
        // Under the lock, so that nobody puts back what was read before a change.
        let mut kept = self.kept.lock();
        if kept.bitmaps.contains_key(&start) {
            return Ok(());
        }
        let mut bitmap = vec![0; bytes as usize];
        storage.read_at(&mut bitmap, HostOffset(start))?;
        if kept.bytes + bitmap.len() > KEPT_BYTES_MAX {
            let Kept { bitmaps, dirty, writing, bytes } = &mut *kept;
            bitmaps.retain(|start, _| dirty.contains(start) || writing.contains(start));
            *bytes = bitmaps.values().map(Vec::len).sum();
        }
        kept.bytes += bitmap.len();
        kept.bitmaps.insert(start, bitmap);
        Ok(())
    }

    /// Notes that bytes of a block are in the image; `false` where the bitmap is not kept.
    pub(crate) fn mark(&self, start: u64, within: Range<u64>) -> bool {
        let mut kept = self.kept.lock();
        let Some(bitmap) = kept.bitmaps.get_mut(&start) else { return false };
        for sector in within.start / SECTOR..within.end.div_ceil(SECTOR) {
            if let Some(byte) = bitmap.get_mut((sector / 8) as usize) {
                *byte |= 0x80 >> (sector % 8);
            }
        }
        kept.dirty.insert(start);
        true
    }

    pub(crate) fn dirty(&self) -> bool {
        !self.kept.lock().dirty.is_empty()
    }

    /// Copies of the changed bitmaps.
    pub(crate) fn take_changed(&self) -> Vec<(u64, Vec<u8>)> {
        let mut kept = self.kept.lock();
        kept.writing = std::mem::take(&mut kept.dirty);
        let Kept { bitmaps, writing, .. } = &*kept;
        writing.iter().filter_map(|start| Some((*start, bitmaps.get(start)?.clone()))).collect()
    }

    /// What became of them.
    pub(crate) fn written(&self, done: bool) {
        let mut kept = self.kept.lock();
        let writing = std::mem::take(&mut kept.writing);
        if !done {
            kept.dirty.extend(writing);
        }
    }
}
