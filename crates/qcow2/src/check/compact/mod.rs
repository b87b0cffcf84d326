//! Making an image smaller in place.
//!
//! Steps, each over the whole image, each beginning with a look at it as it stands on disk:
//!
//! 1. What is leaked goes back, so that a cluster without a refcount is free and one with has that
//!    many references. An image with any other damage is refused.
//! 2. [`zeroes`]: clusters that hold zeroes, and tables that map nothing, are let go.
//! 3. [`tables`]: tables behind the end that the file could have move to the front.
//! 4. [`data`]: so does guest data, from the end of the file on.
//! 5. [`finish`]: refcount blocks that describe nothing are let go, the file is cut, and what is
//!    free in its middle is punched out.
//!
//! # The life of a cluster that moves
//!
//! ```text
//!   new place: refcount raised, bytes copied ─ sync ─► each reference names the new place ─ sync ─►
//!   old place: refcount lowered, hole punched
//! ```
//!
//! Between any two of these, and with any part of what was not synced lost, each reference names a
//! cluster with the same bytes and a refcount that is high enough: a crash leaks, and no more. The
//! two syncs are paid once a batch of [`BATCH_BYTES`], which also bounds the space that is taken
//! twice. No bitmap becomes invalid: the guest's data is the same.

mod data;
mod finish;
mod space;
mod tables;
mod zeroes;

use std::sync::Arc;

use vdkit_block::{
    CompactOptions, CompactReport, Error, Limits, Monitor, Repair, Result, Storage, punch_zeroes,
};

use super::image::Image;
use super::repair;
use crate::header::field;
use crate::layout::incompatible;
use space::Space;

/// What is taken twice at a time. (Little in tests, to have many batches.)
const BATCH_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 16 << 20 };
/// Clusters of one batch at most.
const BATCH_CLUSTERS_MAX: u64 = 65536;

/// As [`vdkit_block::FormatDriver::compact`].
pub(crate) fn compact(
    storage: &Arc<dyn Storage>,
    data_file: Option<&Arc<dyn Storage>>,
    options: CompactOptions,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<CompactReport> {
    let mut report = CompactReport::default();
    let files: Vec<&Arc<dyn Storage>> = std::iter::once(storage).chain(data_file).collect();
    for file in &files {
        report.length_before += file.len()?;
        report.allocated_before += file.allocated_bytes()?;
    }
    report.leaked_clusters = make_sound(storage, data_file.is_some(), limits, monitor)?;
    let load = || Space::load(storage, limits, monitor);
    zeroes::drop_zeroes(&mut load()?, options.zero_scan, &mut report)?;
    if let Some(data) = data_file.filter(|_| options.zero_scan) {
        report.punched_bytes = punch_zeroes(&**data, monitor)?;
    }
    let end = load()?.ideal_end();
    tables::move_tables(storage, limits, monitor, end, &mut report)?;
    let mut space = load()?;
    data::move_data(&mut space, end, &mut report)?;
    finish::cut(&mut load()?, end, &mut report)?;
    for file in &files {
        report.length_after += file.len()?;
        report.allocated_after += file.allocated_bytes()?;
    }
    Ok(report)
}

/// Gives leaked clusters back, and says how many there were.
fn make_sound(
    storage: &Arc<dyn Storage>,
    data_file: bool,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let image = Image::open(storage, limits)?;
    if image.header.has(incompatible::DIRTY) {
        repair::recover(storage, limits, monitor)?;
    }
    let found = repair::run(storage, data_file, Repair::Leaks, limits, monitor)?;
    if found.corruptions_left() + found.leaks_left() > 0 {
        let first = found.findings.iter().find(|finding| !finding.repaired);
        return Err(Error::corrupt(
            image.name(),
            first.map_or(field::INCOMPATIBLE, |finding| finding.offset),
            first.map_or("image", |finding| finding.structure),
            first.map_or("damage".to_owned(), |finding| finding.message.clone()),
            "a sound image; run: vdkit check --repair all",
        ));
    }
    repair::forget_autoclear(&image)?;
    Ok(found.leaks_fixed)
}
