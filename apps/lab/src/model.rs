//! The data of a run: its cells, their samples, and the machine.
//!
//! ```text
//!   Run ─┬─ PlanSummary    the plan
//!        ├─ Environment    the machine
//!        ├─ Cell ─┬─ axes, commands, outcome
//!        │        └─ Sample (one per round) ── values, latencies, series, steady, raw
//!        ├─ Published      published numbers
//!        └─ Warning        problems that affect the numbers
//! ```
//!
//! All types convert to JSON and back; [`crate::store`] keeps a run in a file. Times of day are
//! seconds since 1970-01-01 UTC.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::metrics::{Better, METRICS, Metric, SURVIVED, metric};

/// The axes of a cell in the order of the plan: name and value, such as `layout` and `qcow2`.
pub type Axes = Vec<(String, String)>;

/// Axes with these values.
pub fn axes_of(values: &[(&str, &str)]) -> Axes {
    values.iter().map(|(axis, value)| ((*axis).to_owned(), (*value).to_owned())).collect()
}

/// The value of an axis.
pub fn value_of<'a>(axes: &'a Axes, name: &str) -> Option<&'a str> {
    axes.iter().find(|(axis, _)| axis == name).map(|(_, value)| value.as_str())
}

/// The axes with another value of one of them.
pub fn with_value(axes: &Axes, name: &str, value: &str) -> Axes {
    let mut changed = axes.clone();
    for (_, old) in changed.iter_mut().filter(|(axis, _)| axis == name) {
        value.clone_into(old);
    }
    changed
}

/// One run of a plan on one machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Run {
    /// Unique among all runs: start time, plan and random digits.
    pub id: String,
    /// The plan that was run.
    pub plan: PlanSummary,
    /// Published numbers.
    pub published: Vec<Published>,
    /// Whether this is a quick run: fewer cells, less time per cell.
    pub quick: bool,
    /// Seed of the order of the cells and of random bytes.
    pub seed: u64,
    /// Start time.
    pub started: u64,
    /// End time; none if the run was interrupted or is still going on.
    pub ended: Option<u64>,
    /// The version of vdkit.
    pub vdkit_version: String,
    /// The machine.
    pub environment: Environment,
    /// All cells in the order of the plan, also those that were not measured.
    pub cells: Vec<Cell>,
    /// Problems that affect the numbers.
    pub warnings: Vec<Warning>,
}

/// A plan in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlanSummary {
    /// The plan's name on the command line.
    pub name: String,
    /// A heading.
    pub title: String,
    /// What the user learns from it.
    pub question: String,
    /// Names of the axes in their order, `backend` first.
    pub axes: Vec<String>,
    /// Key of the metric that decides; see [`METRICS`].
    pub metric: String,
    /// Values of some axes that form the default. A cell is compared with the cell that has these
    /// values and otherwise the same axes.
    pub baseline: Option<Axes>,
    /// Axes that are conditions in this plan and choices in others, such as the front when the
    /// question is about the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<String>,
    /// How the published experiment differs from this one, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub differs: String,
    /// Sizes of disks and loads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effort: Option<Effort>,
}

/// The amount of work per round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Effort {
    /// Number of rounds of each cell.
    pub rounds: u32,
    /// Duration of a load that has no end of its own, in seconds.
    pub seconds: f64,
    /// Size of the disk, unless an axis sets it.
    pub disk: u64,
    /// Bytes that each job of a load with an end writes; for `install`, bytes of the files.
    pub bytes: u64,
}

/// A published number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Published {
    /// The values that identify the cells that the number is about. Axes that are not named do not
    /// matter.
    pub axes: Axes,
    /// Key of the metric.
    pub metric: String,
    /// The number, in the metric's unit.
    pub value: f64,
    /// Who published it, and what was measured.
    pub source: String,
}

/// One way to store a disk under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cell {
    /// Its name in all runs of the plan: `backend=ext4/layout=qcow2/...`.
    pub key: String,
    /// The axes and values of the cell.
    pub axes: Axes,
    /// The command lines of the latest round, in order.
    pub commands: Vec<String>,
    /// Samples by round.
    pub samples: Vec<Sample>,
    /// The outcome.
    pub outcome: Outcome,
    /// Notes for the reader, such as "processor emulated (TCG)".
    pub notes: Vec<String>,
}

impl Cell {
    /// The value of an axis.
    pub fn axis(&self, name: &str) -> Option<&str> {
        value_of(&self.axes, name)
    }

    /// The samples' values of a metric, by round.
    pub fn values(&self, metric: &str) -> Vec<f64> {
        self.samples.iter().filter_map(|sample| sample.values.get(metric).copied()).collect()
    }

    /// The samples' values of a metric, each with its round number.
    pub fn rounds(&self, metric: &str) -> Vec<(u32, f64)> {
        let value = |sample: &Sample| Some((sample.round, *sample.values.get(metric)?));
        self.samples.iter().filter_map(value).collect()
    }
}

/// The outcome of a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "text")]
pub enum Outcome {
    /// Some rounds are missing: the run was interrupted or is still going on.
    #[default]
    Pending,
    /// Every round was measured.
    Measured,
    /// The cell cannot be measured here. The text says why, and how to install a missing program.
    Skipped(String),
    /// A step failed. The text says how.
    Failed(String),
}

impl Outcome {
    /// The outcome as one word, and the reason if there is one.
    pub fn state(&self) -> (&'static str, Option<&str>) {
        match self {
            Self::Pending => ("pending", None),
            Self::Measured => ("measured", None),
            Self::Skipped(reason) => ("skipped", Some(reason)),
            Self::Failed(reason) => ("failed", Some(reason)),
        }
    }
}

/// The results of one round of a cell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Sample {
    /// Round number, from 0.
    pub round: u32,
    /// Values by the metric's key, in the metric's unit.
    pub values: BTreeMap<String, f64>,
    /// Latencies of the requests.
    pub latencies: Option<Histogram>,
    /// Time series of the load.
    pub series: Vec<Series>,
    /// Whether the load was steady.
    pub steady: Option<Steady>,
    /// fio's own JSON, or the throughputs that a score is made of.
    pub raw: Option<serde_json::Value>,
    /// Start time.
    pub started: u64,
    /// Duration, including creating the image and starting servers.
    pub seconds: f64,
}

/// Latencies as a histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Histogram {
    /// Pairs of nanoseconds and number of requests, in rising order. fio's buckets are accurate to
    /// 1.6 %.
    pub buckets: Vec<(u64, u64)>,
}

impl Histogram {
    /// Number of requests.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count))
    }

    /// The time within which a fraction (0 to 1) of all requests completed, in nanoseconds. None
    /// without requests.
    pub fn quantile(&self, fraction: f64) -> Option<u64> {
        let wanted = (fraction.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0);
        let mut seen = 0u64;
        self.buckets.iter().find_map(|(ns, count)| {
            seen = seen.saturating_add(*count);
            (seen as f64 >= wanted).then_some(*ns)
        })
    }
}

/// A metric over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Series {
    /// Key of the metric.
    pub metric: String,
    /// Ends of the intervals since the start of the load.
    pub seconds: Vec<f64>,
    /// The mean of each interval, in the metric's unit.
    pub values: Vec<f64>,
}

/// Whether a load was steady, by the rule of SNIA's Solid State Storage Performance Test
/// Specification: over a window of five measurements the largest minus the smallest value is at
/// most 20 % of their mean, and the fitted line rises or falls by at most 10 % of the mean.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Steady {
    /// Whether both rules hold.
    pub reached: bool,
    /// Key of the metric that was tested.
    pub metric: String,
    /// Start of the window since the start of the load.
    pub from_seconds: f64,
    /// End of the window.
    pub to_seconds: f64,
    /// The mean in the window.
    pub mean: f64,
    /// Largest minus smallest value, as a fraction of the mean (at most 0.2).
    pub excursion: f64,
    /// Rise of the fitted line over the window, as a fraction of the mean (at most 0.1 either way).
    pub slope: f64,
}

/// Shortest measurement window of SNIA: five rounds of a minute.
pub const SNIA_SECONDS: f64 = 300.0;

impl Steady {
    /// Length of the window.
    pub fn seconds(&self) -> f64 {
        self.to_seconds - self.from_seconds
    }

    /// Whether the window is long enough for SNIA's term. A shorter load may keep its rate and
    /// still be far from a steady state.
    pub fn is_long_enough(&self) -> bool {
        self.seconds() >= SNIA_SECONDS
    }
}

/// The machine that a run was on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Environment {
    /// Name of the processor.
    pub cpu: String,
    /// Number of threads that the system may use.
    pub cores: u32,
    /// Size of memory.
    pub memory_bytes: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// The hypervisor, if this machine is a guest.
    pub virtualization: Option<String>,
    /// Where images were created: the values of the axis `backend`.
    pub places: Vec<PlaceInfo>,
    /// What else is known, for people.
    pub sections: Vec<Section>,
}

/// Names and values under a heading.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Section {
    /// The heading.
    pub title: String,
    /// Names and values, in order.
    pub entries: Vec<(String, String)>,
}

/// Kind of a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaceKind {
    /// A folder of a file system.
    #[default]
    Directory,
    /// A block device, whose content is overwritten.
    Device,
}

/// A place for images, as it was at the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlaceInfo {
    /// Value of the axis `backend`, such as `ext4` or `zvol`. Longer if two places would have the
    /// same.
    pub name: String,
    /// Folder or device.
    pub kind: PlaceKind,
    /// Path that the user gave.
    pub path: String,
    /// Type of the file system, as in `/proc/self/mountinfo`.
    pub file_system: Option<String>,
    /// Mount options.
    pub mount_options: Option<String>,
    /// The block device of the place or of its file system, such as `/dev/loop0`.
    pub device: Option<String>,
    /// The layers of the device, from top to bottom: `loop over /srv/a.img`, `LVM volume vg-root`,
    /// `zvol`.
    pub beneath: Vec<String>,
    /// Whether the device is a rotating disk.
    pub rotational: Option<bool>,
    /// The kernel's I/O scheduler of the device.
    pub scheduler: Option<String>,
    /// `write back` or `write through`.
    pub write_cache: Option<String>,
    /// Settings that affect images: block size, and for ZFS record size, compression, sync.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<(String, String)>,
    /// Size of the place.
    pub total_bytes: u64,
    /// Free space.
    pub free_bytes: u64,
}

/// A problem that affects some of the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Warning {
    /// Kind for programs: `load`, `throttled`, `pressure`, `retry`, `resume`.
    pub kind: String,
    /// Description for people.
    pub text: String,
    /// Keys of the affected cells; empty for all cells.
    pub cells: Vec<String>,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A measured cell with these values of a metric, one for each round.
    pub(crate) fn measured(values: &[(&str, &str)], metric: &str, samples: &[f64]) -> Cell {
        let axes = axes_of(values);
        let sample = |(round, value): (u32, &f64)| {
            let values = [(metric.to_owned(), *value)].into();
            Sample { round, values, ..Sample::default() }
        };
        let samples = (0u32..).zip(samples).map(sample).collect();
        let (key, outcome) = (crate::cells::key(&axes), Outcome::Measured);
        Cell { key, axes, samples, outcome, ..Cell::default() }
    }

    /// A complete run of a plan with these axes.
    pub(crate) fn run_of(
        metric: &str,
        axes: &[&str],
        baseline: Option<&[(&str, &str)]>,
        cells: Vec<Cell>,
    ) -> Run {
        let plan = PlanSummary {
            name: "test".to_owned(),
            question: "Which one?".to_owned(),
            axes: axes.iter().map(|name| (*name).to_owned()).collect(),
            metric: metric.to_owned(),
            baseline: baseline.map(axes_of),
            ..PlanSummary::default()
        };
        Run { plan, cells, ended: Some(1), ..Run::default() }
    }

    #[test]
    fn quantiles_are_of_requests() {
        let histogram = Histogram { buckets: vec![(10, 50), (20, 49), (1000, 1)] };
        let at = |fraction| histogram.quantile(fraction).unwrap();
        assert_eq!((at(0.0), at(0.5), at(0.51), at(0.99), at(1.0)), (10, 10, 20, 20, 1000));
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    #[test]
    fn a_cell_knows_its_axes_and_values() {
        let cell = measured(&[("layout", "qcow2")], "iops", &[1234.5]);
        assert_eq!((cell.axis("layout"), cell.axis("cache")), (Some("qcow2"), None));
        assert_eq!((cell.values("iops"), cell.values("reads")), (vec![1234.5], vec![]));
    }
}
