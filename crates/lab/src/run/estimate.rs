//! What a run will take: time, and space on each place.

use anyhow::Result;
use vdkit_block::parse_size;

use crate::axes::BACKEND;
use crate::layout::{self, More};
use crate::model::{Cell, PlaceInfo, PlaceKind};
use crate::plan::Effort;
use crate::profile::{self, Kind};

/// Kept free beside images: results of fio, initial files of a guest, a file system's own.
const BESIDE_BYTES: u64 = 192 << 20;

/// What a run will take. Time is a guess, space is what is needed at most at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Cells.
    pub cells: usize,
    /// Rounds of each.
    pub rounds: u32,
    /// Time of all of it.
    pub seconds: f64,
    /// By place: its name, the bytes needed, the bytes free.
    pub space: Vec<(String, u64, u64)>,
}

/// What one cell needs.
fn bytes_of(cell: &Cell, effort: &Effort) -> u64 {
    let size = cell.axis("size").and_then(|size| parse_size(size).ok());
    let effort = Effort { disk: size.unwrap_or(effort.disk), ..*effort };
    let layout = cell.axis("layout").and_then(layout::find);
    let Some(profile) = cell.axis("profile").and_then(profile::find) else { return effort.disk };
    let count: u64 = cell.axis("images").and_then(|count| count.parse().ok()).unwrap_or(1);
    let more = layout.map_or(More::Nothing, |layout| layout.more);
    let options = layout.map_or("", |layout| layout.options);
    let reserved = options.contains("=falloc") || options.contains("=full");
    let written = cell.axis("content") == Some("full")
        || matches!(more, More::Fragmented | More::Aged)
        || reserved;
    let bytes = match profile.kind {
        // A table of 8 bytes for each 64 KiB or less, and its like.
        Kind::Open | Kind::Convert if !written => effort.disk / 512 * count,
        Kind::Open | Kind::Convert => effort.disk * count,
        // One base that is all written, and overlays that are only read.
        Kind::Boot => effort.disk + count * (1 << 20),
        _ if reserved => effort.disk.max(profile.bytes(&effort)),
        _ => profile.bytes(&effort),
    };
    if more == More::Backing && profile.kind != Kind::Boot { bytes * 2 } else { bytes }
}

impl Estimate {
    /// Of these cells.
    pub fn of(cells: &[Cell], places: &[&PlaceInfo], effort: &Effort) -> Self {
        let one = |cell: &Cell| {
            let profile = cell.axis("profile").and_then(profile::find);
            // A guest boots and ends, mostly on an emulated processor.
            let guest = cell.axis("front").is_some_and(|front| front.starts_with("guest-"));
            profile.map_or(1.0, |profile| profile.seconds(effort)) + if guest { 20.0 } else { 0.0 }
        };
        let seconds: f64 = cells.iter().map(one).sum();
        let space = places.iter().filter(|place| place.kind == PlaceKind::Directory).map(|place| {
            let here = cells.iter().filter(|cell| cell.axis(BACKEND) == Some(&place.name));
            let most = here.map(|cell| bytes_of(cell, effort)).max().unwrap_or(0);
            (place.name.clone(), most + most / 32 + BESIDE_BYTES, place.free_bytes)
        });
        Self {
            cells: cells.len(),
            rounds: effort.rounds,
            seconds: seconds * f64::from(effort.rounds),
            space: space.collect(),
        }
    }

    /// Whether the space is there.
    ///
    /// # Errors
    /// It is not, on some place.
    pub fn check(&self) -> Result<()> {
        for (name, needed, free) in &self.space {
            if needed > free {
                let what = format!("{} MiB are needed, {} MiB are free", needed >> 20, free >> 20);
                return Err(vdkit_block::Error::NoSpace { file: name.clone(), what }.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(axes: &[(&str, &str)]) -> Cell {
        let axes = axes.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Cell { axes: axes.collect(), ..Cell::default() }
    }

    #[test]
    fn space_is_that_of_the_largest_cell() {
        let effort = Effort { rounds: 3, seconds: 10.0, disk: 1 << 30, bytes: 1 << 20 };
        let of = |axes: &[(&str, &str)]| bytes_of(&cell(axes), &effort);
        assert_eq!(of(&[("layout", "qcow2"), ("profile", "rnd4k-q1-read")]), 1 << 30);
        assert_eq!(of(&[("layout", "qcow2-overlay"), ("profile", "database")]), 2 << 30);
        assert_eq!(of(&[("layout", "qcow2"), ("profile", "sync16")]), 16 << 20);
        assert_eq!(of(&[("layout", "raw-full"), ("profile", "sync16")]), 1 << 30);
        let open = [("layout", "qcow2-metadata"), ("profile", "open"), ("size", "16G")];
        assert!(of(&open) < 64 << 20);
        let place = PlaceInfo { name: "a".into(), free_bytes: 1 << 30, ..PlaceInfo::default() };
        let cells = [cell(&[("backend", "a"), ("layout", "raw"), ("profile", "database")])];
        let estimate = Estimate::of(&cells, &[&place], &effort);
        assert!(estimate.seconds > 30.0, "{estimate:?}");
        let told = estimate.check().unwrap_err().to_string();
        assert!(told.contains("1248 MiB are needed, 1024 MiB are free"), "{told}");
    }
}
