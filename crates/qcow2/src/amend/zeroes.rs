//! Zero clusters out of an image that shall have version 2, which has no flag for them.
//!
//! Without a backing image a cluster that is not there reads as zero too. Over one, it gets space
//! with zeroes in it. Both go through the engine, so that each moment shows the same disk.

use vdkit_block::{
    AmendRequest, Format, GuestOffset, Monitor, OpenRequest, Place, Result, ZeroMode,
};

use crate::image::Qcow2;

/// Bytes of one look at the map.
const STEP: u64 = 64 << 20;

/// Removes all zero flags from the active disk.
pub(super) fn remove(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<()> {
    let image = Qcow2::open(OpenRequest {
        storage: request.storage.clone(),
        data_file: request.data_file.clone(),
        writable: true,
        limits: request.limits,
    })?;
    let done = remove_all(&image, monitor);
    // Closed also after a failure, so that the image is clean.
    let closed = image.close();
    done.and(closed)
}

fn remove_all(image: &Qcow2, monitor: &Monitor<'_>) -> Result<()> {
    let end = image.guest_bytes();
    let mut at = 0;
    while at < end {
        monitor.cancel.check()?;
        monitor.progress.update(at, end);
        let extent = image.resolve(GuestOffset(at), STEP.min(end - at))?;
        let next = at + extent.len;
        if let Place::Zero { .. } = extent.place {
            if image.backing().is_none() {
                image.forget_zeroes(at..next)?;
            } else {
                fill(image, at, next)?;
            }
        }
        at = next;
    }
    image.flush()
}

/// Gives clusters of zeroes their space.
fn fill(image: &Qcow2, mut at: u64, end: u64) -> Result<()> {
    while at < end {
        let Some(space) = image.reserve(GuestOffset(at), end - at)? else { break };
        let (host, len) = (space.host, space.guest.end - space.guest.start);
        image.file(space.file).write_zeroes(host, len, ZeroMode::KeepAllocated)?;
        at = space.write.end;
        space.publish()?;
    }
    Ok(())
}
