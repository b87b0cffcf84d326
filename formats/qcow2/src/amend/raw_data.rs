//! A data file that becomes the disk by itself.
//!
//! Guest data is at its own offset in a data file always. What the image alone knows to be zero may
//! be anything there; nobody reads it, so it can be made zero before the header says that the file
//! may be read as a raw image.

use vdkit_block::{
    AmendRequest, Error, Format, GuestOffset, HostOffset, Monitor, Place, Result, Storage, ZeroMode,
};

/// Bytes of one look at the map.
const STEP: u64 = 64 << 20;

/// Makes the data file hold the disk, byte for byte and not one more. Durable when it returns.
pub(super) fn make_whole(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<()> {
    let image = super::open(request, false)?;
    let Some(data) = request.files.first() else {
        // As opening it without one says.
        return Err(Error::Invalid(format!("{}: no data file", request.storage.name())));
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

/// Makes it as long as the disk. What lies behind that was never the guest's.
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
