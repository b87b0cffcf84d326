//! Changing an image's properties where it lies.
//!
//! Nobody has the image open. What the header alone says changes in one step
//! ([`crate::header::rewrite`]); what tables must agree with is brought about before.

mod plan;

use vdkit_block::{AmendRequest, Error, Monitor, Result};

use self::plan::Plan;
use crate::check;
use crate::header::rewrite::rewrite;
use crate::header::{Header, field};
use crate::layout::incompatible;

/// As [`vdkit_block::FormatDriver::amend`].
pub(crate) fn amend(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
    let storage = &request.storage;
    let mut header = Header::read(&**storage, &request.limits)?;
    if header.has(incompatible::CORRUPT) {
        return Err(Error::corrupt(
            storage.name(),
            field::INCOMPATIBLE,
            "incompatible features",
            "the corrupt bit",
            "an image without known damage; run: vdkit check --repair all",
        ));
    }
    let plan = Plan::new(request, &header)?;
    if plan.is_done(&header) {
        return Ok(Vec::new());
    }
    if header.has(incompatible::DIRTY) {
        check::rebuild_refcounts(storage, &request.limits, monitor)?;
        header = Header::read(&**storage, &request.limits)?;
    }
    let before = header.clone();
    let wanted = plan.header(&header);
    rewrite(&**storage, &header, &wanted)?;
    Ok(plan::changes(&before, &wanted))
}
