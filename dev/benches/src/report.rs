//! Samples as JSON, medians and paired ratios as Markdown.

mod durable;
mod table;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::options::Group;
use crate::pair::{Cell, Series};

/// All that was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// Where and with what; several where reports were joined.
    pub machines: Vec<Machine>,
    /// The cells.
    pub cells: Vec<Cell>,
}

impl Report {
    /// An empty one.
    pub fn new(machine: Machine) -> Self {
        Self { machines: vec![machine], cells: Vec::new() }
    }

    /// Puts a cell in; it replaces an older one of its name.
    pub fn add(&mut self, cell: Cell) {
        self.cells.retain(|old| old.name != cell.name);
        self.cells.push(cell);
    }

    /// Reads saved reports and joins them.
    pub fn read_all(files: &[PathBuf]) -> Result<Self> {
        let mut joined = Self::default();
        for file in files {
            let text = fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let one: Self = serde_json::from_str(&text)
                .with_context(|| format!("{} has no samples", file.display()))?;
            joined.machines.extend(one.machines);
            one.cells.into_iter().for_each(|cell| joined.add(cell));
        }
        Ok(joined)
    }

    /// Saves all samples.
    pub fn write_json(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Brings the cells into the order of the tables.
    pub fn sort(&mut self) {
        // Stable, so contents keep the order in which they were measured.
        self.cells.sort_by(|a, b| {
            (a.name.group, a.name.file_system).cmp(&(b.name.group, b.name.file_system))
        });
    }

    /// What vdkit could not do, and wrong results of anybody.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for cell in &self.cells {
            for (index, series) in cell.series.iter().enumerate() {
                let fault = match (&series.wrong, &series.cannot) {
                    (Some(wrong), _) => wrong,
                    (None, Some(cannot)) if index == 0 => cannot,
                    _ => continue,
                };
                faults.push(format!("{}: {}: {fault}", cell.title(), series.name));
            }
        }
        faults
    }

    /// Everything as one document.
    pub fn markdown(&self) -> String {
        let mut text = self.machine_markdown();
        for &group in Group::value_variants() {
            let table = self.table(group);
            if !table.is_empty() {
                let _ = write!(text, "\n### {}\n\n{table}", group.name());
            }
        }
        text
    }

    /// Puts the tables between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` of a document, for
    /// the groups that this report has.
    pub fn update_document(&self, document: &Path) -> Result<()> {
        let mut text = fs::read_to_string(document)?;
        text = replace_marked(&text, "machine", &self.machine_markdown())?;
        for &group in Group::value_variants() {
            let table = self.table(group);
            if !table.is_empty() {
                text = replace_marked(&text, group.name(), &table)?;
            }
        }
        fs::write(document, text)?;
        Ok(())
    }

    fn machine_markdown(&self) -> String {
        let mut text = String::new();
        let mut last: Option<Machine> = None;
        for machine in &self.machines {
            let same = Machine { date: String::new(), command: String::new(), ..machine.clone() };
            if last.as_ref() != Some(&same) {
                let _ = writeln!(
                    text,
                    "{}, {} GiB of memory, {}, {}, scratch file systems on {}; commit {}.\n{}.\n",
                    machine.cpu,
                    machine.memory_gib,
                    machine.system,
                    machine.kernel,
                    machine.host_file_system,
                    machine.commit,
                    machine.programs.join("; "),
                );
            }
            let _ = writeln!(text, "- {} UTC: `{}`", machine.date, machine.command);
            last = Some(same);
        }
        text
    }

    fn table(&self, group: Group) -> String {
        let cells: Vec<_> = self.cells.iter().filter(|c| c.name.group == group).collect();
        if cells.is_empty() { String::new() } else { table::of(&cells, table::columns(group)) }
    }
}

/// A number of requests a second, short.
fn thousands(number: f64) -> String {
    match number {
        n if n >= 10_000.0 => format!("{:.0}k", n / 1e3),
        n if n >= 1_000.0 => format!("{:.1}k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

fn replace_marked(text: &str, name: &str, with: &str) -> Result<String> {
    let (open, close) = (format!("<!-- bench:{name} -->"), format!("<!-- /bench:{name} -->"));
    let Some((before, rest)) = text.split_once(&open) else {
        bail!("no marker {open}");
    };
    let Some((_, after)) = rest.split_once(&close) else {
        bail!("no marker {close}");
    };
    Ok(format!("{before}{open}\n{with}{close}{after}"))
}

impl Cell {
    fn title(&self) -> String {
        format!(
            "{} {} {} {}",
            self.name.group.name(),
            self.name.file_system.name(),
            self.name.content,
            self.name.job
        )
    }

    fn vdkit(&self) -> &Series {
        &self.series[0]
    }

    /// The first one beside vdkit.
    fn peer(&self) -> &Series {
        &self.series[1]
    }

    /// The fastest of qemu-img's candidates.
    fn best_peer(&self) -> Option<&Series> {
        self.series
            .iter()
            .filter(|s| s.name.starts_with("qemu-img") && s.usable())
            .min_by(|a, b| a.median().total_cmp(&b.median()))
    }

    /// A line for the terminal.
    pub fn short(&self) -> String {
        let mut text = String::new();
        for series in &self.series {
            let _ = write!(text, "  {}: {}", series.name, series.time());
        }
        if self.name.group == Group::Durable {
            text = durable::short(self);
        } else if self.name.group == Group::Serve {
            text.clear();
            for series in &self.series {
                let _ = write!(text, "  {}: {}", series.name, series.rate());
            }
            if let [vdkit, qemu, ..] = &self.series[..] {
                let cpu = ratio_of(qemu, vdkit, Series::processors);
                let _ = write!(text, "  ÷ {}, CPU {cpu}", ratio(qemu, vdkit));
            }
        } else if let (Some(vdkit), Some(best)) = (self.series.first(), self.best_peer()) {
            let _ = write!(text, "  ÷ {}", ratio(best, vdkit));
        }
        text
    }
}

impl Series {
    fn usable(&self) -> bool {
        self.wrong.is_none() && self.cannot.is_none() && !self.runs.is_empty()
    }

    fn walls(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.wall_seconds).collect()
    }

    fn median(&self) -> f64 {
        median(&self.walls())
    }

    /// Processor time of each run.
    fn processors(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.user_seconds + run.system_seconds).collect()
    }

    /// In the group serve: requests a second.
    fn rate(&self) -> String {
        self.shown(|| {
            let walls = self.walls();
            let (least, most) = edges(&walls);
            let middle = thousands(1.0 / median(&walls));
            format!("{middle} ({}–{})", thousands(1.0 / most), thousands(1.0 / least))
        })
    }

    /// In the group serve: requests for each second of the server's processor time.
    fn processor_rate(&self) -> String {
        self.shown(|| thousands(1.0 / median(&self.processors())))
    }

    /// The flags after the program's name.
    fn flags(&self) -> &str {
        self.name.split_once(' ').map_or("default", |(_, flags)| flags)
    }

    fn time(&self) -> String {
        self.shown(|| milliseconds(&self.walls()))
    }

    fn synced_time(&self) -> String {
        self.shown(|| {
            let totals: Vec<_> =
                self.runs.iter().map(|r| r.wall_seconds + r.sync_seconds).collect();
            milliseconds(&totals)
        })
    }

    fn memory(&self) -> String {
        self.shown(|| {
            let most = self.runs.iter().map(|run| run.memory_bytes_max).max().unwrap_or(0);
            format!("{:.0} MiB", most as f64 / f64::from(1 << 20))
        })
    }

    fn shown(&self, number: impl FnOnce() -> String) -> String {
        if self.wrong.is_some() {
            "WRONG RESULT".to_owned()
        } else if self.usable() {
            number()
        } else {
            "cannot".to_owned()
        }
    }
}

/// `slow ÷ fast`: the median of the rounds' own ratios, with the least and the greatest.
fn ratio(slow: &Series, fast: &Series) -> String {
    ratio_of(slow, fast, Series::walls)
}

/// As [`ratio`], of other figures of the runs.
fn ratio_of(slow: &Series, fast: &Series, figures: fn(&Series) -> Vec<f64>) -> String {
    if !slow.usable() || !fast.usable() {
        return "–".to_owned();
    }
    let ratios: Vec<_> =
        figures(slow).iter().zip(figures(fast)).map(|(slow, fast)| slow / fast).collect();
    let (least, most) = edges(&ratios);
    let digits = |x: f64| if x >= 20.0 { format!("{x:.0}") } else { format!("{x:.2}") };
    format!("**{}** ({}–{})", digits(median(&ratios)), digits(least), digits(most))
}

/// Processor time of both, in milliseconds: what a busy machine changes least.
fn processor(vdkit: &Series, peer: Option<&Series>) -> String {
    let median_of = |series: &Series| {
        let all: Vec<_> =
            series.runs.iter().map(|run| run.user_seconds + run.system_seconds).collect();
        series.shown(|| format!("{:.0}", median(&all) * 1e3))
    };
    format!("{} : {} ms", median_of(vdkit), peer.map_or("–".to_owned(), median_of))
}

/// The median, with the least and the greatest.
fn milliseconds(seconds: &[f64]) -> String {
    let (least, most) = edges(seconds);
    let digits = |s: f64| {
        let ms = s * 1e3;
        if ms < 100.0 { format!("{ms:.1}") } else { format!("{ms:.0}") }
    };
    format!("{} ms ({}–{})", digits(median(seconds)), digits(least), digits(most))
}

fn edges(numbers: &[f64]) -> (f64, f64) {
    let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
    (least, numbers.iter().copied().fold(0.0, f64::max))
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::FileSystem;
    use crate::pair::CellName;
    use crate::process::Usage;

    fn series(name: &str, walls: &[f64]) -> Series {
        let usage = |&wall_seconds| Usage {
            wall_seconds,
            sync_seconds: 1.0,
            user_seconds: 0.0,
            system_seconds: 0.0,
            memory_bytes_max: 5 << 20,
            syncs: None,
        };
        let runs = walls.iter().map(usage).collect();
        Series { runs, ..Series::new(name, name.to_owned()) }
    }

    fn report() -> Report {
        let mut report = Report::new(Machine::default());
        let name = CellName::new(Group::File, "raw→qcow2", "full", FileSystem::Xfs);
        let series = vec![
            series("vdkit", &[0.010, 0.011, 0.030]),
            series("qemu-img", &[0.9, 1.0, 1.1]),
            series("qemu-img -C", &[0.1, 0.11, 0.12]),
            series("cp --reflink", &[0.005, 0.005, 0.006]),
        ];
        report.add(Cell { name, guest_bytes: 1, series });
        report
    }

    #[test]
    fn the_best_peer_is_compared_round_by_round() {
        let table = report().table(Group::File);
        assert!(table.contains("| 11.0 ms (10.0–30.0) | 110 ms (100–120) | -C |"), "{table}");
        // 0.1/0.010, 0.11/0.011, 0.12/0.030
        assert!(table.contains("**10.00** (4.00–10.00)"), "{table}");
        assert!(table.contains("1011 ms"), "with the sync: {table}");
    }

    #[test]
    fn a_wrong_result_wins_nothing_and_is_a_fault() {
        let mut report = report();
        report.cells[0].series[2].wrong = Some("differs".to_owned());
        let table = report.table(Group::File);
        assert!(table.contains("| 1000 ms (900–1100) | default |"), "{table}");
        assert_eq!(report.faults(), ["file xfs full raw→qcow2: qemu-img -C: differs"]);
        report.cells[0].series[2].wrong = None;
        report.cells[0].series[2].cannot = Some("no O_DIRECT".to_owned());
        assert!(report.faults().is_empty(), "a peer may lack something");
        report.cells[0].series[0].cannot = Some("panic".to_owned());
        assert_eq!(report.faults().len(), 1, "vdkit may not");
    }

    #[test]
    fn documents_are_rewritten_between_their_markers_only() {
        let text = "a <!-- bench:null -->old<!-- /bench:null --> b";
        let text = replace_marked(text, "null", "new\n").unwrap();
        assert_eq!(text, "a <!-- bench:null -->\nnew\n<!-- /bench:null --> b");
        assert!(replace_marked(&text, "file", "").is_err());
    }

    #[test]
    fn samples_survive_a_round_trip() {
        let text = serde_json::to_string(&report()).unwrap();
        let again: Report = serde_json::from_str(&text).unwrap();
        assert_eq!(again.table(Group::File), report().table(Group::File));
        assert_eq!(median(&[3.0, 1.0, 2.0, 10.0]), 2.5);
    }
}
