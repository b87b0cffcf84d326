//! Checks an image against the specification, and repairs it.
//!
//! Repairs: a damaged grain directory, table or entry from its copy, and the copy from it; an entry
//! that names no grain becomes a hole; if two entries name one grain, the second gets a copy of its
//! bytes; unreferenced space becomes a hole or is cut off; a short flat file gets its length; the
//! unclean mark is cleared once tables and copies agree.

mod grains;
mod sparse;

use std::sync::Arc;

use vdkit_block::{
    CheckReport, HostOffset, Limits, Monitor, OfflineImage, Repair, Result, Severity, Storage,
};

use crate::descriptor::{ExtentType, NO_PARENT};
use crate::header::{DIRECTORY_AT_END, SECTOR, SparseHeader};
use crate::source::{Source, any_header};

/// State of the check of one image.
pub(crate) struct Checking<'a, 'b> {
    pub(crate) repair: Repair,
    pub(crate) limits: &'a Limits,
    pub(crate) monitor: &'a Monitor<'b>,
    pub(crate) report: CheckReport,
    /// Tables checked so far, and in total.
    pub(crate) done: u64,
    pub(crate) total: u64,
}

impl Checking<'_, '_> {
    pub(crate) fn repairs(&self) -> bool {
        matches!(self.repair, Repair::All | Repair::AllForced)
    }

    pub(crate) fn damage(
        &mut self,
        at: u64,
        what: &'static str,
        message: impl Into<String>,
        repaired: bool,
    ) {
        self.report.note(Severity::Corruption, at, what, message, repaired);
    }
}

/// Checks an image and repairs it as far as `repair` allows.
///
/// # Errors
/// A header or a descriptor that cannot be parsed; [`vdkit_block::Error::Limit`]; I/O.
pub(crate) fn check(image: &OfflineImage<'_>, repair: Repair) -> Result<CheckReport> {
    let (storage, files) = (image.storage, image.files);
    let (limits, monitor) = (&image.limits, &image.monitor);
    let source = Source::read(storage, limits)?;
    // The sums below do not overflow then.
    source.guest_bytes(storage.name())?;
    let report = CheckReport::default();
    let mut checking = Checking { repair, limits, monitor, report, done: 0, total: 0 };
    check_descriptor(&mut checking, &source);
    if let Some(header) = &source.header {
        if let Some(header) = &header.hosted {
            check_footer(&mut checking, storage, header)?;
        }
        sparse::check(&mut checking, storage, header, header.sectors)?;
        return Ok(checking.report);
    }
    let names = source.files_opened(storage.name(), files.len())?;
    let Some(placed) = &source.placed else { return Ok(checking.report) };
    // Of each file, whether a former line has it as a sparse extent.
    let mut taken = vec![None; files.len()];
    for line in &placed.descriptor.extents {
        let index = names.iter().position(|name| *name == line.name);
        let (Some(index), true) = (index, line.sectors > 0) else { continue };
        let (file, sparse) = (&files[index], line.kind != ExtentType::Flat);
        if taken[index].replace(sparse).is_some_and(|former| former || sparse) {
            let expected = "a sparse extent's file in one line alone";
            let message = format!("'{}' once more, expected {expected}", line.name);
            checking.damage(placed.at, "extent line", message, false);
            continue;
        }
        if !sparse {
            check_flat(&mut checking, file, line.offset, line.sectors)?;
            continue;
        }
        let mut head = [0; SECTOR as usize];
        let got = file.read_up_to(&mut head, HostOffset(0))?;
        match any_header(&**file, &head, got, limits)? {
            Some(header) if header.sectors >= line.sectors => {
                sparse::check(&mut checking, file, &header, line.sectors)?;
            }
            Some(header) => {
                let message = format!(
                    "{}: has {} sectors, expected {} as the descriptor says",
                    file.name(),
                    header.sectors,
                    line.sectors
                );
                checking.damage(12, "capacity", message, false);
            }
            None => {
                let message = format!("{}: no sparse extent header", file.name());
                checking.damage(0, "magic number", message, false);
            }
        }
    }
    Ok(checking.report)
}

/// Checks the descriptor's parent fields and content id.
fn check_descriptor(checking: &mut Checking<'_, '_>, source: &Source) {
    let Some(placed) = &source.placed else { return };
    let (descriptor, at) = (&placed.descriptor, placed.at);
    match (descriptor.parent(), descriptor.parent_cid) {
        (None, NO_PARENT) => {}
        (Some(_), NO_PARENT) => {
            let message = "parentFileNameHint with parentCID ffffffff, expected the parent's CID";
            checking.damage(at, "descriptor", message.to_owned(), false);
        }
        (None, cid) => {
            let message = format!("parentCID {cid:08x} without parentFileNameHint");
            checking.damage(at, "descriptor", message, false);
        }
        (Some(_), _) => {}
    }
    if let (Some(header), [line]) = (&source.header, &descriptor.extents[..])
        && line.sectors != header.sectors
    {
        let message = format!(
            "an extent of {} sectors, expected {} as the header says",
            line.sectors, header.sectors
        );
        checking.damage(at, "extent line", message, false);
    }
}

/// A stream's first header must agree with its footer.
fn check_footer(
    checking: &mut Checking<'_, '_>,
    storage: &Arc<dyn Storage>,
    footer: &SparseHeader,
) -> Result<()> {
    let mut head = [0; SECTOR as usize];
    storage.read_padded(&mut head, HostOffset(0))?;
    let first = SparseHeader::parse(&head, 0, storage.name(), checking.limits)?;
    let moved = SparseHeader { directory: footer.directory, ..first.clone() };
    if first.directory == DIRECTORY_AT_END && moved != *footer {
        let at = storage.len()?.saturating_sub(2 * SECTOR);
        let message = "another header than the first, expected the same but for the directory";
        checking.damage(at, "footer", message.to_owned(), false);
    }
    Ok(())
}

/// A flat extent's file must be long enough.
fn check_flat(
    checking: &mut Checking<'_, '_>,
    file: &Arc<dyn Storage>,
    offset: u64,
    sectors: u64,
) -> Result<()> {
    checking.report.total_clusters += sectors;
    checking.report.allocated_clusters += sectors;
    let (len, wanted) = (file.len()?, (offset.saturating_add(sectors)).saturating_mul(SECTOR));
    checking.report.image_end_offset = checking.report.image_end_offset.max(wanted);
    if len < wanted {
        let repaired = checking.repairs() && file.caps().growable && wanted <= i64::MAX as u64;
        if repaired {
            file.set_len(wanted)?;
            file.sync()?;
        }
        let message = format!("{}: {len} bytes, expected {wanted} at least", file.name());
        checking.damage(len, "flat extent", message, repaired);
    }
    Ok(())
}
