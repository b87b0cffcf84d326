//! Trials before a run: a few requests of its own cells. How long a request takes behind a server, and how
//! much later than its time a load ends that waits for syncs, follows from nothing that is simpler: servers
//! differ by ten times on the same place.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::error::Result;
use vdkit_block::CancelToken;

use super::Tools;
use super::cost::cost;
use super::speed::Speed;
use crate::axes::BACKEND;
use crate::cells::Rng;
use crate::engine::{self, Bench};
use crate::fit::fit;
use crate::front::{self, GuestSpeed};
use crate::model::{Axes, Cell, Outcome, Sample};
use crate::place::{self, Place};
use crate::plan::Effort;
use crate::profile::{self, Kind, Load, Sync};

/// Requests of a trial.
const REQUESTS: u64 = 512;
/// How long a load of a time is tried.
const SECONDS: f64 = 0.3;
/// The disk of a trial at most: all of it may be written.
const DISK_BYTES: u64 = 64 << 20;

/// What was tried on a place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tried {
    /// Seconds of a request, its part of the sync at the end too, by front and bytes of a request.
    pub requests: BTreeMap<(String, u64), f64>,
    /// Seconds by which a load that waits for syncs takes longer than is counted, by front.
    pub late: BTreeMap<String, f64>,
}

/// The front of a cell, and its load where that is one.
pub fn front_and_load(axes: &Axes) -> Option<(&str, Load)> {
    let value = |name: &str| axes.iter().find(|(axis, _)| axis == name).map(|(_, v)| v.as_str());
    match value("profile").and_then(profile::find)?.kind {
        Kind::Load(load) => Some((value("front").unwrap_or("nbd"), load)),
        _ => None,
    }
}

/// Tries what the cells of a place are made of, once each. What fails here will say so in its cell.
///
/// # Errors
/// The user has had enough.
pub fn tried(
    cells: &[Cell],
    place: &Place,
    effort: &Effort,
    speed: &Speed,
    (tools, cancel): (&Tools<'_>, &CancelToken),
) -> Result<Tried> {
    let mut tried = Tried::default();
    let here = cells.iter().filter(|cell| {
        cell.axis(BACKEND) == Some(&place.info.name) && cell.outcome == Outcome::Pending
    });
    for cell in here {
        let Some((front, load)) = front_and_load(&cell.axes) else { continue };
        let key = (front.to_owned(), load.block);
        let known = match load.to_the_end {
            true => tried.requests.contains_key(&key),
            false => load.sync == Sync::Never || tried.late.contains_key(front),
        };
        // A guest boots for longer than its load takes.
        if known || load.rewrites || front.starts_with("guest-") {
            continue;
        }
        let disk = effort.disk.min(DISK_BYTES);
        let bytes = REQUESTS * load.block / u64::from(load.jobs);
        let small = Effort { seconds: SECONDS.min(effort.seconds), disk, bytes, ..*effort };
        let Ok(fit) = fit(&cell.axes, &small, &place.info) else { continue };
        let began = Instant::now();
        let found = once(&cell.axes, place, small, tools, cancel);
        cancel.check()?;
        let Ok(sample) = found else { continue };
        if load.to_the_end {
            let rate = sample.values.get("iops").copied().unwrap_or(0.0);
            if rate > 0.0 {
                tried.requests.insert(key, 1.0 / rate);
            }
        } else {
            let counted = speed.seconds(&cost(&cell.axes, &small, &fit));
            let late = began.elapsed().as_secs_f64() - counted;
            tried.late.insert(front.to_owned(), late.max(0.0));
        }
    }
    Ok(tried)
}

/// One round of a cell.
fn once(
    axes: &Axes,
    place: &Place,
    effort: Effort,
    tools: &Tools<'_>,
    cancel: &CancelToken,
) -> Result<Sample> {
    with_bench(axes, place, effort, (tools, cancel), engine::sample)
}

/// Does something with a folder on a place, which is removed again.
fn with_bench<T>(
    axes: &Axes,
    place: &Place,
    effort: Effort,
    (tools, cancel): (&Tools<'_>, &CancelToken),
    work: impl FnOnce(&mut Bench<'_>) -> Result<T>,
) -> Result<T> {
    let folder = place::new_folder(place, &mut Rng::new(super::random_seed()))?;
    let mut references = BTreeMap::new();
    let mut bench = Bench {
        command: tools.command.clone(),
        registry: tools.registry,
        cancel: cancel.clone(),
        effort,
        seed: 1,
        place,
        folder: folder.clone(),
        axes,
        commands: Vec::new(),
        notes: Vec::new(),
        references: &mut references,
    };
    let found = work(&mut bench);
    place::remove_folder(&folder)?;
    found
}

/// How fast guests are here, where a cell has one: one is booted.
///
/// # Errors
/// The user has had enough.
pub fn guest(
    cells: &[Cell],
    places: &[Place],
    effort: &Effort,
    tools: &Tools<'_>,
    cancel: &CancelToken,
) -> Result<Option<GuestSpeed>> {
    let booted = |cell: &&Cell| {
        let front = cell.axis("front").unwrap_or_default();
        front.starts_with("guest-") && cell.outcome == Outcome::Pending
    };
    let Some(cell) = cells.iter().find(booted) else { return Ok(None) };
    let backend = cell.axis(BACKEND);
    let Some(place) = places.iter().find(|place| backend == Some(&place.info.name)) else {
        return Ok(None);
    };
    let found = with_bench(&cell.axes, place, *effort, (tools, cancel), front::guest_speed);
    cancel.check()?;
    Ok(found.ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_have_a_front_and_other_things_have_none() {
        let axes = |values: &[(&str, &str)]| -> Axes {
            values.iter().map(|(axis, value)| ((*axis).to_owned(), (*value).to_owned())).collect()
        };
        let load = axes(&[("front", "fuse"), ("profile", "batch16")]);
        assert_eq!(
            front_and_load(&load).map(|(front, load)| (front, load.jobs)),
            Some(("fuse", 16))
        );
        assert_eq!(front_and_load(&axes(&[("front", "fuse"), ("profile", "install")])), None);
        assert_eq!(front_and_load(&axes(&[("front", "fuse")])), None);
    }
}
