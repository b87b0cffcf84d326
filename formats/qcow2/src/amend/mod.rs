//! Changing an image's properties where it lies.
//!
//! Nobody has the image open. What the header alone says changes in one step
//! ([`crate::header::rewrite`]); what tables must agree with is brought about before, each thing in
//! a step of its own:
//!
//! | step | where |
//! |---|---|
//! | refcounts of an image that was not closed cleanly are rebuilt | [`check`] |
//! | snapshots say the sizes that version 3 asks for | [`Qcow2::complete_snapshots`] |
//! | a data file that shall be the disk by itself gets zeroes where the disk has none of it | [`raw_data`] |
//! | version 3, where a later step needs it | [`crate::header::rewrite`] |
//! | new refcount blocks and table, of another width | [`check::change_refcount_width`] |
//! | zero clusters, those of snapshots too, become clusters of zeroes or none, for version 2 | [`zeroes`] |
//! | everything that the header says | [`crate::header::rewrite`] |

mod plan;
mod raw_data;
mod tables;
mod zeroes;

use std::sync::Arc;

use vdkit_block::{AmendRequest, Error, Format, Monitor, OpenRequest, Result};

use self::plan::Plan;
use self::tables::Tables;
use crate::check;
use crate::header::rewrite::rewrite;
use crate::header::{Header, field};
use crate::image::Qcow2;
use crate::layout::incompatible;

/// As [`vdkit_block::FormatDriver::amend`].
pub(crate) fn amend(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
    let storage = &request.storage;
    let read = || Header::read(&**storage, &request.limits);
    let before = read()?;
    if before.has(incompatible::CORRUPT) {
        return Err(Error::corrupt(
            storage.name(),
            field::INCOMPATIBLE,
            "incompatible features",
            "the corrupt bit",
            "an image without known damage; run: vdkit check --repair all",
        ));
    }
    let plan = Plan::new(request, &before)?;
    if plan.is_done(&before) {
        return Ok(Vec::new());
    }
    if before.has(incompatible::DIRTY) {
        check::rebuild_refcounts(storage, &request.limits, monitor)?;
    }
    let mut header = read()?;
    let tables = Tables::read(&**storage, &header, &request.limits)?;
    plan.check_tables(&header, &tables, monitor)?;
    if plan.needs_sizes(&header, &tables) {
        complete_snapshots(request)?;
        header = read()?;
    }
    if plan.makes_raw(&header) {
        raw_data::make_whole(request, monitor)?;
    }
    if header.geometry.refcount_order != plan.refcount_order {
        if header.version < 3 {
            let upgraded = Header { version: 3, ..header.clone() };
            rewrite(&**storage, &header, &upgraded)?;
        }
        check::change_refcount_width(storage, plan.refcount_order, &request.limits, monitor)?;
        header = read()?;
    }
    if plan.version < 3 && header.version >= 3 {
        zeroes::remove(request, monitor)?;
        header = read()?;
    }
    rewrite(&**storage, &header, &plan.header(&header))?;
    Ok(plan::changes(&before, &read()?))
}

/// How the image is opened for what the engine does.
fn opening(request: &AmendRequest, writable: bool) -> OpenRequest {
    OpenRequest {
        storage: request.storage.clone(),
        files: request.files.clone(),
        writable,
        limits: request.limits,
    }
}

/// The image, for what the engine does.
fn open(request: &AmendRequest, writable: bool) -> Result<Arc<Qcow2>> {
    Qcow2::open(opening(request, writable))
}

/// What snapshots say of their sizes is no guest data: no key is asked for.
fn complete_snapshots(request: &AmendRequest) -> Result<()> {
    let image = Qcow2::open_for_metadata(opening(request, true))?;
    let done = image.complete_snapshots();
    // Closed also after a failure, so that the image is clean.
    let closed = image.close();
    done.and(closed)
}
