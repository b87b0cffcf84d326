//! Consistency check and repair.
//!
//! A check is one walk over all metadata (`survey`). It loads the refcounts of the image into a
//! `balance` of two bytes per host cluster, and subtracts each reference that the walk finds, so
//! that any remaining difference is an error. Each L2 table is read once, in the order of host
//! offsets, however many snapshots share it. A `repair` walks, repairs one kind of damage, and
//! walks again, until nothing is left.
//!
//! The check does not use the engine: it works on the bytes, so that a bug in one does not hide a
//! bug in the other.
//!
//! Results follow `qemu-img check`, except that these are also damage: metadata that shares a
//! cluster with anything else, even if the refcount allows for it; data file entries at another
//! offset than the guest's; zero flags in version 2; and the corrupt bit itself. A bitmap with extra
//! data that it marks as compatible is sound.

mod balance;
mod bitmaps;
mod compact;
mod image;
mod mapping;
pub(crate) mod reader;
mod refcounts;
mod repair;
mod snapshots;
mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod writer;
pub(crate) mod zero_flags;

use std::sync::Arc;

use vdkit_block::{CheckReport, Limits, Monitor, Repair, Result, Storage};

use crate::layout::incompatible;
pub(crate) use compact::compact;
use image::Image;
pub(crate) use repair::change_refcount_width;
pub use repair::rebuild_refcounts;
use survey::{Mode, Survey};

/// Checks an image and repairs it as far as `repair` allows.
///
/// The image must not be open for writing elsewhere; the storage must be writable for a repair.
/// `data_file` holds no metadata and is not read. A repair still requires it, so that one flipped
/// header bit cannot make an image appear to have its data elsewhere. [`Repair::Leaks`] lowers
/// refcounts only if the mapping is undamaged; wrong refcounts and COPIED flags do not prevent it. A
/// leaked cluster may otherwise be the target of a damaged entry.
///
/// If most of the mapping is invalid under this header, the header is more likely wrong than the
/// mapping, and nothing is repaired. If a reference to an L2 table is damaged and an unreferenced
/// cluster looks like that table, only [`Repair::AllForced`] repairs: it frees the table and all
/// the data that it maps.
///
/// A repair that a crash or an error interrupts leaves an image that is no worse, and can be run
/// again.
///
/// # Errors
/// [`vdkit_block::Error::Corrupt`] if the header is too damaged to find the metadata or to trust
/// for a repair, [`vdkit_block::Error::Invalid`] if a repair needs the data file,
/// [`vdkit_block::Error::Limit`] if the check would need more memory than `limits` allow, and
/// errors of the storage.
pub fn check(
    storage: &Arc<dyn Storage>,
    data_file: Option<&Arc<dyn Storage>>,
    repair: Repair,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<CheckReport> {
    if repair != Repair::Nothing {
        return repair::run(storage, data_file.is_some(), repair, limits, monitor);
    }
    let image = Image::open(storage, limits)?;
    if image.header.has(incompatible::DIRTY) {
        monitor.progress.message("the image was not closed cleanly: its refcounts may be wrong");
    }
    Ok(Survey::take(&image, Mode::Compare, monitor)?.report)
}

/// Whether the disk or a snapshot has compressed clusters.
///
/// # Errors
/// As [`check`].
pub(crate) fn any_compressed(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<bool> {
    let image = Image::open(storage, limits)?;
    let survey = Survey::take(&image, Mode::References, &monitor.quiet())?;
    Ok(survey.tables.iter().any(|table| table.compressed))
}
