//! Tries a few requests of a run's own cells before the run. Servers differ by a factor of ten on
//! the same place, so simpler measurements predict neither the duration of a request through a
//! server, nor how much later a load with syncs ends.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::error::Result;
use vdkit_block::CancelToken;

use super::Tools;
use super::speed::Speed;
use crate::axes::BACKEND;
use crate::cells::Rng;
use crate::engine::{self, Bench};
use crate::fit::fit;
use crate::front::{self, GuestSpeed};
use crate::model::{Axes, Cell, Outcome, value_of};
use crate::place::{self, Place};
use crate::plan::Effort;
use crate::profile::{self, Kind, Load, Sync};

/// Requests per trial.
const REQUESTS: u64 = 512;
/// Duration of the trial of a load with a time limit.
const SECONDS: f64 = 0.3;
/// Largest disk of a trial, which may be written completely.
const DISK_BYTES: u64 = 64 << 20;

/// Results of the trials on a place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tried {
    /// Seconds per request, including its share of the final sync, by front and request size.
    pub requests: BTreeMap<(String, u64), f64>,
    /// Additional seconds of a load with syncs, by front.
    pub late: BTreeMap<String, f64>,
}

/// The front of a cell, and its load if it is a load of requests.
pub fn front_and_load(axes: &Axes) -> Option<(&str, Load)> {
    match value_of(axes, "profile").and_then(profile::find)?.kind {
        Kind::Load(load) => Some((value_of(axes, "front").unwrap_or("nbd"), load)),
        _ => None,
    }
}

/// Runs each kind of trial that a place's cells need once. A failing trial is ignored, because the
/// cell will fail too.
///
/// # Errors
/// The user interrupts.
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
        // A guest takes longer to boot than to run its load.
        if known || load.rewrites || front.starts_with("guest-") {
            continue;
        }
        let disk = effort.disk.min(DISK_BYTES);
        let bytes = REQUESTS * load.block / u64::from(load.jobs);
        let small = Effort { seconds: SECONDS.min(effort.seconds), disk, bytes, ..*effort };
        let Ok(fit) = fit(&cell.axes, &small, &place.info) else { continue };
        let began = Instant::now();
        let found = with_bench(&cell.axes, place, small, (tools, cancel), engine::sample);
        cancel.check()?;
        let Ok(sample) = found else { continue };
        if load.to_the_end {
            let rate = sample.values.get("iops").copied().unwrap_or(0.0);
            if rate > 0.0 {
                tried.requests.insert(key, 1.0 / rate);
            }
        } else {
            let round = speed.of_round(&cell.axes, &small, &fit);
            let late = began.elapsed().as_secs_f64() - round;
            tried.late.insert(front.to_owned(), late.max(0.0));
        }
    }
    Ok(tried)
}

/// Runs a closure with a temporary folder on a place.
fn with_bench<T>(
    axes: &Axes,
    place: &Place,
    effort: Effort,
    (tools, cancel): (&Tools<'_>, &CancelToken),
    work: impl FnOnce(&mut Bench<'_>) -> Result<T>,
) -> Result<T> {
    place::remove_dead_trials(place);
    let (folder, _lock) = place::trial_folder(place, &mut Rng::new(super::random_seed()))?;
    let mut references = BTreeMap::new();
    let mut bench = Bench {
        command: tools.command.clone(),
        registry: tools.registry,
        cancel: cancel.clone(),
        effort,
        seed: 1,
        place: place.clone(),
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

/// Measures guests on this host by booting one, if a cell has a guest.
///
/// # Errors
/// The user interrupts.
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
    use crate::model::axes_of as axes;

    #[test]
    fn loads_have_a_front_and_other_things_have_none() {
        let load = axes(&[("front", "fuse"), ("profile", "batch16")]);
        assert_eq!(
            front_and_load(&load).map(|(front, load)| (front, load.jobs)),
            Some(("fuse", 16))
        );
        assert_eq!(front_and_load(&axes(&[("front", "fuse"), ("profile", "install")])), None);
        assert_eq!(front_and_load(&axes(&[("front", "fuse")])), None);
    }
}
