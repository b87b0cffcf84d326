//! Checks the table against the file, and the header's block count against the table.

use std::mem::offset_of;

use vdkit_block::{CheckReport, OfflineImage, Repair, Result, Severity};
use vdkit_blockmap::{Envelope, survey};

use crate::envelope::{VdiEnvelope, blocks_to};
use crate::header::Header;
use crate::on_disk::RawHeader;

/// As [`vdkit_block::FormatDriver::check`].
pub(crate) fn check(image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
    let OfflineImage { limits, monitor, .. } = image;
    let storage = &**image.storage;
    let header = Header::read(storage)?;
    // A version 0 image has its fields elsewhere, and is read-only.
    let repair = if header.version.0 == 0 { Repair::Nothing } else { repair };
    let geometry = header.geometry();
    let mut report = CheckReport::default();
    let job = survey::Job { storage, geometry: &geometry, tail_bytes: 0, repair, limits, monitor };
    let surveyed = survey::survey(&job, &mut report)?;
    let counted = u64::from(header.allocated);
    let wanted = blocks_to(&geometry, surveyed.end);
    let repairing = match repair {
        Repair::Nothing => false,
        Repair::Leaks => counted > wanted && report.corruptions_left() == 0,
        Repair::All | Repair::AllForced => true,
    };
    if counted != wanted && !surveyed.changed {
        // If the count is too small, the next block that VirtualBox or QEMU allocates overwrites
        // another one.
        let severity = if counted < wanted { Severity::Corruption } else { Severity::Leak };
        let message = format!("blocks allocated is {counted}, and the table names {wanted}");
        let at = offset_of!(RawHeader, blocks_allocated) as u64;
        report.note(severity, at, "header", message, repairing);
    }
    if surveyed.changed || (counted != wanted && repairing) {
        VdiEnvelope::new(image.storage.clone(), &header).finish(&geometry, surveyed.end)?;
        storage.sync()?;
    }
    Ok(report)
}
