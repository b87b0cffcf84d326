//! Estimates the time of a run, and its space on each place.

use std::collections::BTreeMap;

use crate::error::Result;

use super::speed::Speed;
use crate::axes::BACKEND;
use crate::fit::{Unfit, fit};
use crate::lists::grouped;
use crate::model::{Cell, Outcome, PlaceInfo, PlaceKind};
use crate::plan::Effort;
use crate::words::plural;

/// Space kept free besides images: results of fio, a guest's initial files, a file system's
/// metadata.
const BESIDE_BYTES: u64 = 192 << 20;

/// Estimate of a run. The time is a guess; the space is the largest amount in use at any time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Number of cells that are measured.
    pub cells: usize,
    /// Number of rounds of each cell.
    pub rounds: u32,
    /// Duration of the whole run.
    pub seconds: f64,
    /// Duration of one round of each cell, in the order of the cells.
    pub each: Vec<f64>,
    /// By place: its name, the bytes needed, the bytes available.
    pub space: Vec<(String, u64, u64)>,
    /// What a user should know before the run begins: cells that are left out with the reasons, and
    /// disks that are smaller than the plan's.
    pub told: Vec<String>,
}

impl Estimate {
    /// Estimates the run of these cells; speeds are by the names of places.
    pub fn of(
        cells: &[Cell],
        places: &[&PlaceInfo],
        effort: &Effort,
        speeds: &BTreeMap<String, Speed>,
    ) -> Self {
        let place = |cell: &Cell| {
            let name = cell.axis(BACKEND)?;
            places.iter().find(|place| place.name == name).copied()
        };
        let unknown = Speed::default();
        let speed = |name: &str| speeds.get(name).unwrap_or(&unknown);
        let each: Vec<f64> = cells
            .iter()
            .map(|cell| {
                let Some(place) = place(cell).filter(|_| measures(cell)) else { return 0.0 };
                let Ok(fit) = fit(&cell.axes, effort, place) else { return 0.0 };
                speed(&place.name).of_cell(&cell.axes, effort, &fit)
            })
            .collect();
        let once = |place: &&PlaceInfo| {
            let here = cells.iter().filter(|cell| cell.axis(BACKEND) == Some(&place.name));
            speed(&place.name).once(here.map(|cell| &cell.axes), effort, place)
        };
        let first: f64 = places.iter().map(once).sum();
        Self {
            cells: cells.iter().filter(|cell| measures(cell)).count(),
            rounds: effort.rounds,
            seconds: first + each.iter().sum::<f64>() * f64::from(effort.rounds),
            each,
            space: places.iter().map(|place| space(cells, place, effort)).collect(),
            told: told(cells, places, effort),
        }
    }

    /// Duration of a run with this number of rounds.
    pub fn seconds_of(&self, rounds: u32) -> f64 {
        let more = f64::from(rounds.saturating_sub(self.rounds));
        self.seconds + more * self.each.iter().sum::<f64>()
    }

    /// Checks that the places have enough space.
    pub fn check(&self) -> Result<()> {
        for (name, needed, there) in &self.space {
            if needed > there {
                let (needed, there) = (needed.div_ceil(1 << 20), there >> 20);
                let what = format!("{needed} MiB are needed, {there} MiB are free");
                return Err(vdkit_block::Error::NoSpace { file: name.clone(), what }.into());
            }
        }
        Ok(())
    }
}

/// Whether a cell may be possible, as far as is known before the run.
fn measures(cell: &Cell) -> bool {
    !matches!(cell.outcome, Outcome::Skipped(_))
}

/// A place's name, the space needed on it, and its free space.
fn space(cells: &[Cell], place: &PlaceInfo, effort: &Effort) -> (String, u64, u64) {
    let here = cells.iter().filter(|cell| cell.axis(BACKEND) == Some(&place.name));
    let fits: Vec<_> = here.map(|cell| fit(&cell.axes, effort, place)).collect();
    let bytes = fits.iter().flatten().map(|fit| fit.bytes).max();
    let needed = match place.kind {
        PlaceKind::Directory => {
            let bytes = bytes.unwrap_or(0);
            bytes + bytes / 32 + BESIDE_BYTES
        }
        // A device has to hold the largest image that fits, or the smallest one if none fits.
        PlaceKind::Device => bytes.unwrap_or_else(|| {
            let least = fits.iter().filter_map(|fit| match fit {
                Err(Unfit::Small { needed, .. }) => Some(*needed),
                _ => None,
            });
            least.min().unwrap_or(0)
        }),
    };
    (place.name.clone(), needed, place.free_bytes)
}

/// Cells that are left out on each place, and disks that are smaller there.
fn told(cells: &[Cell], places: &[&PlaceInfo], effort: &Effort) -> Vec<String> {
    let mut told = Vec::new();
    for place in places {
        let here = || cells.iter().filter(|cell| cell.axis(BACKEND) == Some(&place.name));
        let skipped = here().filter_map(|cell| match &cell.outcome {
            Outcome::Skipped(reason) => Some((reason, cell)),
            _ => None,
        });
        for (reason, cells) in grouped(skipped) {
            let cells = plural(cells.len(), "cell");
            told.push(format!("{}: {cells} left out: {reason}", place.name));
        }
        let smaller = here().filter(|cell| measures(cell)).find_map(|cell| {
            let fit = fit(&cell.axes, effort, place).ok()?;
            (fit.disk < fit.wanted).then_some(fit)
        });
        if let Some(fit) = smaller {
            told.push(format!(
                "{}: disks have {} MiB instead of {} MiB, so that a format's tables fit on the device too",
                place.name,
                fit.disk >> 20,
                fit.wanted >> 20
            ));
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    const EFFORT: Effort = Effort { rounds: 3, seconds: 10.0, disk: 1 << 30, bytes: 1 << 20 };

    fn cell(axes: &[(&str, &str)]) -> Cell {
        Cell { axes: crate::model::axes_of(axes), ..Cell::default() }
    }

    fn of(cells: &[Cell], place: &PlaceInfo) -> Estimate {
        Estimate::of(cells, &[place], &EFFORT, &BTreeMap::new())
    }

    #[test]
    fn a_folder_has_to_hold_the_largest_image() {
        let place = PlaceInfo { name: "a".into(), free_bytes: 1 << 30, ..PlaceInfo::default() };
        let cells = [cell(&[("backend", "a"), ("layout", "raw"), ("profile", "database")])];
        let told = of(&cells, &place).check().unwrap_err().to_string();
        assert!(told.contains("1248 MiB are needed, 1024 MiB are free"), "{told}");
    }

    #[test]
    fn time_is_that_of_what_is_measured_in_all_rounds() {
        let place = PlaceInfo { name: "a".into(), ..PlaceInfo::default() };
        let load = cell(&[("backend", "a"), ("front", "file"), ("profile", "rnd4k-q1-write")]);
        let skipped = Cell { outcome: Outcome::Skipped("no".into()), ..load.clone() };
        let one = of(std::slice::from_ref(&load), &place);
        // 10 s, the start of fio and one command.
        assert!((one.each[0] - 10.52).abs() < 1e-9, "{one:?}");
        assert!((one.seconds - 3.0 * one.each[0]).abs() < 1e-9);
        let two = of(&[load.clone(), skipped, load], &place);
        assert!((two.seconds - 2.0 * one.seconds).abs() < 1e-9 && two.cells == 2, "{two:?}");
        assert_eq!(two.told, ["a: 1 cell left out: no"]);
        assert!((one.seconds_of(6) - 6.0 * one.each[0]).abs() < 1e-9);
        assert!((one.seconds_of(3) - one.seconds).abs() < 1e-9);
    }

    /// `cache-modes` once took almost three times as long as its first estimate, and `nospace` half as
    /// long.
    #[test]
    fn estimates_of_full_plans_are_within_a_factor_of_two() {
        use crate::front::GuestSpeed;
        // The speeds of the host of docs/lab.md, without trials, and what its runs took.
        let guest = GuestSpeed { boot: 4.5, fio: 1.5 };
        let speed = Speed { command: 0.008, byte: 1.0 / 1e9, guest, ..Speed::default() };
        let place = PlaceInfo {
            name: "ext4".into(),
            file_system: Some("ext4".into()),
            ..PlaceInfo::default()
        };
        let speeds = BTreeMap::from([("ext4".to_owned(), speed)]);
        for (name, rounds, took) in [
            ("cache-modes", 6, 8048.0),
            ("cold-open", 10, 147.0),
            ("convert-table", 14, 314.0),
            ("install", 6, 697.0),
            ("nospace", 3, 280.0),
            ("preallocation", 3, 1090.0),
        ] {
            let plan = crate::plan::Plan::named(name).unwrap();
            let cells = crate::cells::cells(&plan, &[&place], false);
            let found = Estimate::of(&cells, &[&place], &plan.effort(false), &speeds);
            let part = found.seconds_of(rounds) / took;
            assert!((0.5..=2.0).contains(&part), "{name}: {part}");
        }
    }

    #[test]
    fn a_device_smaller_than_the_disk_is_refused_with_what_it_takes() {
        let device = |total| PlaceInfo {
            name: "loop".into(),
            kind: PlaceKind::Device,
            total_bytes: total,
            free_bytes: total,
            ..PlaceInfo::default()
        };
        let cells = [
            cell(&[("backend", "loop"), ("layout", "raw"), ("profile", "database")]),
            cell(&[("backend", "loop"), ("layout", "qcow2"), ("profile", "database")]),
        ];
        let told = of(&cells, &device(512 << 20)).check().unwrap_err().to_string();
        assert!(told.contains("1024 MiB are needed, 512 MiB are free"), "{told}");
        let exact = of(&cells, &device(1 << 30));
        exact.check().unwrap();
        assert!(exact.told[0].contains("1004 MiB instead of 1024 MiB"), "{:?}", exact.told);
        let larger = of(&cells, &device(2 << 30));
        larger.check().unwrap();
        assert_eq!(larger.told, [""; 0]);
    }
}
