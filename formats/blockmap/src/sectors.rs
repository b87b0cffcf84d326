//! Sector bitmaps of images with a parent: the present sectors of a block, before its data, with
//! the most significant bit first (VHD).

use std::ops::Range;

use vdkit_block::{HostOffset, Result, Storage};
use vdkit_meta::PageCache;

const SECTOR: u64 = 512;
/// Most bytes of cached bitmaps. Changed ones are never evicted; a write flushes if they fill half of
/// it.
const KEPT_BYTES_MAX: u64 = 8 << 20;

/// The bitmaps of an open image, by the start of their blocks.
pub(crate) type SectorMaps = PageCache<u64, Vec<u8>>;

/// The cache of an image whose bitmaps have `bytes` bytes each.
pub(crate) fn cache(bytes: u64) -> SectorMaps {
    SectorMaps::new(KEPT_BYTES_MAX, bytes, 1)
}

fn bit(bitmap: &[u8], sector: u64) -> bool {
    bitmap.get((sector / 8) as usize).is_some_and(|byte| byte & 0x80 >> (sector % 8) != 0)
}

/// Whether the sector at `from` bytes within a block is present, and for how many bytes that holds,
/// at most `len`.
pub(crate) fn run_of(bitmap: &[u8], from: u64, len: u64) -> (bool, u64) {
    let first = from / SECTOR;
    let present = bit(bitmap, first);
    let last = (from + len - 1) / SECTOR;
    let end = (first + 1..=last).find(|sector| bit(bitmap, *sector) != present);
    let end = end.unwrap_or(last + 1) * SECTOR;
    (present, len.min(end - from))
}

pub(crate) fn read(storage: &dyn Storage, start: u64, bytes: u64) -> Result<Vec<u8>> {
    let mut bitmap = vec![0; bytes as usize];
    storage.read_at(&mut bitmap, HostOffset(start))?;
    Ok(bitmap)
}

pub(crate) fn mark(bitmap: &mut [u8], within: &Range<u64>) {
    for sector in within.start / SECTOR..within.end.div_ceil(SECTOR) {
        if let Some(byte) = bitmap.get_mut((sector / 8) as usize) {
            *byte |= 0x80 >> (sector % 8);
        }
    }
}
