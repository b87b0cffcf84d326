//! Turns a data file into a raw one.
//!
//! A data file always holds guest data at its guest offset. Where only the image records zeroes,
//! the data file may hold arbitrary bytes. Nothing reads those, so they can be zeroed before the
//! header declares that the file may be read as a raw image.

use vdkit_block::{
    AmendRequest, Error, Format, GuestOffset, HostOffset, Monitor, Place, Result, Storage, ZeroMode,
};

/// Bytes of one map lookup.
const STEP: u64 = 64 << 20;

/// Makes the data file identical to the disk, with the same length. Durable on return.
pub(super) fn make_whole(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<()> {
    let image = super::open(request, false)?;
    let Some(data) = request.files.first() else {
        // The same error as opening it without a data file.
        return Err(Error::invalid_for(&request.storage.name(), "no data file"));
    };
    let end = image.guest_bytes();
    fit(&**data, end)?;
    let mut at = 0;
    while at < end {
        monitor.cancel.check()?;
        monitor.progress.update(at, end);
        let extent = image.resolve(GuestOffset(at), STEP.min(end - at))?;
        if !matches!(extent.place, Place::Data { .. }) {
            data.write_zeroes(HostOffset(at), extent.len, ZeroMode::MayUnmap)?;
        }
        at += extent.len;
    }
    data.sync()
}

/// Sets the length of the data file to that of the disk. Bytes beyond it were never guest data.
fn fit(data: &dyn Storage, bytes: u64) -> Result<()> {
    let len = data.len()?;
    if len == bytes || (len > bytes && !data.caps().growable) {
        return Ok(());
    }
    if !data.caps().growable {
        return Err(Error::NoSpace {
            file: data.name().to_owned(),
            what: format!("{bytes} bytes of disk on a device of {len}"),
        });
    }
    data.set_len(bytes)
}
