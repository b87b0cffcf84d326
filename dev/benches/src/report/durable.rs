//! The table of the group durable.

use std::fmt::Write;

use super::table::{Column, FILE_SYSTEM, JOB, MEMORY, RUNS, number, processor_ratio, words};
use super::{Cell, Series, edges, median, ratio};
use crate::options::FileSystem;

/// How many times as fast as qemu-nbd vdkit is to be: never slower, and twice as fast where a sync
/// takes less than 0.1 ms.
fn wanted(cell: &Cell) -> f64 {
    let cheap = cell.name.file_system == FileSystem::Tmpfs && cell.name.content == "nothing";
    if cheap { 2.0 } else { 1.0 }
}

fn verdict(cell: &Cell) -> String {
    let (wanted, vdkit, qemu) = (wanted(cell), cell.vdkit(), cell.peer());
    if !vdkit.usable() || !qemu.usable() {
        return "–".to_owned();
    }
    let ratios: Vec<f64> =
        qemu.walls().iter().zip(vdkit.walls()).map(|(qemu, vdkit)| qemu / vdkit).collect();
    // As it is shown: a thousandth is neither faster nor slower.
    let shown = (median(&ratios) * 100.0).round() / 100.0;
    let met = if shown >= wanted { "met" } else { "**missed**" };
    format!("{wanted}: {met}")
}

/// Microseconds: the median, with the least and the greatest.
fn micros(series: &Series, figures: &[f64]) -> String {
    series.shown(|| {
        let digits = |seconds: f64| match seconds * 1e6 {
            us if us < 100.0 => format!("{us:.1}"),
            us => format!("{us:.0}"),
        };
        let (least, most) = edges(figures);
        format!("{} µs ({}–{})", digits(median(figures)), digits(least), digits(most))
    })
}

/// Syncs a request, where they were counted.
fn syncs(series: &Series) -> String {
    let counts: Option<Vec<f64>> = series.runs.iter().map(|run| run.syncs).collect();
    match counts {
        Some(counts) if !counts.is_empty() => format!("{:.2}", median(&counts)),
        _ => "–".to_owned(),
    }
}

pub const COLUMNS: &[Column] = &[
    FILE_SYSTEM,
    words("a sync takes", |cell| cell.name.content.clone()),
    JOB,
    number("vdkit, a request", |cell| micros(cell.vdkit(), &cell.vdkit().walls())),
    number("qemu-nbd, a request", |cell| micros(cell.peer(), &cell.peer().walls())),
    number("qemu-nbd ÷ vdkit", |cell| ratio(cell.peer(), cell.vdkit())),
    words("wanted", verdict),
    number("CPU a request", |cell| {
        let processor = |series: &Series| micros(series, &series.processors());
        format!("{} : {}", processor(cell.vdkit()), processor(cell.peer()))
    }),
    number("qemu-nbd ÷ vdkit", |cell| processor_ratio(cell.peer(), cell)),
    number("syncs a request", |cell| format!("{} : {}", syncs(cell.vdkit()), syncs(cell.peer()))),
    MEMORY,
    RUNS,
];

/// A line for the terminal.
pub fn short(cell: &Cell) -> String {
    let mut text = String::new();
    for series in &cell.series {
        let _ = write!(text, "  {}: {}", series.name, micros(series, &series.walls()));
    }
    if let [vdkit, qemu, ..] = &cell.series[..] {
        let processors = processor_ratio(qemu, cell);
        let _ = write!(text, "  ÷ {}, CPU {processors}", ratio(qemu, vdkit));
        let _ = write!(text, ", syncs {} : {}", syncs(vdkit), syncs(qemu));
        let _ = write!(text, ", wanted {}", verdict(cell));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Group;
    use crate::pair::CellName;
    use crate::process::Usage;
    use crate::report::table;

    fn cell(sync: &str, vdkit: f64, qemu: f64) -> Cell {
        let series = |name: &str, wall_seconds| Series {
            runs: vec![Usage {
                wall_seconds,
                sync_seconds: 0.0,
                user_seconds: 1e-6,
                system_seconds: 0.0,
                memory_bytes_max: 1 << 20,
                syncs: (sync != "nothing").then_some(0.25),
            }],
            ..Series::new(name, String::new())
        };
        let name = CellName::new(Group::Durable, "job", sync, FileSystem::Tmpfs);
        Cell {
            name,
            guest_bytes: 1,
            series: vec![series("vdkit", vdkit), series("qemu-nbd", qemu)],
        }
    }

    #[test]
    fn cheap_syncs_ask_for_twice_the_speed_and_dear_ones_for_the_same() {
        let cells = [cell("nothing", 20e-6, 30e-6), cell("1 ms", 20e-6, 30e-6)];
        let text = table::of(&[&cells[0], &cells[1]], COLUMNS);
        assert!(text.contains("| nothing | job | 20.0 µs (20.0–20.0) | 30.0 µs"), "{text}");
        assert!(text.contains("| **1.50** (1.50–1.50) | 2: **missed** |"), "{text}");
        assert!(text.contains("| **1.50** (1.50–1.50) | 1: met |"), "{text}");
        assert!(text.contains("| – : – |") && text.contains("| 0.25 : 0.25 |"), "{text}");
    }
}
