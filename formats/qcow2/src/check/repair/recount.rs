//! Corrects refcounts in existing blocks.

use vdkit_block::{HostOffset, Result};

use super::write_changed;
use crate::check::image::{Image, add_to_runs};
use crate::check::survey::Survey;
use crate::refcounts::{get_refcount, set_refcount};

/// Raises refcounts that are too low (if `raise`), makes that durable, then lowers those that are
/// too high. Returns whether anything changed. With `discard`, discards freed clusters in the file
/// system.
pub(super) fn apply(image: &Image, survey: &Survey, raise: bool, discard: bool) -> Result<bool> {
    let mut changed = false;
    if raise && survey.low > 0 {
        changed |= set(image, survey, |balance| balance < 0, &mut |_| {})?;
        image.storage.sync()?;
    }
    let mut freed = Vec::new();
    if survey.findings.report.leaks + survey.ahead > 0 {
        let mut add = |cluster| add_to_runs(&mut freed, cluster);
        changed |= set(image, survey, |balance| balance > 0, &mut add)?;
        image.storage.sync()?;
    }
    if discard {
        freed.into_iter().for_each(|run| image.punch(run));
    }
    Ok(changed)
}

/// Sets the refcount of each cluster whose balance is `wanted` to its number of references.
fn set(
    image: &Image,
    survey: &Survey,
    wanted: impl Fn(i128) -> bool,
    freed: &mut impl FnMut(u64),
) -> Result<bool> {
    let geometry = image.geometry();
    let order = geometry.refcount_order;
    let mut changed = false;
    let mut block = Block { at: 0, old: Vec::new(), new: Vec::new() };
    for (cluster, balance) in survey.balance.unbalanced() {
        let Some(at) = survey.refcounts.block_of(image, cluster).filter(|_| wanted(balance)) else {
            continue;
        };
        if at != block.at {
            changed |= block.write(image)?;
            block.read(image, at)?;
        }
        let index = cluster & (geometry.refcount_block_entries() - 1);
        let refcount = i128::from(get_refcount(&block.new, index, order));
        // More references than the width can count become its maximum: such a cluster is never
        // written in place, and the report says that the image must be converted.
        let references = (refcount - balance).clamp(0, i128::from(geometry.refcount_max()));
        set_refcount(&mut block.new, index, order, references as u64);
        if references == 0 {
            freed(cluster);
        }
    }
    changed |= block.write(image)?;
    Ok(changed)
}

struct Block {
    at: u64,
    old: Vec<u8>,
    new: Vec<u8>,
}

impl Block {
    fn read(&mut self, image: &Image, at: u64) -> Result<()> {
        self.old.resize(image.cluster_bytes() as usize, 0);
        image.storage.read_padded(&mut self.old, HostOffset(at))?;
        self.new.clone_from(&self.old);
        self.at = at;
        Ok(())
    }

    fn write(&self, image: &Image) -> Result<bool> {
        write_changed(image, self.at, &self.old, &self.new)
    }
}
