//! Making an image smaller in place.
//!
//! Steps, each over the whole image, each beginning with a look at it as it stands on disk:
//!
//! 1. What is leaked goes back, so that a cluster without a refcount is free and one with has that
//!    many references. An image with any other damage is refused.
//! 2. [`shrink`]: tables that are longer than what is in them are cut.
//! 3. [`zeroes`]: clusters that hold zeroes, and tables that map nothing, are let go.
//! 4. [`tables`]: tables behind the end that the file could have move to the front.
//! 5. [`data`]: so does guest data, from the end of the file on.
//! 6. [`finish`]: refcount blocks that describe nothing are let go, the file is cut, and what is
//!    free in its middle is punched out. Where that made the refcount table shorter, the last three
//!    steps are done again.
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
mod progress;
mod shrink;
pub(in crate::check) mod space;
mod tables;
mod zeroes;

use std::sync::Arc;

use vdkit_block::{
    CompactOptions, CompactReport, Error, Limits, Monitor, Progress, Repair, Result, Storage,
    punch_zeroes,
};

use super::image::Image;
use super::repair;
use crate::header::field;
use crate::layout::incompatible;
use progress::Bar;
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
    let bar = Bar::new(monitor, report.length_before);
    // Reading metadata, reading data, moving data: a rough guess, but one bar.
    let (looking, scanning, moving) = (bar.step(0..10), bar.step(10..60), bar.step(60..100));
    let (looking, scanning) = (watched(monitor, &looking), watched(monitor, &scanning));
    let moving = watched(monitor, &moving);
    report.leaked_clusters = make_sound(storage, data_file.is_some(), limits, &looking)?;
    shrink::shrink_tables(&mut Space::load(storage, limits, &looking)?, &mut report)?;
    let mut space = Space::load(storage, limits, &scanning)?;
    zeroes::drop_zeroes(&mut space, options.zero_scan, &mut report)?;
    if let Some(data) = data_file.filter(|_| options.zero_scan) {
        report.punched_bytes = punch_zeroes(&**data, &scanning)?;
    }
    loop {
        let load = || Space::load(storage, limits, &moving);
        let end = load()?.ideal_end();
        let freed = report.table_clusters;
        report.left_alone.clear();
        tables::move_tables(storage, limits, &moving, end, &mut report)?;
        data::move_data(&mut load()?, end, &mut report)?;
        finish::cut(&mut load()?, end, &mut report)?;
        if report.table_clusters == freed {
            break;
        }
    }
    moving.progress.update(1, 1);
    for file in &files {
        report.length_after += file.len()?;
        report.allocated_after += file.allocated_bytes()?;
    }
    Ok(report)
}

/// The same cancel token, told of elsewhere.
fn watched<'p>(monitor: &Monitor<'_>, progress: &'p dyn Progress) -> Monitor<'p> {
    Monitor { cancel: monitor.cancel.clone(), progress }
}

/// Gives leaked clusters back, and says how many there were.
pub(in crate::check) fn make_sound(
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
