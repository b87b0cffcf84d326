//! The end of a compaction: the file is cut, and its free middle punched out.

use vdkit_block::{CompactReport, HostOffset, LeftAlone, Result};

use super::shrink::shrink_refcount_table;
use super::space::Space;

/// Lets go of refcount blocks that describe nothing and of the refcount table's end, cuts the file behind the last cluster in use
/// and gives the space of free clusters before it back.
pub(super) fn cut(space: &mut Space<'_>, end: u64, report: &mut CompactReport) -> Result<()> {
    while drop_blocks(space)? {}
    shrink_refcount_table(space, report)?;
    let left: Vec<u64> = space.used_from(end).map(|(cluster, _)| cluster).collect();
    let metadata = left.iter().filter(|&&cluster| space.is_metadata(cluster)).count() as u64;
    if metadata > 0 {
        report.left_alone.push(LeftAlone {
            what: "tables, for which no free space was in one piece, and refcount blocks of what \
                   stays",
            clusters: metadata,
        });
    }
    let used_end = space.used_end();
    let storage = &*space.image.storage;
    let bytes = space.offset(used_end);
    if storage.caps().growable && bytes < storage.len()? {
        // All that was behind has no reference any more, on disk neither.
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
        space.punch(gap);
    }
    Ok(())
}

/// Lets go of blocks whose only refcount, if any, is their own. Returns whether there were some.
fn drop_blocks(space: &mut Space<'_>) -> Result<bool> {
    let geometry = *space.image.geometry();
    let block_bits = geometry.refcount_block_bits();
    // Which blocks describe something, other than themselves.
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
    space.sync()?;
    for &cluster in &dropped {
        space.refer(cluster, -1);
    }
    space.write_refcounts()?;
    space.sync()?;
    Ok(true)
}
