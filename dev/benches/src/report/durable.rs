//! The table of the group durable.

use std::fmt::Write;

use super::{edges, median, ratio, ratio_of};
use crate::options::FileSystem;
use crate::pair::{Cell, Series};

/// How many times as fast as qemu-nbd vdkit is to be: never slower, and twice as fast where a sync
/// takes less than 0.1 ms.
fn wanted(cell: &Cell) -> f64 {
    let cheap = cell.name.file_system == FileSystem::Tmpfs && cell.name.content == "nothing";
    if cheap { 2.0 } else { 1.0 }
}

fn verdict(cell: &Cell, vdkit: &Series, qemu: &Series) -> String {
    let wanted = wanted(cell);
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

pub fn table(cells: &[&Cell]) -> String {
    let mut text = String::from(
        "| file system | a sync takes | job | vdkit, a request | qemu-nbd, a request | \
         qemu-nbd ÷ vdkit | wanted | CPU a request | qemu-nbd ÷ vdkit | syncs a request | \
         peak memory | runs |\n\
         |---|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|\n",
    );
    for cell in cells {
        let [vdkit, qemu, ..] = &cell.series[..] else { continue };
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} : {} | {} | {} : {} | {} | {} |",
            cell.name.file_system.name(),
            cell.name.content,
            cell.name.job,
            micros(vdkit, &vdkit.walls()),
            micros(qemu, &qemu.walls()),
            ratio(qemu, vdkit),
            verdict(cell, vdkit, qemu),
            micros(vdkit, &vdkit.processors()),
            micros(qemu, &qemu.processors()),
            ratio_of(qemu, vdkit, Series::processors),
            syncs(vdkit),
            syncs(qemu),
            vdkit.memory(),
            vdkit.runs.len(),
        );
    }
    text
}

/// A line for the terminal.
pub fn short(cell: &Cell) -> String {
    let mut text = String::new();
    for series in &cell.series {
        let _ = write!(text, "  {}: {}", series.name, micros(series, &series.walls()));
    }
    if let [vdkit, qemu, ..] = &cell.series[..] {
        let processors = ratio_of(qemu, vdkit, Series::processors);
        let _ = write!(text, "  ÷ {}, CPU {processors}", ratio(qemu, vdkit));
        let _ = write!(text, ", syncs {} : {}", syncs(vdkit), syncs(qemu));
        let _ = write!(text, ", wanted {}", verdict(cell, vdkit, qemu));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Group;
    use crate::pair::CellName;
    use crate::process::Usage;

    fn cell(sync: &str, vdkit: f64, qemu: f64) -> Cell {
        let series = |name: &str, wall_seconds| Series {
            name: name.to_owned(),
            command: String::new(),
            runs: vec![Usage {
                wall_seconds,
                sync_seconds: 0.0,
                user_seconds: 1e-6,
                system_seconds: 0.0,
                memory_bytes_max: 1 << 20,
                syncs: (sync != "nothing").then_some(0.25),
            }],
            target_bytes: None,
            cannot: None,
            wrong: None,
        };
        let name = CellName {
            group: Group::Durable,
            job: "job".to_owned(),
            content: sync.to_owned(),
            file_system: FileSystem::Tmpfs,
        };
        Cell {
            name,
            guest_bytes: 1,
            series: vec![series("vdkit", vdkit), series("qemu-nbd", qemu)],
        }
    }

    #[test]
    fn cheap_syncs_ask_for_twice_the_speed_and_dear_ones_for_the_same() {
        let text = table(&[&cell("nothing", 20e-6, 30e-6), &cell("1 ms", 20e-6, 30e-6)]);
        assert!(text.contains("| nothing | job | 20.0 µs (20.0–20.0) | 30.0 µs"), "{text}");
        assert!(text.contains("| **1.50** (1.50–1.50) | 2: **missed** |"), "{text}");
        assert!(text.contains("| **1.50** (1.50–1.50) | 1: met |"), "{text}");
        assert!(text.contains("| – : – |") && text.contains("| 0.25 : 0.25 |"), "{text}");
    }
}
