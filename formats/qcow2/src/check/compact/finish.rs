//! Finishes a compaction: truncates the file, and punches out its free clusters.

use vdkit_block::{CompactReport, HostOffset, LeftAlone, Result};

use super::shrink::shrink_refcount_table;
use super::space::Space;

/// Releases refcount blocks that describe nothing and the unused end of the refcount table,
/// truncates the file after the last used cluster, and discards free clusters before it.
pub(super) fn cut(space: &mut Space<'_>, end: u64, report: &mut CompactReport) -> Result<()> {
    while drop_blocks(space)? {}
    shrink_refcount_table(space, report)?;
    let left: Vec<u64> = space.used_from(end).map(|(cluster, _)| cluster).collect();
    let metadata = left.iter().filter(|&&cluster| space.is_metadata(cluster)).count() as u64;
    if metadata > 0 {
        report.left_alone.push(LeftAlone {
            what: "tables without contiguous free space, and refcount blocks of clusters that stay",
            clusters: metadata,
        });
    }
    let used_end = space.used_end();
    let storage = &*space.image.storage;
    let bytes = space.offset(used_end);
    if storage.caps().growable && bytes < storage.len()? {
        // Nothing refers to clusters beyond the new end, also on disk.
        storage.set_len(bytes)?;
        space.sync()?;
    }
    let mut free = 0;
    let mut gaps = Vec::new();
    for (cluster, _) in space.used_from(0) {
        if cluster > free {
            gaps.push(free..cluster);
        }
        free = cluster + 1;
    }
    for gap in gaps {
        space.monitor.cancel.check()?;
        space.image.punch(gap);
    }
    Ok(())
}

/// Releases blocks whose only refcount, if any, is their own. Returns whether there were any.
fn drop_blocks(space: &mut Space<'_>) -> Result<bool> {
    let geometry = *space.image.geometry();
    let block_bits = geometry.refcount_block_bits();
    // Blocks that describe clusters other than themselves.
    let mut needed = vec![false; space.survey.refcounts.blocks.len()];
    for (cluster, _) in space.used_from(0) {
        let index = (cluster >> block_bits) as usize;
        if let Some(needed) = needed.get_mut(index) {
            *needed |= space.survey.refcounts.blocks[index] != space.offset(cluster);
        }
    }
    let table = space.image.header.refcount_table_offset.0;
    let mut dropped = Vec::new();
    for index in (0..needed.len()).filter(|&index| !needed[index]) {
        let block = std::mem::take(&mut space.survey.refcounts.blocks[index]);
        if block != 0 {
            let at = HostOffset(table + index as u64 * 8);
            space.image.storage.write_at(&[0; 8], at)?;
            dropped.push(block >> geometry.cluster_bits);
        }
    }
    if dropped.is_empty() {
        return Ok(false);
    }
    space.release(dropped.into_iter().map(|cluster| (cluster, 1)))?;
    Ok(true)
}
