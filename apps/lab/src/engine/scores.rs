//! Computes one score each for reads, for writes and for both.
//!
//! A score is a mean of throughputs in bytes per second. Random 4 KiB requests are much slower than
//! sequential 1 MiB requests and would hardly count. So the throughput of 4 KiB requests is
//! multiplied by the bare place's ratio of sequential to 4 KiB throughput. (The bare place is a raw
//! file that the load opens itself, with O_DIRECT if possible.) An image that loses nothing at 4
//! KiB then counts as much as one that loses nothing at 1 MiB.

use std::collections::BTreeMap;

use crate::error::{Context, Result};
use vdkit_block::CacheMode;

use super::{Bench, load};
use crate::axes::BACKEND;
use crate::front::{self, Front};
use crate::layout::{self, Content, Layout};
use crate::model::{Cell, Sample};
use crate::profile::SCORE_LOADS;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    let (layout, front, cache) = (bench.layout()?, bench.front()?, bench.cache()?);
    let place = bench.place.info.name.clone();
    if !bench.references.contains_key(&place) {
        let reference = bare(bench)?;
        bench.references.insert(place.clone(), reference);
    }
    let found = all(bench, layout, front, cache)?;
    let reference = bench.references.get(&place).context("the bare place was not measured")?;
    let read = score(&found, reference, "read");
    let write = score(&found, reference, "write");
    let values = super::values([
        ("read_bytes_per_second", read),
        ("write_bytes_per_second", write),
        ("bytes_per_second", (read + write) / 2.0),
        ("score", (read + write) / 2e6),
    ]);
    let mut raw = serde_json::to_value(&found)?;
    raw[BARE] = serde_json::to_value(reference)?;
    let told: Vec<String> =
        reference.iter().map(|(key, rate)| format!("{key} {:.1}", rate / 1e6)).collect();
    bench.note(&format!("throughput of the bare place in MB/s: {}", told.join(", ")));
    Ok(Sample { values, raw: Some(raw), ..Sample::default() })
}

/// Key of the bare place's throughputs in a sample's raw results.
const BARE: &str = "bare";

/// The throughputs of the bare places that a run has measured already. A resumed run goes on with
/// them, because scores with another reference are not comparable.
pub fn references(cells: &[Cell]) -> BTreeMap<String, BTreeMap<String, f64>> {
    let of = |cell: &Cell| {
        let bare = cell.samples.iter().find_map(|sample| sample.raw.as_ref()?.get(BARE))?;
        let place = cell.axis(BACKEND)?.to_owned();
        Some((place, serde_json::from_value(bare.clone()).ok()?))
    };
    cells.iter().filter_map(of).collect()
}

/// Throughputs of the bare place.
fn bare(bench: &mut Bench<'_>) -> Result<BTreeMap<String, f64>> {
    let (layout, front) = (layout::find("raw"), front::find("file"));
    let (layout, front) = (layout.context("no layout 'raw'")?, front.context("no front 'file'")?);
    match all(bench, layout, front, CacheMode::None) {
        Err(error) if error.skipped().is_some() => all(bench, layout, front, CacheMode::Writeback),
        other => other,
    }
}

/// The throughput of each load, on one image.
fn all(
    bench: &mut Bench<'_>,
    layout: &Layout,
    front: &Front,
    cache: CacheMode,
) -> Result<BTreeMap<String, f64>> {
    let bytes = bench.disk_bytes()?;
    let image = layout::make(bench, layout, bytes, Content::All)?;
    // Otherwise cache modes with a page cache would read what the lab has just put there.
    super::drop_caches(&image.files)?;
    let served = front::start(bench, front, &image, cache)?;
    let loads = SCORE_LOADS.iter().map(|(_, load)| *load).collect::<Vec<_>>();
    let rates = load::rates(bench, &loads, &served, bytes)?;
    served.end();
    if !image.device {
        for path in &image.files {
            std::fs::remove_file(path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(SCORE_LOADS.iter().map(|(key, _)| (*key).to_owned()).zip(rates).collect())
}

/// The mean throughput of reads or writes, with 4 KiB requests scaled.
fn score(found: &BTreeMap<String, f64>, bare: &BTreeMap<String, f64>, side: &str) -> f64 {
    let of = |all: &BTreeMap<String, f64>, load: &str| {
        all.get(&format!("{load}-{side}")).copied().unwrap_or(0.0)
    };
    let scale = of(bare, "seq") / of(bare, "rnd4k").max(1.0);
    let parts =
        [of(found, "seq"), of(found, "rnd4k") * scale, of(found, "rnd64k"), of(found, "rnd1m")];
    parts.iter().sum::<f64>() / parts.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::axes_of;

    /// A resumed run once measured the bare place again, so that its later rounds had other scores
    /// than the earlier ones.
    #[test]
    fn a_resumed_run_keeps_its_reference() {
        let sample = |raw| Sample { raw: Some(raw), ..Sample::default() };
        let cell = |place: &str, raw| Cell {
            axes: axes_of(&[(BACKEND, place)]),
            samples: vec![sample(raw)],
            ..Cell::default()
        };
        let cells = [
            cell("ext4", serde_json::json!({"seq-read": 1.0, "bare": {"seq-read": 2.0}})),
            cell("xfs", serde_json::json!({"jobs": []})),
            Cell::default(),
        ];
        let found = references(&cells);
        assert_eq!(found.len(), 1);
        assert_eq!(found["ext4"], BTreeMap::from([("seq-read".to_owned(), 2.0)]));
    }

    #[test]
    fn small_requests_count_as_much_as_large_ones() {
        let rates = |seq, rnd4k, more| -> BTreeMap<String, f64> {
            [("seq-read", seq), ("rnd4k-read", rnd4k), ("rnd64k-read", more), ("rnd1m-read", more)]
                .map(|(key, rate)| (key.to_owned(), rate))
                .into()
        };
        let bare = rates(1000.0, 10.0, 500.0);
        assert_eq!(score(&bare, &bare, "read"), (1000.0 + 1000.0 + 500.0 + 500.0) / 4.0);
        // Half the speed at 4 KiB costs as much as half the speed at 1 MiB.
        let slow = score(&rates(1000.0, 5.0, 500.0), &bare, "read");
        assert_eq!(slow, score(&rates(500.0, 10.0, 500.0), &bare, "read"));
        assert_eq!(score(&bare, &bare, "write"), 0.0);
    }
}
