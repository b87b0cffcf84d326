//! Consistency check and repair.
//!
//! A check is one walk over all metadata (`survey`): the refcounts of the image are loaded into
//! a `balance` of two bytes a host cluster, and each reference that the walk meets is taken out
//! of it, so that what is left over is wrong. Each L2 table is read once, in the order of host
//! offsets, whatever the number of snapshots that share it. A `repair` walks, mends one kind of
//! damage, and walks again, until nothing is left.
//!
//! The check knows nothing of the engine: it works on the bytes, so that both can be wrong only
//! independently.
//!
//! Verdicts follow `qemu-img check`, with these differences, each of which is stricter:
//! metadata that shares a cluster with anything else is damage even where the refcount allows for
//! it; so are entries of a data file at another place than the guest's, zero flags in version 2,
//! and the corrupt mark itself.

mod balance;
mod bitmaps;
mod compact;
mod findings;
mod image;
mod mapping;
pub(crate) mod reader;
mod refcounts;
mod repair;
mod snapshots;
mod survey;
#[cfg(test)]
mod tests;
pub(crate) mod zero_flags;

use std::sync::Arc;

use vdkit_block::{CheckReport, Limits, Monitor, Repair, Result, Storage};

use crate::layout::incompatible;
pub(crate) use compact::compact;
use image::Image;
use survey::{Mode, Survey};

/// Checks an image and mends it as far as `repair` says.
///
/// The image must not be open for writing elsewhere; the storage must be writable for a repair.
/// `data_file` holds no metadata and is not looked at, but a repair asks for it: a bit of the
/// header alone shall not make an image one whose data is elsewhere. With [`Repair::Leaks`], refcounts are
/// lowered only where nothing else is wrong: what looks leaked may be what a damaged entry
/// pointed to.
///
/// Where most of the mapping makes no sense under this header, the header is more likely wrong
/// than the mapping, and nothing is mended. Where a reference to an L2 table is lost and a cluster
/// that nothing refers to looks like that table, only [`Repair::AllForced`] mends: it gives the
/// table free, and all the data that it maps.
///
/// A repair that is interrupted, by a crash or an error, leaves an image that is no worse; run it
/// again.
///
/// # Errors
/// [`vdkit_block::Error::Corrupt`] where the header is too damaged to find the metadata or to
/// trust for a repair, [`vdkit_block::Error::Invalid`] where a repair needs the data file,
/// [`vdkit_block::Error::Limit`] where the check would need more memory than `limits` allow, and
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
    Ok(Survey::take(&image, Mode::Compare, monitor)?.findings.report)
}

/// Sets the refcounts and COPIED flags of an image right that was not closed cleanly, and clears
/// its dirty bit. Called by the engine when it opens such an image for writing; the caller must
/// read the header again afterwards, since the refcount table may have moved.
///
/// # Errors
/// [`vdkit_block::Error::Corrupt`] where the mapping itself is damaged (only a repair may decide
/// what is lost), and as [`check`].
pub fn rebuild_refcounts(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    repair::recover(storage, limits, monitor)
}

/// Gives a sound image of version 3 refcounts of 2^`order` bits, in new blocks and a new table. One
/// write of the header switches to them; a crash before it leaves the old ones. The old
/// blocks and table are free space then.
///
/// # Errors
/// [`vdkit_block::Error::Invalid`] where a cluster has more references than so many bits count;
/// [`vdkit_block::Error::Corrupt`] where the image is not sound, and as [`check`].
pub(crate) fn change_refcount_width(
    storage: &Arc<dyn Storage>,
    order: u32,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    repair::change_width(storage, order, limits, monitor)
}
