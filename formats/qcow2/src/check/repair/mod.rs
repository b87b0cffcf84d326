//! Repairs in rounds: survey the image, repair the first kind of damage, and survey again.
//!
//! Each round does one kind of repair, in an order in which a crash at any point leaves an image
//! that is no worse than before:
//!
//! 1. [`entries`]: invalid entries are corrected or cleared in place, and damaged bitmaps forgotten.
//!    Before it, the image is marked as corrupt if a refcount would exceed its width.
//! 2. [`relocate`]: metadata that shares a cluster with something else, and a damaged snapshot table,
//!    are written to new clusters, together with a whole new set of refcounts; one header write
//!    switches to them.
//! 3. [`recount`]: refcounts that are too low are raised, then those that are too high are lowered.
//! 4. COPIED flags are set according to the refcounts (in [`entries`]).
//! 5. The dirty and the corrupt bit are cleared (here).
//!
//! Unknown autoclear bits are cleared before anything else is written. Step 2 also makes refcounts
//! for clusters whose refcount block is missing or damaged. Step 5 is done once, at the end.
//!
//! What is written anew goes behind all that entries name, also past the end of the file, see
//! [`dangling`].
//!
//! Before the first round, [`suspicion`] refuses the repair if the header is probably wrong.
//! [`orphans`] refuses it if it would free L2 tables whose reference is damaged; [`search`] finds
//! those tables.

mod dangling;
mod entries;
mod orphans;
mod recount;
mod relocate;
mod search;
mod suspicion;

use std::sync::Arc;

use rustc_hash::FxHashSet;
use vdkit_block::{
    CheckReport, Error, Finding, HostOffset, Limits, Monitor, Remedy, Repair, Result, Severity,
    Storage, require_writable,
};

use super::image::Image;
use super::survey::{Mode, Survey};
use crate::header::{END_MARK, write_features};
use crate::layout::{autoclear, incompatible};
use crate::structures::header_offset;
pub(in crate::check) use orphans::Kept;
use search::Scope;

/// Most rounds of a repair; no known damage takes more than eight.
const ROUNDS_MAX: usize = 24;

/// Allowed repairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// Lower refcounts that are too high and set COPIED flags, if the mapping is undamaged.
    Leaks,
    All,
    /// Refcounts and COPIED flags; other damage is an error.
    Recover,
}

/// A check with repair. See [`super::check`].
pub(in crate::check) fn run(
    storage: &Arc<dyn Storage>,
    data_file: bool,
    repair: Repair,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<CheckReport> {
    let policy = match repair {
        Repair::All | Repair::AllForced => Policy::All,
        _ => Policy::Leaks,
    };
    require_writable(storage.caps().writable, storage.name())?;
    let mut image = Image::open(storage, limits)?;
    if image.header.has_data_file() && !data_file {
        return Err(Error::invalid_for(
            &image.name(),
            "its guest data is in another file, without which it is not repaired",
        ));
    }
    let mut first = Survey::take(&image, Mode::Compare, monitor)?;
    suspicion::refuse_wrong_header(&image, &first, monitor)?;
    let mut report = first.report.clone();
    if repair != Repair::AllForced && has_findings(&first) {
        let kept = orphans::find(&image, &first, Scope::Everything, monitor)?;
        if repair == Repair::All {
            orphans::refuse_to_forget(&image, &first, &kept)?;
        } else if first.low > 0 && !kept.is_empty() {
            // Some refcounts are too low, so apparent leaks may be used clusters.
            return Ok(report);
        }
        first = keep(&mut image, first, kept, monitor)?;
    }
    let mut last = rounds(&mut image, first, policy, monitor)?;
    orphans::report(&image, &mut last.report);
    merge_reports(&image, &mut report, &last.report);
    Ok(report)
}

/// Whether there is any damage or leak, or a refcount beyond the end of the file.
fn has_findings(survey: &Survey) -> bool {
    let report = &survey.report;
    report.leaks + report.corruptions + survey.ahead > 0
}

/// Surveys again, with the lost tables counted as in use.
fn keep(image: &mut Image, first: Survey, kept: Kept, monitor: &Monitor<'_>) -> Result<Survey> {
    if kept.is_empty() {
        return Ok(first);
    }
    image.kept = Arc::new(kept);
    Survey::take(image, Mode::Compare, monitor)
}

/// Rebuilds the refcounts and COPIED flags of an image that was not closed cleanly, and clears its
/// dirty bit. The engine calls this when it opens such an image for writing, and must then reread
/// the header, since the refcount table may have moved.
///
/// # Errors
/// [`Error::Corrupt`] if the mapping itself is damaged (only a repair may decide what is lost), and
/// as [`super::check`].
pub fn rebuild_refcounts(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let mut image = Image::open(storage, limits)?;
    let mut first = Survey::take(&image, Mode::Compare, monitor)?;
    refuse_damage(&image, &first)?;
    suspicion::refuse_wrong_header(&image, &first, monitor)?;
    if has_findings(&first) {
        // Opening an image does not search all its free space, unless the whole L1 table is lost.
        let empty = vdkit_block::is_zero(&first.l1);
        let scope = if empty { Scope::Everything } else { Scope::Leaks };
        let kept = orphans::find(&image, &first, scope, monitor)?;
        first = keep(&mut image, first, kept, monitor)?;
    }
    let last = rounds(&mut image, first, Policy::Recover, monitor)?;
    refuse_damage(&image, &last)?;
    if last.report.corruptions > 0 {
        return Err(Error::corrupt(
            image.name(),
            header_offset!(incompatible_features),
            "refcounts",
            "refcounts that cannot be corrected",
            "refcounts equal to the number of references",
        )
        .with_remedy(Remedy::REPAIR));
    }
    Ok(())
}

/// Converts a sound version 3 image to refcounts of 2^`order` bits, in new blocks and a new table.
/// One header write switches to them; a crash before it leaves the old ones. Afterwards the old
/// blocks and table are free.
///
/// # Errors
/// [`Error::Invalid`] if a cluster has more references than the new width can count;
/// [`Error::Corrupt`] if the image is not sound, and as [`super::check`].
pub(crate) fn change_refcount_width(
    storage: &Arc<dyn Storage>,
    order: u32,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    // Refcounts must be exact first: the COPIED flags that go with a refcount that is too high
    // would contradict the new refcounts.
    make_sound(storage, true, limits, monitor)?;
    relocate::change_width(&mut Image::open(storage, limits)?, order, monitor)
}

/// Frees leaked clusters, and returns their number.
///
/// # Errors
/// [`Error::Corrupt`] for an image with any other damage.
pub(in crate::check) fn make_sound(
    storage: &Arc<dyn Storage>,
    data_file: bool,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let image = Image::open(storage, limits)?;
    if image.header.has(incompatible::DIRTY) {
        rebuild_refcounts(storage, limits, monitor)?;
    }
    let found = run(storage, data_file, Repair::Leaks, limits, monitor)?;
    if found.corruptions_left() + found.leaks_left() > 0 {
        let first = found.findings.iter().find(|finding| !finding.repaired);
        let remedy = Remedy::Repair { repair: Repair::All, force: found.leaks_kept > 0 };
        return Err(unsound(&image, first).with_remedy(remedy));
    }
    forget_autoclear(&image)?;
    Ok(found.leaks_fixed)
}

/// [`Error::Corrupt`] if more than refcounts is wrong.
fn refuse_damage(image: &Image, survey: &Survey) -> Result<()> {
    if survey.structural(image) == 0 {
        return Ok(());
    }
    let first = survey.report.findings.iter().find(|finding| {
        finding.severity == Severity::Corruption && finding.structure != "refcount"
    });
    Err(unsound(image, first).with_remedy(Remedy::REPAIR))
}

fn unsound(image: &Image, found: Option<&Finding>) -> Error {
    Error::corrupt(
        image.name(),
        found.map_or(0, |finding| finding.offset),
        found.map_or("metadata", |finding| finding.structure),
        found.map_or("damage".to_owned(), |finding| format!("damage ({})", finding.message)),
        "sound metadata",
    )
}

/// Repairs until nothing is left that the policy allows. Returns the final survey.
fn rounds(
    image: &mut Image,
    first: Survey,
    policy: Policy,
    monitor: &Monitor<'_>,
) -> Result<Survey> {
    // Space is discarded only if the first survey found no structural damage.
    let discard = first.structural(image) == 0;
    let mut survey = first;
    let mut states = FxHashSet::default();
    for _ in 0..ROUNDS_MAX {
        let report = &survey.report;
        let again = !states.insert((
            report.leaks + survey.ahead,
            report.corruptions,
            image.header.autoclear,
            image.header.refcount_table_offset.0,
            survey.copied_wrong(),
        ));
        monitor.cancel.check()?;
        if again || !round(image, &survey, policy, discard, monitor)? {
            break;
        }
        *image = image.again()?;
        survey = Survey::take(image, Mode::Compare, monitor)?;
    }
    if clear_dirty_and_corrupt(image, &survey, policy)? {
        *image = image.again()?;
        survey = Survey::take(image, Mode::Compare, monitor)?;
    }
    Ok(survey)
}

/// Does the first repair that is due. Returns whether there was one.
fn round(
    image: &Image,
    survey: &Survey,
    policy: Policy,
    discard: bool,
    monitor: &Monitor<'_>,
) -> Result<bool> {
    if !has_findings(survey) {
        return Ok(false);
    }
    // An apparent leak may be what a damaged entry pointed to.
    if policy == Policy::Leaks && survey.structural(image) > 0 {
        return Ok(false);
    }
    if forget_autoclear(image)? {
        return Ok(true);
    }
    match policy {
        Policy::All => {
            if mark_overfull(image, survey)?
                || mend_end_mark(image)?
                || entries::apply(image, survey)?
            {
                return Ok(true);
            }
            if !survey.conflicts.is_empty()
                || survey.snapshots.rewrite
                || !survey.refcounts.sound
                || survey.low_without_block
            {
                relocate::apply(image, survey, monitor)?;
                return Ok(true);
            }
        }
        Policy::Recover if survey.low_without_block => {
            relocate::apply(image, survey, monitor)?;
            return Ok(true);
        }
        _ => {}
    }
    if recount::apply(image, survey, policy != Policy::Leaks, discard)? {
        return Ok(true);
    }
    if survey.overfull {
        // With refcounts of one bit, the maximum says that a cluster may be written in place.
        return Ok(false);
    }
    // Lowering a refcount to 1 requires the COPIED flag, so a repair of leaks sets it too.
    if policy != Policy::Leaks || survey.low == 0 {
        return entries::set_copied(image, survey);
    }
    Ok(false)
}

/// Marks an image as corrupt that has a cluster with more references than a refcount can count. A
/// program that wrote to it would count that cluster down to zero before its last reference is
/// gone, and give it out again. Version 2 has no such mark, and counts up to 65535.
fn mark_overfull(image: &Image, survey: &Survey) -> Result<bool> {
    if !survey.overfull || image.header.version < 3 || image.header.has(incompatible::CORRUPT) {
        return Ok(false);
    }
    let bits = image.header.incompatible | incompatible::CORRUPT;
    write_features(&*image.storage, header_offset!(incompatible_features), bits)?;
    Ok(true)
}

/// Writes an end mark without length to the list of header extensions.
fn mend_end_mark(image: &Image) -> Result<bool> {
    let Some(fault) = image.header_faults.iter().find(|f| f.structure == END_MARK) else {
        return Ok(false);
    };
    image.storage.write_at(&[0; 8], HostOffset(fault.offset))?;
    image.storage.sync()?;
    Ok(true)
}

/// A writer must clear unknown and inapplicable autoclear bits.
fn forget_autoclear(image: &Image) -> Result<bool> {
    let known = if image.header.has_data_file() { autoclear::KNOWN } else { autoclear::BITMAPS };
    if image.header.autoclear & !known == 0 {
        return Ok(false);
    }
    write_autoclear(image, image.header.autoclear & known)?;
    Ok(true)
}

fn write_autoclear(image: &Image, bits: u64) -> Result<()> {
    write_features(&*image.storage, header_offset!(autoclear_features), bits)
}

/// Clears the dirty bit if the refcounts are correct, and the corrupt bit if everything is.
fn clear_dirty_and_corrupt(image: &Image, survey: &Survey, policy: Policy) -> Result<bool> {
    let marked = u64::from(image.header.has(incompatible::CORRUPT));
    let report = &survey.report;
    if report.corruptions > marked || report.leaks > 0 && policy != Policy::Recover {
        return Ok(false);
    }
    let mut bits = image.header.incompatible & !incompatible::DIRTY;
    if policy == Policy::All {
        bits &= !incompatible::CORRUPT;
    }
    if bits == image.header.incompatible {
        return Ok(false);
    }
    image.storage.sync()?;
    write_features(&*image.storage, header_offset!(incompatible_features), bits)?;
    Ok(true)
}

/// Adds the repaired findings to the report.
fn merge_reports(image: &Image, report: &mut CheckReport, last: &CheckReport) {
    // Remaining findings come first: the list is bounded, and a repair may have revealed new ones.
    let left: FxHashSet<(u64, &str)> =
        last.findings.iter().map(|finding| (finding.offset, finding.structure)).collect();
    let mut findings = last.findings.clone();
    for mut finding in std::mem::take(&mut report.findings) {
        if findings.len() < CheckReport::FINDINGS_MAX
            && !left.contains(&(finding.offset, finding.structure))
        {
            let cluster = finding.offset >> image.geometry().cluster_bits;
            finding.repaired = !(finding.structure == "refcount" && image.kept.contains(cluster));
            findings.push(finding);
        }
    }
    report.findings = findings;
    report.leaks = report.leaks.max(last.leaks);
    report.corruptions = report.corruptions.max(last.corruptions);
    report.leaks_fixed = report.leaks - last.leaks;
    report.corruptions_fixed = report.corruptions - last.corruptions;
    report.leaks_kept = last.leaks_kept;
    report.total_clusters = last.total_clusters;
    report.allocated_clusters = last.allocated_clusters;
    report.fragmented_clusters = last.fragmented_clusters;
    report.compressed_clusters = last.compressed_clusters;
    report.image_end_offset = last.image_end_offset;
}
