//! Corrects refcounts in existing blocks.

use vdkit_block::Result;

use crate::check::image::{Image, add_to_runs};
use crate::check::survey::Survey;

/// Raises refcounts that are too low (if `raise`), makes that durable, then lowers those that are
/// too high. Returns whether anything changed. With `discard`, discards freed clusters in the file
/// system.
pub(super) fn apply(image: &Image, survey: &Survey, raise: bool, discard: bool) -> Result<bool> {
    let mut changed = false;
    if raise && survey.low > 0 {
        changed |= set(image, survey, |balance| balance < 0, |_| {})?;
        image.storage.sync()?;
    }
    let mut freed = Vec::new();
    if survey.report.leaks + survey.ahead > 0 {
        let add = |cluster| add_to_runs(&mut freed, cluster);
        changed |= set(image, survey, |balance| balance > 0, add)?;
        image.storage.sync()?;
    }
    if discard {
        freed.into_iter().for_each(|run| image.punch(run));
    }
    Ok(changed)
}

/// Sets the refcount of each cluster whose balance is `wanted` to its number of references. More
/// than the width can count become its maximum: see [`super::mark_overfull`].
fn set(
    image: &Image,
    survey: &Survey,
    wanted: impl Fn(i128) -> bool,
    mut freed: impl FnMut(u64),
) -> Result<bool> {
    let max = i128::from(image.geometry().refcount_max());
    let clusters = survey.balance.unbalanced().filter(|&(_, balance)| wanted(balance));
    survey.refcounts.change(image, clusters.map(|(cluster, _)| cluster), |cluster, refcount| {
        let references = i128::from(refcount) - survey.balance.balance(cluster);
        if references <= 0 {
            freed(cluster);
        }
        references.clamp(0, max) as u64
    })
}
