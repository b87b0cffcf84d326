//! Shrinks tables that have more clusters than they need: an L1 table of a formerly larger disk, a
//! refcount table of a formerly longer file.
//!
//! One write of a table's length, within the header's first sector, shortens it; then its last
//! clusters lose their refcounts. A crash between the two leaks these clusters.

use std::ops::Range;

use vdkit_block::{CompactReport, HostOffset, Result};

use super::space::Space;
use crate::structures::{header_offset, words};

/// Shortens both tables, if that frees clusters.
pub(super) fn shrink_tables(space: &mut Space<'_>, report: &mut CompactReport) -> Result<()> {
    shrink_l1(space, report)?;
    shrink_refcount_table(space, report)
}

/// Keeps the L1 entries that the disk needs, and all up to the last one that names an L2 table
/// (those of a VM state follow the disk's).
fn shrink_l1(space: &mut Space<'_>, report: &mut CompactReport) -> Result<()> {
    let image = &space.image;
    let header = &image.header;
    let named = words(&space.survey.l1).iter().rposition(|entry| entry.get() != 0);
    let needed = image.geometry().l1_entries_for(header.guest_bytes).max(1);
    let entries = needed.max(named.map_or(0, |last| last as u64 + 1));
    let offset = header.l1_offset.0;
    let old = image.clusters_of(offset, u64::from(header.l1_entries) * 8);
    let new = image.clusters_of(offset, entries * 8);
    if new.end >= old.end {
        return Ok(());
    }
    // Fewer than before.
    let entries = entries as u32;
    image.storage.write_at(&entries.to_be_bytes(), HostOffset(header_offset!(l1_size)))?;
    space.image.header.l1_entries = entries;
    space.survey.l1.truncate(entries as usize * 8);
    free(space, new.end..old.end, report)
}

/// Cuts the refcount table after the cluster that names the last block.
pub(super) fn shrink_refcount_table(
    space: &mut Space<'_>,
    report: &mut CompactReport,
) -> Result<()> {
    let cluster = space.image.cluster_bytes();
    let blocks = &space.survey.refcounts.blocks;
    let used = blocks.iter().rposition(|&block| block != 0).map_or(0, |last| last as u64 + 1);
    let clusters = (used * 8).div_ceil(cluster).max(1);
    let header = &mut space.image.header;
    let present = u64::from(header.refcount_table_clusters);
    if clusters >= present {
        return Ok(());
    }
    let first = header.refcount_table_offset.0 / cluster;
    let count = clusters as u32;
    let at = HostOffset(header_offset!(refcount_table_clusters));
    space.image.storage.write_at(&count.to_be_bytes(), at)?;
    space.image.header.refcount_table_clusters = count;
    space.survey.refcounts.blocks.truncate((clusters * cluster / 8) as usize);
    free(space, first + clusters..first + present, report)
}

/// Frees the last clusters of a table, once the header with its new length is durable.
fn free(space: &mut Space<'_>, clusters: Range<u64>, report: &mut CompactReport) -> Result<()> {
    report.table_clusters += clusters.end - clusters.start;
    space.release(clusters.map(|cluster| (cluster, 1)))
}
