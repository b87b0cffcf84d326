//! The table of blocks, read in pieces on demand.

use std::ops::Range;

use vdkit_block::{Error, HostOffset, Result, Storage};
use vdkit_meta::PageCache;
use zerocopy::IntoBytes;

use crate::geometry::{Geometry, HOLE};

/// Entries of a page: 4 KiB of the table.
pub(crate) const PAGE_ENTRIES: usize = 1024;
pub(crate) const PAGE_BYTES: u64 = PAGE_ENTRIES as u64 * 4;

/// Least capacity of the cache in pages.
pub(crate) const PAGES_MIN: usize = 16;

/// Entries of one step of a walk over a whole table.
pub(crate) const STEP_ENTRIES: u64 = 256 << 10;

/// The cached table: pages by number.
pub(crate) type Table = PageCache<u64, Page>;
pub(crate) type Page = Box<[u32; PAGE_ENTRIES]>;

/// Reads a page. Entries beyond the end of the table are holes.
pub(crate) fn read_page(storage: &dyn Storage, geometry: &Geometry, number: u64) -> Result<Page> {
    let mut page = Box::new([HOLE; PAGE_ENTRIES]);
    let (first, count) = entries_of(geometry, number);
    read_entries(storage, geometry, first, &mut page[..count])?;
    Ok(page)
}

/// The first entry of a page, and its number of entries.
fn entries_of(geometry: &Geometry, number: u64) -> (u64, usize) {
    let first = number * PAGE_ENTRIES as u64;
    (first, geometry.entries.saturating_sub(first).min(PAGE_ENTRIES as u64) as usize)
}

pub(crate) fn write_pages(
    storage: &dyn Storage,
    geometry: &Geometry,
    pages: &[(u64, Page)],
) -> Result<()> {
    for (number, page) in pages {
        let (first, count) = entries_of(geometry, *number);
        write_entries(storage, geometry, first, &page[..count])?;
    }
    Ok(())
}

/// Reads entries from `first` on.
///
/// # Errors
/// Those of the storage, also for a table that exceeds the file.
pub(crate) fn read_entries(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    out: &mut [u32],
) -> Result<()> {
    storage.read_at(out.as_mut_bytes(), HostOffset(geometry.entry_at(first)))?;
    for word in out {
        *word = geometry.order.converted(*word);
    }
    Ok(())
}

/// Writes entries from `first` on.
///
/// # Errors
/// Those of the storage.
pub(crate) fn write_entries(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    words: &[u32],
) -> Result<()> {
    let stored: Vec<u32> = words.iter().map(|word| geometry.order.converted(*word)).collect();
    storage.write_at(stored.as_bytes(), HostOffset(geometry.entry_at(first)))
}

/// Writes entries of consecutive blocks, the first one at `start`.
///
/// # Errors
/// [`Error::NoSpace`] if a block has no number; those of the storage.
pub fn write_blocks(
    storage: &dyn Storage,
    geometry: &Geometry,
    entries: Range<u64>,
    start: u64,
) -> Result<()> {
    let mut index = entries.start;
    while index < entries.end {
        let last = entries.end.min(index + STEP_ENTRIES);
        let starts = (index..last).map(|n| start + (n - entries.start) * geometry.stride());
        let words: Option<Vec<u32>> = starts.map(|start| geometry.word(start)).collect();
        let words = words.ok_or_else(|| {
            Error::no_space(storage.name(), "the table has no number for the last block")
        })?;
        write_entries(storage, geometry, index, &words)?;
        index = last;
    }
    Ok(())
}

/// Writes `count` entries of missing blocks.
///
/// # Errors
/// Those of the storage.
pub fn write_holes(
    storage: &dyn Storage,
    geometry: &Geometry,
    first: u64,
    count: u64,
) -> Result<()> {
    let piece = vec![HOLE; STEP_ENTRIES.min(count) as usize];
    let mut done = 0;
    while done < count {
        let step = STEP_ENTRIES.min(count - done);
        write_entries(storage, geometry, first + done, &piece[..step as usize])?;
        done += step;
    }
    Ok(())
}

/// Calls `visit` for all entries of a table in batches, with the index of the first entry and the
/// entries. If `visit` returns true, writes them back.
pub(crate) fn walk(
    storage: &dyn Storage,
    geometry: &Geometry,
    visit: impl FnMut(u64, &mut [u32]) -> Result<bool>,
) -> Result<()> {
    copy_entries(storage, geometry, geometry, visit)
}

/// Calls `visit` for all entries of a table in batches, with the index of the first entry and the
/// entries. If `visit` returns true, writes them to the table `to`.
///
/// # Errors
/// Those of the storage and of `visit`.
pub fn copy_entries(
    storage: &dyn Storage,
    from: &Geometry,
    to: &Geometry,
    mut visit: impl FnMut(u64, &mut [u32]) -> Result<bool>,
) -> Result<()> {
    let mut words = vec![0; STEP_ENTRIES.min(from.entries) as usize];
    let mut first = 0;
    while first < from.entries {
        let count = STEP_ENTRIES.min(from.entries - first) as usize;
        read_entries(storage, from, first, &mut words[..count])?;
        if visit(first, &mut words[..count])? {
            write_entries(storage, to, first, &words[..count])?;
        }
        first += count as u64;
    }
    Ok(())
}
