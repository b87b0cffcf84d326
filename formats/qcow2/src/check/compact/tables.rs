//! Moves tables to the front: those with a single pointer, and L2 tables.

use std::mem::offset_of;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use vdkit_block::{CompactReport, HostOffset, Limits, Monitor, Result, Storage};
use zerocopy::FromBytes;

use super::space::Space;
use crate::check::bitmaps::{Presence, presence};
use crate::check::snapshots::Snapshot;
use crate::layout::{COPIED, OFFSET_MASK, extension};
use crate::structures::{
    BitmapDirectoryEntry, BitmapsExtensionData, header_offset, words, words_mut,
};

/// A structure with one aligned 8-byte pointer, so that one write moves it.
struct Table {
    first: u64,
    count: u64,
    /// Host offset of the pointer to it.
    pointer: u64,
}

/// Kinds of structures. The pointer to a structure is in one of an earlier kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Structures that the header points to.
    Roots,
    /// Structures that roots point to, and refcount blocks.
    Branches,
    /// Clusters of bitmaps.
    Leaves,
}

/// Moves tables at or beyond `end` to free clusters before it.
pub(super) fn move_tables(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
    end: u64,
    report: &mut CompactReport,
) -> Result<()> {
    for kind in [Kind::Roots, Kind::Branches, Kind::Leaves] {
        let mut space = Space::load(storage, limits, monitor)?;
        let mut tables = find(&space, kind, end)?;
        tables.retain(|table| {
            table.first + table.count > end
                && (table.first..table.first + table.count).all(|c| space.references(c) == 1)
        });
        for batch in tables.chunks(space.batch_clusters() as usize) {
            relocate(&mut space, batch, end, report)?;
        }
    }
    move_l2_tables(&mut Space::load(storage, limits, monitor)?, end, report)
}

fn find(space: &Space<'_>, kind: Kind, end: u64) -> Result<Vec<Table>> {
    let image = &space.image;
    let header = &image.header;
    let table = |offset: u64, bytes: u64, pointer: u64| {
        let clusters = image.clusters_of(offset, bytes);
        Table { first: clusters.start, count: clusters.end - clusters.start, pointer }
    };
    let mut tables = Vec::new();
    if kind == Kind::Roots {
        let bytes = u64::from(header.l1_entries) * 8;
        tables.push(table(header.l1_offset.0, bytes, header_offset!(l1_table_offset)));
        let bytes = u64::from(header.refcount_table_clusters) * image.cluster_bytes();
        let offset = header.refcount_table_offset.0;
        tables.push(table(offset, bytes, header_offset!(refcount_table_offset)));
        let offset = header.snapshots_offset.0;
        tables.push(table(offset, space.survey.snapshots.bytes, header_offset!(snapshots_offset)));
    }
    if kind == Kind::Branches {
        let bits = image.geometry().refcount_block_bits();
        for (index, &block) in space.survey.refcounts.blocks.iter().enumerate() {
            // A block that describes only clusters beyond `end` will be dropped instead.
            if block != 0 && (index as u64) << bits < end {
                let pointer = header.refcount_table_offset.0 + index as u64 * 8;
                tables.push(table(block, image.cluster_bytes(), pointer));
            }
        }
        let mut pointer = header.snapshots_offset.0;
        for snapshot in &space.survey.snapshots.snapshots {
            let (offset, bytes) = snapshot.l1();
            tables.push(table(offset, bytes, pointer));
            pointer += snapshot.entry.entry_bytes();
        }
    }
    find_bitmaps(space, kind, &mut tables, table)?;
    tables.retain(|table| table.count > 0);
    Ok(tables)
}

fn find_bitmaps(
    space: &Space<'_>,
    kind: Kind,
    tables: &mut Vec<Table>,
    table: impl Fn(u64, u64, u64) -> Table,
) -> Result<()> {
    let image = &space.image;
    let Presence::Valid(bitmaps) = presence(image) else { return Ok(()) };
    let (at, bytes) = (bitmaps.directory_offset.0, bitmaps.directory_bytes);
    if kind == Kind::Roots {
        if let Some(extension) = image.header.extension(extension::BITMAPS) {
            let field = offset_of!(BitmapsExtensionData, bitmap_directory_offset) as u64;
            tables.push(table(at, bytes, extension.offset + field));
        }
        return Ok(());
    }
    let directory = image.read_table(at, bytes)?;
    let mut start = 0;
    while let Ok((entry, _)) =
        BitmapDirectoryEntry::ref_from_prefix(directory.get(start..).unwrap_or_default())
    {
        let offset = entry.bitmap_table_offset.get();
        let bytes = u64::from(entry.bitmap_table_size) * 8;
        if kind == Kind::Branches {
            // An entry begins with the pointer to its table.
            tables.push(table(offset, bytes, at + start as u64));
        } else {
            let data = image.read_table(offset, bytes)?;
            for (word, pointer) in words(&data).iter().zip((offset..).step_by(8)) {
                let host = word.get() & OFFSET_MASK;
                if host != 0 {
                    tables.push(table(host, image.cluster_bytes(), pointer));
                }
            }
        }
        start += entry.bytes();
    }
    Ok(())
}

/// Moves one batch, as far as each table finds contiguous free space.
fn relocate(
    space: &mut Space<'_>,
    tables: &[Table],
    end: u64,
    report: &mut CompactReport,
) -> Result<()> {
    let mut moves: Vec<(&Table, u64)> = Vec::new();
    for table in tables {
        if let Some(to) = space.take_run(table.count, end.min(table.first)) {
            for cluster in to..to + table.count {
                space.refer(cluster, 1);
            }
            moves.push((table, to));
        }
    }
    if moves.is_empty() {
        return Ok(());
    }
    // Before the copies, which may include refcount blocks.
    space.write_refcounts()?;
    for &(table, to) in &moves {
        space.copy(table.first, to, table.count)?;
    }
    space.sync()?;
    for &(table, to) in &moves {
        let word = space.offset(to).to_be_bytes();
        space.image.storage.write_at(&word, HostOffset(table.pointer))?;
    }
    let bits = space.image.geometry().cluster_bits;
    let places: FxHashMap<u64, u64> =
        moves.iter().map(|&(table, to)| (table.first << bits, to << bits)).collect();
    for block in &mut space.survey.refcounts.blocks {
        *block = places.get(block).copied().unwrap_or(*block);
    }
    release(
        space,
        moves.iter().flat_map(|(table, _)| table.first..table.first + table.count),
        report,
    )
}

/// Frees the old places of moved structures, once the pointers to the new ones are durable.
pub(super) fn release(
    space: &mut Space<'_>,
    clusters: impl Iterator<Item = u64>,
    report: &mut CompactReport,
) -> Result<()> {
    let gone: Vec<(u64, u64)> =
        clusters.map(|cluster| (cluster, space.references(cluster))).collect();
    report.moved_clusters += gone.len() as u64;
    space.release(gone)
}

fn move_l2_tables(space: &mut Space<'_>, end: u64, report: &mut CompactReport) -> Result<()> {
    let bits = space.image.geometry().cluster_bits;
    // The last tables of the file first.
    let tables: Vec<u64> = space.survey.tables.iter().map(|table| table.offset >> bits).collect();
    let behind: Vec<u64> = tables.into_iter().filter(|&cluster| cluster >= end).rev().collect();
    for batch in behind.chunks(space.batch_clusters() as usize) {
        let mut moves: FxHashMap<u64, u64> = FxHashMap::default();
        let mut old = Vec::new();
        for &from in batch {
            let Some(to) = space.take_run(1, end) else { break };
            space.refer(to, space.references(from) as i64);
            space.copy(from, to, 1)?;
            moves.insert(from << bits, to << bits);
            old.push(from);
        }
        if old.is_empty() {
            break;
        }
        space.write_refcounts()?;
        space.sync()?;
        point_l1s(space, &moves)?;
        release(space, old.into_iter(), report)?;
    }
    Ok(())
}

/// Writes new offsets of L2 tables (0: none) to all L1 tables, not yet durably.
pub(super) fn point_l1s(space: &Space<'_>, places: &FxHashMap<u64, u64>) -> Result<()> {
    let image = &space.image;
    let active = (image.header.l1_offset.0, u64::from(image.header.l1_entries) * 8);
    let others = space.survey.snapshots.snapshots.iter().map(Snapshot::l1);
    for (offset, bytes) in std::iter::once(active).chain(others) {
        image.change_table(offset, bytes, |l1| {
            for word in words_mut(l1) {
                let entry = word.get();
                if let Some(&place) = places.get(&(entry & OFFSET_MASK)) {
                    let flag = if place == 0 { 0 } else { entry & COPIED };
                    word.set(place | flag);
                }
            }
        })?;
    }
    Ok(())
}
