//! Turns a data file into a raw one.
//!
//! A data file always holds guest data at its guest offset. Where only the image records zeroes,
//! the data file may hold arbitrary bytes. Nothing reads those, so they can be zeroed before the
//! header declares that the file may be read as a raw image.

use vdkit_block::{
    AmendRequest, Error, Extent, Format, GuestOffset, HostOffset, Monitor, Place, Result, Storage,
    ZeroMode,
};

use crate::image::Qcow2;

/// Bytes of one map lookup.
const STEP: u64 = 64 << 20;

/// Makes the data file identical to the disk, with the same length. Durable on return.
///
/// # Errors
/// [`Error::Corrupt`] if an entry is damaged, with nothing changed; I/O.
pub(super) fn make_whole(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<()> {
    let image = super::open(request, false)?;
    let Some(data) = request.files.first() else {
        // The same error as opening it without a data file.
        return Err(Error::invalid_for(&request.storage.name(), "no data file"));
    };
    // All entries must be sound: zeroes could overwrite data that one names at another offset.
    for_extents(&image, &monitor.quiet(), |_, _| Ok(()))?;
    fit(&**data, image.guest_bytes())?;
    for_extents(&image, monitor, |at, extent| match extent.place {
        Place::Data { .. } => Ok(()),
        _ => data.write_zeroes(HostOffset(at), extent.len, ZeroMode::MayUnmap),
    })?;
    data.sync()
}

/// Calls `visit` with each extent of the disk and its guest offset.
fn for_extents(
    image: &Qcow2,
    monitor: &Monitor<'_>,
    mut visit: impl FnMut(u64, Extent) -> Result<()>,
) -> Result<()> {
    let (mut at, end) = (0, image.guest_bytes());
    while at < end {
        monitor.cancel.check()?;
        monitor.progress.update(at, end);
        let extent = image.resolve(GuestOffset(at), STEP.min(end - at))?;
        visit(at, extent)?;
        at += extent.len;
    }
    Ok(())
}

/// Sets the length of the data file to that of the disk. Bytes beyond it were never guest data.
fn fit(data: &dyn Storage, bytes: u64) -> Result<()> {
    let len = data.len()?;
    if len == bytes || (len > bytes && !data.caps().growable) {
        return Ok(());
    }
    if !data.caps().growable {
        let what = format!("{bytes} bytes of disk on a device of {len}");
        return Err(Error::no_space(data.name(), what));
    }
    data.set_len(bytes)
}
