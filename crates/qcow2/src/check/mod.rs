//! Consistency check and repair.

use std::sync::Arc;

use vdkit_block::{CheckReport, Error, Limits, Monitor, Repair, Result, Storage};

/// Checks an image and mends it as far as `repair` says.
///
/// The image must not be open for writing elsewhere; the storage must be writable for a repair.
///
/// # Errors
/// [`Error::Corrupt`] where the header is too damaged to find the metadata, [`Error::Limit`]
/// where the check would need more memory than `limits` allow, and errors of the storage.
pub fn check(
    storage: &Arc<dyn Storage>,
    data_file: Option<&Arc<dyn Storage>>,
    repair: Repair,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<CheckReport> {
    let _ = (data_file, repair, limits, monitor);
    Err(Error::unsupported(storage.name(), "qcow2 check is being built", "wait"))
}

/// Sets the refcounts and COPIED flags of an image right that was not closed cleanly, and clears
/// its dirty bit. Called by the engine when it opens such an image for writing; the caller must
/// read the header again afterwards, since the refcount table may have moved.
///
/// # Errors
/// [`Error::Corrupt`] where the mapping itself is damaged (a repair must decide what is lost),
/// and as [`check`].
pub fn rebuild_refcounts(
    storage: &Arc<dyn Storage>,
    limits: &Limits,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let _ = (limits, monitor);
    Err(Error::unsupported(storage.name(), "qcow2 check is being built", "wait"))
}
