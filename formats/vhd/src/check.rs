//! Checks footers, the dynamic header, and the table against the file.

use std::mem::offset_of;

use vdkit_block::{
    CheckReport, Error, HostOffset, OfflineImage, Repair, Result, Severity, Storage,
};
use vdkit_blockmap::{Envelope, survey};

use crate::envelope::{Parts, VhdEnvelope};
use crate::fixed;
use crate::footer::{DiskType, FOOTER_BYTES, Footer, SECTOR, SECTORS_MAX};
use crate::header::DynamicHeader;
use crate::locate::Footers;
use crate::on_disk::{RawFooter, RawHeader};

/// As [`vdkit_block::FormatDriver::check`].
pub(crate) fn check(image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
    let storage = &**image.storage;
    let footers = Footers::read(storage)?;
    let footer = footers.best(storage.name())?;
    if footer.disk_type == DiskType::Fixed {
        return check_fixed(storage, &footers, footer, repair);
    }
    check_dynamic(image, &footers, footer, repair)
}

fn check_fixed(
    storage: &dyn Storage,
    footers: &Footers,
    footer: &Footer,
    repair: Repair,
) -> Result<CheckReport> {
    let disk = footer.disk_bytes();
    fixed::judge_size(storage.name(), disk, footers.back_at)?;
    let mut report = CheckReport { image_end_offset: storage.len()?, ..CheckReport::default() };
    if footers.behind > 0 {
        let repaired = repair != Repair::Nothing;
        let message = format!(
            "{} bytes behind the footer, left by a power cut while the image grew; other programs \
             do not find the footer",
            footers.behind
        );
        let at = footers.back_at + FOOTER_BYTES as u64;
        report.note(Severity::Leak, at, "file", message, repaired);
        if repaired {
            fixed::cut_behind(storage, footers.back_at)?;
            report.image_end_offset = storage.len()?;
        }
    }
    let Some(wanted) = end_of_fixed(footer) else {
        let message = format!("{} bytes, expected at most 2040 GiB", footer.current_size());
        let at = footers.back_at + offset_of!(RawFooter, current_size) as u64;
        report.note(Severity::Corruption, at, "current size", message, false);
        return Ok(report);
    };
    let free = footers.back_at.saturating_sub(wanted);
    // On a device the footer is at its end.
    if free > 0 && storage.caps().growable {
        let repaired = repair != Repair::Nothing;
        let message = format!("{free} bytes between the disk and its footer");
        report.note(Severity::Leak, wanted, "file", message, repaired);
        if repaired {
            storage.write_at(footer.bytes(), HostOffset(wanted))?;
            storage.sync()?;
            storage.set_len(wanted + FOOTER_BYTES as u64)?;
            storage.sync()?;
            report.image_end_offset = storage.len()?;
        }
    }
    Ok(report)
}

/// Where the footer of a fixed image belongs: never within the disk, which a footer there would
/// overwrite. `None` if the size field holds what no VHD can have; creators that take the size from
/// the geometry do not use that field.
fn end_of_fixed(footer: &Footer) -> Option<u64> {
    let end = footer.current_size().max(footer.disk_bytes()).checked_next_multiple_of(SECTOR)?;
    (end <= SECTORS_MAX * SECTOR).then_some(end)
}

fn check_dynamic(
    image: &OfflineImage<'_>,
    footers: &Footers,
    footer: &Footer,
    repair: Repair,
) -> Result<CheckReport> {
    let OfflineImage { limits, monitor, .. } = image;
    let storage = &**image.storage;
    // A repair of leaks may truncate the file, and it is not certain which footer is this image's.
    let repair =
        if footers.contradict() && repair == Repair::Leaks { Repair::Nothing } else { repair };
    let repairing = matches!(repair, Repair::All | Repair::AllForced);
    let mut header = DynamicHeader::read(storage, footer.data_offset())?;
    let geometry = header.geometry();
    judge_capacity(storage.name(), footer, &header)?;
    let mut report = CheckReport::default();
    let front = judge_front(footers, repairing, &mut report);
    let back = judge_back(footers, repair != Repair::Nothing, &mut report);
    if !header.sound {
        let message = "the checksum of the dynamic header is wrong";
        let at = header.at + offset_of!(RawHeader, checksum) as u64;
        report.note(Severity::Corruption, at, "dynamic header", message, repairing);
        if repairing {
            header = header.summed();
            storage.write_at(header.bytes(), HostOffset(header.at))?;
        }
    }
    if repairing && front {
        storage.write_at(footer.bytes(), HostOffset(0))?;
        storage.sync()?;
    }
    let tail_bytes = FOOTER_BYTES as u64;
    let job = survey::Job { storage, geometry: &geometry, tail_bytes, repair, limits, monitor };
    let surveyed = survey::survey(&job, &mut report)?;
    if surveyed.changed || (back && repair != Repair::Nothing) {
        let parts = Parts { footer: footer.clone(), header };
        VhdEnvelope::new(image.storage.clone(), parts).finish(&geometry, surveyed.end)?;
        storage.sync()?;
    }
    Ok(report)
}

/// The table must have an entry for each block of the disk.
pub(crate) fn judge_capacity(file: &str, footer: &Footer, header: &DynamicHeader) -> Result<()> {
    let capacity = header.entries().saturating_mul(header.block_bytes());
    if footer.disk_bytes() <= capacity {
        return Ok(());
    }
    let found = format!("{} bytes in {} blocks", footer.disk_bytes(), header.entries());
    let at = header.at + offset_of!(RawHeader, max_table_entries) as u64;
    Err(Error::corrupt(file, at, "table entries", found, "a block for each byte"))
}

/// Whether the footer copy at the start must be rewritten.
fn judge_front(footers: &Footers, repairing: bool, report: &mut CheckReport) -> bool {
    let Err(no) = &footers.front else { return false };
    let message = format!("the footer's copy at the start: {}, expected {}", no.found, no.expected);
    report.note(Severity::Corruption, no.at as u64, "footer", message, repairing);
    true
}

/// Whether the footer at the end must be rewritten.
fn judge_back(footers: &Footers, repairing: bool, report: &mut CheckReport) -> bool {
    // A crash while the file grows leaves a leak, and the next writer repairs it.
    let (severity, message) = match (&footers.front, &footers.back) {
        (_, Err(no)) => {
            let what = format!("at the end of the file: {}, expected {}", no.found, no.expected);
            (Severity::Leak, what)
        }
        (Ok(front), Ok(back)) if footers.contradict() => {
            let of = |one: &Footer| format!("{} image {}", one.disk_type.name(), one.uuid());
            let what =
                format!("of the {}, but its copy at the start of the {}", of(back), of(front));
            (Severity::Corruption, what)
        }
        (Ok(front), Ok(back)) if front != back => {
            (Severity::Leak, "differs from its copy at the start".to_owned())
        }
        _ => return false,
    };
    report.note(severity, footers.back_at, "footer", message, repairing);
    true
}
