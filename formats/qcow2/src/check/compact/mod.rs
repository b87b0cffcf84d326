//! Compacts an image in place.
//!
//! Steps, each over the whole image and starting from its state on disk:
//!
//! 1. Leaks are freed, so that each cluster's refcount equals its references. An image with any
//!    other damage is refused.
//! 2. [`shrink`]: tables are shortened to their used entries.
//! 3. [`zeroes`]: clusters of zeroes, and tables that map nothing, are released.
//! 4. [`tables`]: tables beyond the ideal end of the file move to the front.
//! 5. [`data`]: guest data moves to the front too, starting at the end of the file.
//! 6. [`finish`]: refcount blocks that describe nothing are released, the file is truncated, and
//!    its free clusters are punched out. If that shortened the refcount table, the last three steps
//!    are repeated.
//!
//! # The life of a moved cluster
//!
//! ```text
//!   new place: refcount raised, bytes copied ─ sync ─► each reference names the new place ─ sync ─►
//!   old place: refcount lowered, hole punched
//! ```
//!
//! Between any two of these steps, and with any part of the unsynced writes lost, each reference
//! names a cluster with the same bytes and a sufficient refcount: a crash only leaks. The two syncs
//! are issued once per batch of [`BATCH_BYTES`], which also bounds the temporarily doubled space.
//! Bitmaps stay valid: the guest data does not change.

mod data;
mod finish;
mod progress;
mod shrink;
pub(in crate::check) mod space;
mod tables;
mod zeroes;

use std::sync::Arc;

use vdkit_block::{
    CompactOptions, CompactReport, Limits, Monitor, Progress, Result, Storage, punch_zeroes,
};

use super::repair::make_sound;
use progress::Bar;
use space::Space;

/// Most bytes of one batch, stored twice meanwhile. Few in tests, for many batches.
const BATCH_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 16 << 20 };
const BATCH_CLUSTERS_MAX: u64 = 65536;

/// As [`vdkit_block::Compaction::compact`].
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
    // Reading metadata, reading data, moving data: estimated shares of one progress bar.
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

/// The same cancel token with another progress sink.
fn watched<'p>(monitor: &Monitor<'_>, progress: &'p dyn Progress) -> Monitor<'p> {
    Monitor::new(progress).cancelled_by(monitor.cancel.clone())
}
