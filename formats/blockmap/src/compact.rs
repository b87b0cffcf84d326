//! Closes gaps between blocks, and drops blocks of zeroes.

use vdkit_block::{
    CompactOptions, CompactReport, Error, HostOffset, Limits, Monitor, Remedy, Result,
    SparseReader, Storage, ZeroMode, is_zero, punch_zeroes, require_within,
};

use crate::geometry::{Geometry, HOLE, Slot};
use crate::image::Envelope;
use crate::table::{walk, write_entries};

/// Bytes of one read.
const PIECE_BYTES: u64 = 1 << 20;
/// Most blocks to copy between two syncs.
const MOVES_MAX: usize = 16;

/// A host block and the table entry that owns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Placed {
    pub(crate) start: u64,
    pub(crate) index: u64,
}

/// Result of closing gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// New end of the blocks.
    pub end: u64,
    /// Blocks that were moved.
    pub moved: u64,
}

/// All blocks that the table names, sorted by host offset.
///
/// # Errors
/// [`Error::Limit`] for more blocks than the memory limit allows; those of the storage.
pub(crate) fn placed(
    storage: &dyn Storage,
    geometry: &Geometry,
    bytes_max: u64,
) -> Result<Vec<Placed>> {
    let mut blocks: Vec<Placed> = Vec::new();
    walk(storage, geometry, |first, words| {
        for (n, word) in words.iter().enumerate() {
            if let Slot::At(start) = geometry.slot(*word) {
                blocks.push(Placed { start, index: first + n as u64 });
            }
        }
        let found = (blocks.len() * size_of::<Placed>()) as u64;
        require_within(storage.name(), "memory for the list of blocks", found, bytes_max)?;
        Ok(false)
    })?;
    blocks.sort_unstable();
    Ok(blocks)
}

/// Moves blocks from the end of the file into gaps between others. A crash at any moment leaves
/// each block at its old or its new place. The file keeps its length.
///
/// # Errors
/// [`Error::Corrupt`] if blocks overlap or are outside of the file; those of the storage.
pub fn close_gaps(
    storage: &dyn Storage,
    geometry: &Geometry,
    monitor: &Monitor<'_>,
) -> Result<Closed> {
    let blocks = sound(storage, geometry)?;
    let stride = geometry.stride();
    let mut mover = Mover::new(storage, geometry);
    let mut closed = Closed { end: geometry.kept_end, moved: 0 };
    let (mut next, mut rest) = (0, blocks.len());
    while next < rest {
        closed.end = geometry.place(closed.end);
        if blocks[next].start.saturating_sub(closed.end) < stride {
            closed.end = blocks[next].start + stride;
            next += 1;
            continue;
        }
        monitor.cancel.check()?;
        monitor.progress.update(next as u64, rest as u64);
        rest -= 1;
        mover.copy(blocks[rest], closed.end)?;
        closed.end += stride;
        closed.moved += 1;
    }
    mover.show()?;
    Ok(closed)
}

/// All blocks that the table names, sorted by host offset: each within the file and on its own.
pub(crate) fn sound(storage: &dyn Storage, geometry: &Geometry) -> Result<Vec<Placed>> {
    let blocks = placed(storage, geometry, Limits::default().check_bytes_max)?;
    let host_bytes = storage.len()?;
    for block in &blocks {
        geometry.judge(storage.name(), block.index, block.start, host_bytes)?;
    }
    let stride = geometry.stride();
    if let Some([a, b]) = blocks.array_windows().find(|[a, b]| b.start - a.start < stride) {
        return Err(Error::corrupt(
            storage.name(),
            geometry.entry_at(b.index),
            "block table entry",
            format!("a block at {:#x}, in that of entry {}", b.start, a.index),
            "a block of its own",
        )
        .with_remedy(Remedy::REPAIR));
    }
    Ok(blocks)
}

/// Moves blocks that begin below `below` to `end` and beyond, for a table that needs their places.
/// Returns the new end of the blocks. As crash-safe as [`close_gaps`].
///
/// # Errors
/// As [`close_gaps`].
pub fn move_away(storage: &dyn Storage, geometry: &Geometry, below: u64, end: u64) -> Result<u64> {
    let blocks = sound(storage, geometry)?;
    let mut mover = Mover::new(storage, geometry);
    let mut end = end;
    for block in blocks.into_iter().take_while(|block| block.start < below) {
        end = geometry.place(end);
        mover.copy(block, end)?;
        end += geometry.stride();
    }
    mover.show()?;
    Ok(end)
}

/// Number of blocks that begin below an offset.
///
/// # Errors
/// Those of the storage.
pub fn blocks_below(storage: &dyn Storage, geometry: &Geometry, below: u64) -> Result<u64> {
    let mut count = 0;
    walk(storage, geometry, |_, words| {
        let starts = words.iter().map(|word| geometry.slot(*word));
        count += starts.filter(|slot| matches!(slot, Slot::At(at) if *at < below)).count() as u64;
        Ok(false)
    })?;
    Ok(count)
}

/// Copies blocks and changes their entries, in a crash-safe order.
pub(crate) struct Mover<'a> {
    storage: &'a dyn Storage,
    geometry: &'a Geometry,
    /// Copies that no entry names yet: entry and new place.
    copied: Vec<(u64, u64)>,
    buf: Vec<u8>,
}

impl<'a> Mover<'a> {
    pub(crate) fn new(storage: &'a dyn Storage, geometry: &'a Geometry) -> Self {
        Self { storage, geometry, copied: Vec::new(), buf: Vec::new() }
    }

    /// Copies a block to a free place.
    pub(crate) fn copy(&mut self, from: Placed, to: u64) -> Result<()> {
        let stride = self.geometry.stride();
        self.buf.resize(PIECE_BYTES.min(stride) as usize, 0);
        let mut done = 0;
        while done < stride {
            let piece = &mut self.buf[..PIECE_BYTES.min(stride - done) as usize];
            self.storage.read_padded(piece, HostOffset(from.start + done))?;
            let (at, len) = (HostOffset(to + done), piece.len() as u64);
            if is_zero(piece) {
                self.storage.write_zeroes(at, len, ZeroMode::MayUnmap)?;
            } else {
                self.storage.write_at(piece, at)?;
            }
            done += len;
        }
        self.copied.push((from.index, to));
        if self.copied.len() >= MOVES_MAX { self.show() } else { Ok(()) }
    }

    /// Changes the entries of the copied blocks. Afterwards the old places are free.
    pub(crate) fn show(&mut self) -> Result<()> {
        if self.copied.is_empty() {
            return Ok(());
        }
        self.storage.sync()?;
        for (index, start) in self.copied.drain(..) {
            let word = self.geometry.word(start).ok_or_else(|| {
                Error::invalid_for(&self.storage.name(), format!("no block can be at {start:#x}"))
            })?;
            write_entries(self.storage, self.geometry, index, &[word])?;
        }
        // Durable before any write to the old places.
        self.storage.sync()
    }
}

/// Compacts an image in place. See [`vdkit_block::Compaction::compact`].
///
/// # Errors
/// As [`close_gaps`]; [`Error::Interrupted`].
pub fn compact(
    storage: &dyn Storage,
    envelope: &dyn Envelope,
    geometry: &Geometry,
    options: CompactOptions,
    monitor: &Monitor<'_>,
) -> Result<CompactReport> {
    let mut report = CompactReport {
        length_before: storage.len()?,
        allocated_before: storage.allocated_bytes()?,
        ..CompactReport::default()
    };
    if envelope.all_allocated() {
        // Every block has a fixed place; blocks of zeroes become holes.
        report.punched_bytes = if options.zero_scan { punch_zeroes(storage, monitor)? } else { 0 };
    } else {
        drop(sound(storage, geometry)?);
        // With a parent, only a zero entry can hide its data.
        if geometry.zero.is_some() || !envelope.over_parent() {
            report.zero_clusters = drop_zeroes(storage, geometry, options, monitor)?;
        }
        let closed = close_gaps(storage, geometry, monitor)?;
        report.moved_clusters = closed.moved;
        envelope.finish(geometry, closed.end)?;
        storage.sync()?;
    }
    report.length_after = storage.len()?;
    report.allocated_after = storage.allocated_bytes()?;
    Ok(report)
}

/// Removes the entries of blocks of zeroes, durably. Holes of the file count as zeroes without
/// being read.
fn drop_zeroes(
    storage: &dyn Storage,
    geometry: &Geometry,
    options: CompactOptions,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let mut reader = SparseReader::new(storage)?;
    let mut dropped = 0;
    let all = geometry.entries;
    walk(storage, geometry, |first, words| {
        let before = dropped;
        for (n, word) in words.iter_mut().enumerate() {
            let Slot::At(start) = geometry.slot(*word) else { continue };
            monitor.cancel.check()?;
            monitor.progress.update(first + n as u64, all);
            let data = HostOffset(start + geometry.skip);
            if reader.is_zero(data, geometry.block_bytes, options.zero_scan)? {
                *word = geometry.zero.unwrap_or(HOLE);
                dropped += 1;
            }
        }
        Ok(dropped > before)
    })?;
    if dropped > 0 {
        // Durable before their places are reused.
        storage.sync()?;
    }
    Ok(dropped)
}
