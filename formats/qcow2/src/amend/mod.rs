//! Changes an image's properties in place.
//!
//! The image must not be open elsewhere. Properties that only the header records change in one step
//! ([`crate::header::rewrite`]). What the tables must agree with is changed before that, each in a
//! step of its own:
//!
//! | step | where |
//! |---|---|
//! | refcounts of an image that was not closed cleanly are rebuilt | [`check`] |
//! | snapshots record the sizes that version 3 requires | [`Qcow2::complete_snapshots`] |
//! | a data file that becomes raw gets zeroes where the disk reads as zero | [`raw_data`] |
//! | version 3, if a later step needs it | [`crate::header::rewrite`] |
//! | new refcount blocks and table of another width | [`check::change_refcount_width`] |
//! | for version 2: zero clusters, also of snapshots, become clusters of zeroes or holes | [`zeroes`] |
//! | all header fields | [`crate::header::rewrite`] |

mod plan;
mod raw_data;
mod zeroes;

use std::sync::Arc;

use vdkit_block::{AmendRequest, Amendment, Format, Monitor, OpenRequest, Result};

use self::plan::Plan;
use crate::check;
use crate::driver::Qcow2Driver;
use crate::header::Header;
use crate::header::rewrite::rewrite;
use crate::image::Qcow2;
use crate::layout::incompatible;
use crate::snapshots::{SnapshotTable, TablePlace};

impl Amendment for Qcow2Driver {
    fn amends_backing(&self) -> bool {
        true
    }

    fn amend(&self, request: &AmendRequest, monitor: &Monitor<'_>) -> Result<Vec<String>> {
        let storage = &request.storage;
        let read = || Header::read(&**storage, &request.limits);
        let before = read()?;
        before.refuse_corrupt(storage.name())?;
        let plan = Plan::new(request, &before)?;
        if plan.is_done(&before) {
            return Ok(Vec::new());
        }
        if before.has(incompatible::DIRTY) {
            check::rebuild_refcounts(storage, &request.limits, monitor)?;
        }
        let mut header = read()?;
        let place = TablePlace::of(&header);
        let snapshots = SnapshotTable::read(&**storage, place, &request.limits)?.snapshots;
        plan.check_tables(request, &header, &snapshots, monitor)?;
        if plan.needs_sizes(&header, &snapshots) {
            // Needs no key: the sizes of snapshots are not guest data.
            let image = Qcow2::open_for_metadata(opening(request, true))?;
            and_close(&image, Qcow2::complete_snapshots)?;
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
}

/// The open request for steps of the engine.
fn opening(request: &AmendRequest, writable: bool) -> OpenRequest {
    OpenRequest {
        storage: request.storage.clone(),
        files: request.files.clone(),
        writable,
        limits: request.limits,
    }
}

fn open(request: &AmendRequest, writable: bool) -> Result<Arc<Qcow2>> {
    Qcow2::open(opening(request, writable))
}

/// Calls `act` with an open image, and closes it, also after a failure, so that the image is clean.
fn and_close<R>(image: &Qcow2, act: impl FnOnce(&Qcow2) -> Result<R>) -> Result<R> {
    let done = act(image);
    let closed = image.close();
    done.and_then(|done| closed.map(|()| done))
}
