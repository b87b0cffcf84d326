//! What a run is: its cells, the samples that were taken of each, and where that was.
//!
//! ```text
//!   Run ─┬─ PlanSummary    what was asked
//!        ├─ Environment    on which machine
//!        ├─ Cell ─┬─ axes, commands, outcome
//!        │        └─ Sample (one a round) ── values, latencies, series, steady, raw
//!        ├─ Published      what others have measured
//!        └─ Warning        what speaks against the numbers
//! ```
//!
//! Everything here can be written as JSON and read back; [`crate::store`] keeps it in a file.
//! Times of day are seconds since 1970-01-01 UTC.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::metrics::{Better, METRICS, Metric, SURVIVED, metric};

/// The axes of a cell in the order of the plan: name and value, such as `layout` and `qcow2`.
pub type Axes = Vec<(String, String)>;

/// One run of a plan on one machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Run {
    /// Unlike that of any other run: when it began, the plan, and random digits.
    pub id: String,
    /// What was asked.
    pub plan: PlanSummary,
    /// What others have measured.
    pub published: Vec<Published>,
    /// Less time a cell, fewer cells: a first answer.
    pub quick: bool,
    /// The order of the cells comes from it.
    pub seed: u64,
    /// When it began.
    pub started: u64,
    /// When it was complete; nothing where it was interrupted, or goes on.
    pub ended: Option<u64>,
    /// The version of vdkit that measured.
    pub vdkit_version: String,
    /// The machine.
    pub environment: Environment,
    /// All cells in the order of the plan, also those that were not measured.
    pub cells: Vec<Cell>,
    /// What speaks against the numbers.
    pub warnings: Vec<Warning>,
}

/// What a plan asks, in short.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlanSummary {
    /// What users type.
    pub name: String,
    /// A heading.
    pub title: String,
    /// What the user learns from it.
    pub question: String,
    /// Names of the axes in their order, `backend` first.
    pub axes: Vec<String>,
    /// Key of the metric that decides; see [`METRICS`].
    pub metric: String,
    /// The default that others are held against: values of some axes. A cell is held against the
    /// one that has these values and is the same in all other axes.
    pub baseline: Option<Axes>,
    /// Axes that are no choice in this plan, though they are in others: what the load goes through
    /// where the question is about the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<String>,
    /// In what the published experiment differs from this one, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub differs: String,
    /// How large disks and loads were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effort: Option<Effort>,
}

/// How much is done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Effort {
    /// How often each cell is measured.
    pub rounds: u32,
    /// How long a load runs, where it has no end of its own.
    pub seconds: f64,
    /// Size of the disk, where no axis says so.
    pub disk: u64,
    /// Bytes that each job writes, where a load has an end; of `install`, the files.
    pub bytes: u64,
}

/// A number that others have measured and published.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Published {
    /// The cells that it speaks of: those with these values. Axes that are not named do not matter.
    pub axes: Axes,
    /// Key of the metric.
    pub metric: String,
    /// In the metric's unit.
    pub value: f64,
    /// Who has published it, and what was measured.
    pub source: String,
}

/// One way to store a disk under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cell {
    /// Its name in all runs of the plan: `backend=ext4/layout=qcow2/...`.
    pub key: String,
    /// The same in parts.
    pub axes: Axes,
    /// The exact commands as they ran last, in their order.
    pub commands: Vec<String>,
    /// By round.
    pub samples: Vec<Sample>,
    /// What has become of it.
    pub outcome: Outcome,
    /// What a reader should know, such as "processor emulated (TCG)".
    pub notes: Vec<String>,
}

impl Cell {
    /// The value of an axis.
    pub fn axis(&self, name: &str) -> Option<&str> {
        self.axes.iter().find(|(axis, _)| axis == name).map(|(_, value)| value.as_str())
    }

    /// What its samples have of a metric, by round.
    pub fn values(&self, metric: &str) -> Vec<f64> {
        self.samples.iter().filter_map(|sample| sample.values.get(metric).copied()).collect()
    }

    /// The same with the number of the round.
    pub fn rounds(&self, metric: &str) -> Vec<(u32, f64)> {
        let value = |sample: &Sample| Some((sample.round, *sample.values.get(metric)?));
        self.samples.iter().filter_map(value).collect()
    }
}

/// What has become of a cell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "text")]
pub enum Outcome {
    /// Not all of its rounds are there: the run was interrupted, or goes on.
    #[default]
    Pending,
    /// All rounds are there.
    Measured,
    /// It cannot be measured here, and why; where a program is missing: how to install it.
    Skipped(String),
    /// Something failed, and how.
    Failed(String),
}

/// What one round of a cell gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Sample {
    /// From 0.
    pub round: u32,
    /// By key of the metric, in its unit.
    pub values: BTreeMap<String, f64>,
    /// How long each request took.
    pub latencies: Option<Histogram>,
    /// How the load went in time.
    pub series: Vec<Series>,
    /// Whether it was steady.
    pub steady: Option<Steady>,
    /// fio's own JSON.
    pub raw: Option<serde_json::Value>,
    /// When it began.
    pub started: u64,
    /// How long it took, with making the image and starting servers.
    pub seconds: f64,
}

/// Requests by how long they took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Histogram {
    /// Nanoseconds (about; fio's buckets are within 1.6 %) and how many requests, rising.
    pub buckets: Vec<(u64, u64)>,
}

impl Histogram {
    /// How many requests.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// The time that a fraction of all requests (from 0 to 1) took at most, in nanoseconds. Nothing
    /// of none.
    pub fn quantile(&self, fraction: f64) -> Option<u64> {
        let wanted = (fraction.clamp(0.0, 1.0) * self.count() as f64).ceil().max(1.0);
        let mut seen = 0;
        self.buckets.iter().find_map(|(ns, count)| {
            seen += count;
            (seen as f64 >= wanted).then_some(*ns)
        })
    }

    /// Adds the requests of another.
    pub fn merge(&mut self, other: &Self) {
        let mut all: BTreeMap<u64, u64> = self.buckets.iter().copied().collect();
        for (ns, count) in &other.buckets {
            *all.entry(*ns).or_default() += count;
        }
        self.buckets = all.into_iter().collect();
    }
}

/// A metric in time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Series {
    /// Its key.
    pub metric: String,
    /// Ends of the intervals, since the load began.
    pub seconds: Vec<f64>,
    /// The mean in each, in the metric's unit; as many.
    pub values: Vec<f64>,
}

/// Whether a load was steady, by the rule of SNIA's Solid State Storage Performance Test
/// Specification: over a window of five measurements no value is farther than 10 % of their mean
/// from it, and the line through them rises or falls by no more than 10 % of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Steady {
    /// Both rules hold.
    pub reached: bool,
    /// Key of the metric that was looked at.
    pub metric: String,
    /// Begin of the window, since the load began.
    pub from_seconds: f64,
    /// Its end.
    pub to_seconds: f64,
    /// The mean in the window.
    pub mean: f64,
    /// Largest value less the smallest one, as a fraction of the mean (at most 0.2).
    pub excursion: f64,
    /// Rise of the line over the window, as a fraction of the mean (at most 0.1 either way).
    pub slope: f64,
}

/// How long SNIA's measurement window is at least: five rounds of a minute.
pub const SNIA_SECONDS: f64 = 300.0;

impl Steady {
    /// How long the window is.
    pub fn seconds(&self) -> f64 {
        self.to_seconds - self.from_seconds
    }

    /// Whether that is a window that SNIA's words may be used of. A shorter load may keep its rate
    /// and be far from a steady state.
    pub fn is_long_enough(&self) -> bool {
        self.seconds() >= SNIA_SECONDS
    }
}

/// The machine that a run was on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Environment {
    /// The processor's name.
    pub cpu: String,
    /// Threads that the system may use.
    pub cores: u32,
    /// All memory.
    pub memory_bytes: u64,
    /// Name and release.
    pub kernel: String,
    /// What this machine is a guest of, where it is one.
    pub virtualization: Option<String>,
    /// Where images were: the values of the axis `backend`.
    pub places: Vec<PlaceInfo>,
    /// All that is known, for people.
    pub sections: Vec<Section>,
}

/// Names and values under a heading.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Section {
    /// The heading.
    pub title: String,
    /// In order.
    pub entries: Vec<(String, String)>,
}

/// What kind of thing images are put on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaceKind {
    /// A folder of a file system.
    #[default]
    Directory,
    /// A block device, whose content is lost.
    Device,
}

/// A place that images were put on, as it was at the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlaceInfo {
    /// Value of the axis `backend`: `ext4`, or `zvol`, and more where two would be the same.
    pub name: String,
    /// Folder or device.
    pub kind: PlaceKind,
    /// As the user gave it.
    pub path: String,
    /// Its file system, as `/proc/self/mountinfo` has it.
    pub file_system: Option<String>,
    /// What it was mounted with.
    pub mount_options: Option<String>,
    /// The block device (beneath the file system), such as `/dev/loop0`.
    pub device: Option<String>,
    /// What the device is, from top to bottom: `loop over /srv/a.img`, `LVM volume vg-root`, `zvol`.
    pub beneath: Vec<String>,
    /// Whether the device turns.
    pub rotational: Option<bool>,
    /// The kernel's scheduler of its requests.
    pub scheduler: Option<String>,
    /// `write back` or `write through`.
    pub write_cache: Option<String>,
    /// Settings that matter to images: block size, and of ZFS record size, compression, sync.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub properties: Vec<(String, String)>,
    /// All space.
    pub total_bytes: u64,
    /// Free space.
    pub free_bytes: u64,
}

/// Something that speaks against some of the numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Warning {
    /// A word for programs: `load`, `throttled`, `pressure`, `space`, `unsteady`, `outlier`.
    pub kind: String,
    /// For people.
    pub text: String,
    /// Keys of the cells that it is about; all where there is none.
    pub cells: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> String {
        s.to_owned()
    }

    fn run() -> Run {
        let axes = vec![(text("backend"), text("ext4")), (text("layout"), text("qcow2"))];
        let sample = Sample {
            round: 1,
            values: [(text("iops"), 1234.5)].into(),
            latencies: Some(Histogram { buckets: vec![(100, 3), (200, 1)] }),
            series: vec![Series {
                metric: text("iops"),
                seconds: vec![0.5, 1.0],
                values: vec![1.0, 2.0],
            }],
            steady: Some(Steady { reached: true, metric: text("iops"), ..Steady::default() }),
            raw: Some(serde_json::json!({"fio version": "fio-3.33"})),
            started: 1_700_000_000,
            seconds: 2.25,
        };
        let outcomes = [
            Outcome::Measured,
            Outcome::Pending,
            Outcome::Skipped(text("no fio")),
            Outcome::Failed(text("exit code 1")),
        ];
        let cells = outcomes.map(|outcome| Cell {
            key: text("backend=ext4/layout=qcow2"),
            axes: axes.clone(),
            commands: vec![text("fio --name=load")],
            samples: vec![sample.clone()],
            outcome,
            notes: vec![text("a note")],
        });
        Run {
            id: text("x"),
            plan: PlanSummary { baseline: Some(axes.clone()), ..PlanSummary::default() },
            published: vec![Published {
                axes,
                metric: text("iops"),
                value: 5.5,
                source: text("s"),
            }],
            ended: Some(3),
            environment: Environment {
                places: vec![PlaceInfo { rotational: Some(false), ..PlaceInfo::default() }],
                sections: vec![Section {
                    title: text("Machine"),
                    entries: vec![(text("a"), text("b"))],
                }],
                ..Environment::default()
            },
            cells: cells.into(),
            warnings: vec![Warning {
                kind: text("load"),
                text: text("busy"),
                cells: vec![text("k")],
            }],
            ..Run::default()
        }
    }

    #[test]
    fn a_run_comes_back_from_json_as_it_was() {
        let run = run();
        let json = serde_json::to_string(&run).unwrap();
        assert_eq!(serde_json::from_str::<Run>(&json).unwrap(), run);
        assert!(json.contains(r#""outcome":{"state":"skipped","text":"no fio"}"#), "{json}");
        assert!(json.contains(r#""outcome":{"state":"pending"}"#), "{json}");
    }

    #[test]
    fn quantiles_are_of_requests() {
        let histogram = Histogram { buckets: vec![(10, 50), (20, 49), (1000, 1)] };
        let at = |fraction| histogram.quantile(fraction).unwrap();
        assert_eq!((at(0.0), at(0.5), at(0.51), at(0.99), at(1.0)), (10, 10, 20, 20, 1000));
        assert_eq!(Histogram::default().quantile(0.5), None);
    }

    #[test]
    fn merged_histograms_hold_the_requests_of_both() {
        let mut one = Histogram { buckets: vec![(10, 1), (30, 2)] };
        one.merge(&Histogram { buckets: vec![(20, 5), (30, 3)] });
        assert_eq!(one.buckets, [(10, 1), (20, 5), (30, 5)]);
    }

    #[test]
    fn a_cell_knows_its_axes_and_values() {
        let cell = &run().cells[0];
        assert_eq!((cell.axis("layout"), cell.axis("cache")), (Some("qcow2"), None));
        assert_eq!((cell.values("iops"), cell.values("reads")), (vec![1234.5], vec![]));
    }
}
