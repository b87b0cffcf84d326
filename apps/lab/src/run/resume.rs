//! Decides whether an interrupted run may go on, and what its reader must know about that.

use std::collections::BTreeMap;

use super::{Request, busy};
use crate::compare::differences;
use crate::environment::block;
use crate::error::{Result, bail};
use crate::model::{Environment, PlaceInfo, PlaceKind, Run, Warning};
use crate::place::{Place, zfs};

/// What identifies the devices of places, by the places' paths.
pub(super) fn identities(places: &[Place]) -> BTreeMap<String, String> {
    let of = |place: &Place| Some((place.info.path.clone(), block::identity(&place.info)?));
    places.iter().filter_map(of).collect()
}

/// Refuses a place that has only the name of one in the run: names of devices move from disk to disk
/// when a machine starts, and a folder is one of another disk while its file system is not mounted.
pub(super) fn require_same_place(
    before: &Environment,
    request: &Request,
    place: &PlaceInfo,
    identity: Option<String>,
) -> Result<()> {
    let same_name = |old: &&PlaceInfo| old.path == place.path && old.kind == place.kind;
    let Some(old) = before.places.iter().find(same_name) else { return Ok(()) };
    let same_device = match request.identities.get(&place.path) {
        Some(known) => identity.as_ref() == Some(known),
        None => (&place.device, &place.beneath) == (&old.device, &old.beneath),
    };
    // The size of a data set of ZFS changes with what other data sets use.
    let same_size = place.total_bytes == old.total_bytes || zfs::is_data_set(place);
    if same_device && same_size {
        return Ok(());
    }
    let told = |info: &PlaceInfo, identity: Option<&String>| {
        let identity = identity.map(|id| format!("; {id}")).unwrap_or_default();
        format!("{} bytes ({}{identity})", info.total_bytes, info.beneath.join(", "))
    };
    let what = match place.kind {
        PlaceKind::Device => "is another device than that of the run",
        PlaceKind::Directory => "is on another device than in the run",
    };
    bail!(
        "{}: {what}: {} now, {} then; use that one, or name this one in a new run",
        place.path,
        told(place, identity.as_ref()),
        told(old, request.identities.get(&place.path))
    )
}

/// What makes the later rounds hard to compare with the earlier ones: a busy machine, and another
/// kernel, another version of a program and the like.
pub(super) fn warnings(before: &Run, environment: &Environment, version: &str) -> Vec<Warning> {
    let now = Run {
        plan: before.plan.clone(),
        quick: before.quick,
        environment: environment.clone(),
        vdkit_version: version.to_owned(),
        ..Run::default()
    };
    let changed = |text: String| {
        let text = format!("changed when the run was resumed: {text}");
        Warning { kind: "resume".to_owned(), text, cells: vec![] }
    };
    let mut all = busy(environment);
    all.extend(differences(before, &now).into_iter().map(changed));
    // A run may be resumed several times.
    all.retain(|warning| !before.warnings.contains(warning));
    all
}
