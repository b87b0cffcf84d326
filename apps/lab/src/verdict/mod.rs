//! Draws a conclusion from a run: what to use, how much that gains, and how certain it is.
//!
//! ```text
//!   Run ─► matrix ─► picks, best first ─► set aside what is not safe, or failed in a later round
//!                                      ─► the default, if nothing is certainly better
//!                                      ─► gain, confidence, ties, answers, setup
//! ```
//!
//! Choices are compared over all loads together, by the geometric mean of their values, round by
//! round. So each load counts by its ratios and not by the size of its numbers. The default is
//! advised unless another way is significantly better, because changing it would gain nothing. A way
//! that loses data in a power failure (`unsafe`, memory) is never advised, however fast it is.
//!
//! The advice is only as strong as its evidence. Fewer than three rounds give no advice. If a part
//! of the plan was not measured, the verdict says so first and gives no advice that depends on it.
//! All comparisons of a verdict share one error probability: [`crate::stats::Comparator`].

mod answers;
mod asked;
mod confidence;
mod missing;
mod output;
mod prepared;
mod published;
mod scores;
mod sentence;
mod setup;

use std::cmp::Reverse;

use output::{all_names, names, optional_names, optional_setup};
use serde::Serialize;

use crate::axes::BACKEND;
use crate::front;
use crate::lists::distinct;
use crate::matrix::{Matrix, OWN_TOOL, Pick, Role, in_guest, program};
use crate::model::{Axes, Cell, Outcome, Run, value_of};
use crate::stats::{Decision, Gain, ROUNDS_MIN};
use crate::words;

pub use answers::{Answer, PeerRow};
pub use confidence::{Confidence, Level, steadiness};
pub use missing::Missing;
pub(crate) use missing::blocking;
pub(crate) use output::{SURVIVED_TOO, interval};
pub(crate) use published::{all_measured_for, measured_for, others_for};
pub use scores::{Ranking, TOP, rankings};
pub use setup::Setup;

/// A way that was better and is not advised.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SetAside {
    /// Its axes.
    #[serde(rename = "way", serialize_with = "names")]
    pub axes: Axes,
    /// Comparison with the advised way, if possible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gain: Option<Gain>,
    /// Why it is not advised.
    pub reason: String,
}

/// A load under which another way is better than the advised one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Exception {
    /// The load.
    #[serde(serialize_with = "names")]
    pub load: Axes,
    /// The best way under the load.
    #[serde(rename = "best", serialize_with = "names")]
    pub axes: Axes,
    /// Comparison with the advised way under this load.
    pub gain: Gain,
}

/// What the evidence supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Advice {
    /// A way is certainly better than the default, or than some other way if there is no default;
    /// for survival, a way survived and the default did not.
    Use,
    /// No way is certainly better than the default; for survival, the default survived.
    Stay,
    /// Undecided: there are too few rounds, or the ways differ too little.
    Untold,
    /// Nothing was measured, or a necessary part of the plan was not.
    #[default]
    None,
}

/// The conclusion from a run. Programs get it as JSON, in the order of the fields.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Verdict {
    /// Parts of the plan that were not measured.
    #[serde(rename = "not-measured")]
    pub missing: Vec<Missing>,
    /// The kind of advice.
    pub advice: Advice,
    /// The advice in one sentence.
    pub sentence: String,
    /// The choices of the advised way; none without advice.
    #[serde(serialize_with = "optional_names", skip_serializing_if = "Option::is_none")]
    pub best: Option<Axes>,
    /// The best safe way, certain or not.
    #[serde(serialize_with = "optional_names", skip_serializing_if = "Option::is_none")]
    pub leading: Option<Axes>,
    /// Indices of the advised way's cells.
    #[serde(skip)]
    pub cells: Vec<usize>,
    /// The default that the way is compared with.
    #[serde(serialize_with = "optional_names", skip_serializing_if = "Option::is_none")]
    pub baseline: Option<Axes>,
    /// Comparison of the advised or leading way with the default; none if it is the default, or if
    /// there is no default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gain: Option<Gain>,
    /// If the default stays: the largest factor by which another way may be better within the
    /// noise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden: Option<f64>,
    /// The confidence of the verdict.
    pub confidence: Confidence,
    /// Ways that are indistinguishable from the advised one; for survival, the other survivors.
    #[serde(serialize_with = "all_names")]
    pub ties: Vec<Axes>,
    /// Number of ways that were compared.
    #[serde(skip)]
    pub compared: usize,
    /// Whether the verdict is about survival, which has no ratio and no noise.
    #[serde(skip)]
    pub survival: bool,
    /// Loads under which another way is better.
    pub exceptions: Vec<Exception>,
    /// Ways that were better, and are not safe or failed in a later round.
    pub set_aside: Vec<SetAside>,
    /// Ways that were not measured under all loads and were therefore not compared.
    #[serde(serialize_with = "all_names")]
    pub left_out: Vec<Axes>,
    /// Answers to the plan's question and to those that follow from its axes.
    pub answers: Vec<Answer>,
    /// The tools side by side.
    #[serde(skip)]
    pub peers: Vec<PeerRow>,
    /// What the reader must know before relying on the verdict.
    pub cautions: Vec<String>,
    /// How to set up the advised way.
    #[serde(flatten, serialize_with = "optional_setup")]
    pub setup: Option<Setup>,
}

/// What the cache mode `unsafe` loses.
pub(crate) const UNSAFE: &str =
    "cache=unsafe ignores the guest's flushes, so a power failure may damage the guest's files";

/// Why a way is not advised, wherever the image is.
fn is_unfit(axes: &Axes) -> Option<&'static str> {
    if value_of(axes, "cache") == Some("unsafe") {
        return Some(UNSAFE);
    }
    match value_of(axes, "layout")? {
        "qcow2-aged" | "qcow2-fragmented" => {
            Some("images get into this state with use; nobody would choose it")
        }
        "vmdk" => {
            Some("QEMU supports VMDK to exchange disks with other programs, not to run guests")
        }
        _ => None,
    }
}

/// How a way failed after it had been measured, if it did: its numbers are of the rounds in which it
/// worked.
fn failure(matrix: &Matrix<'_>, pick: &Pick) -> Option<String> {
    let failed = |(i, cell): (usize, &Cell)| {
        let Outcome::Failed(why) = &cell.outcome else { return None };
        let own = pick.cells.contains(&i)
            || (matrix.part(&cell.axes, Role::Choice) == pick.axes && matrix.advises(cell));
        let (rounds, why) = (cell.samples.len(), why.lines().next().unwrap_or_default());
        (own && rounds > 0)
            .then(|| format!("it failed after {} ({why})", words::plural(rounds, "round")))
    };
    matrix.run.cells.iter().enumerate().find_map(failed)
}

/// The ways that may be advised, which are none that failed. If no other way is safe (as in a run on
/// tmpfs alone), returns all of them and the reason, for a caution.
fn eligible(matrix: &Matrix<'_>, picks: &[Pick]) -> (Vec<Pick>, Option<&'static str>) {
    let run = matrix.run;
    let picks: Vec<&Pick> = picks.iter().filter(|pick| failure(matrix, pick).is_none()).collect();
    let of = |fits: &dyn Fn(&Pick) -> bool| -> Vec<Pick> {
        picks.iter().filter(|pick| fits(pick)).map(|pick| (*pick).clone()).collect()
    };
    let safe = of(&|pick| not_safe(run, &pick.axes).is_none());
    if !safe.is_empty() {
        return (safe, None);
    }
    let fit = of(&|pick| is_unfit(&pick.axes).is_none());
    let rest = if fit.is_empty() { of(&|_| true) } else { fit };
    let reason = rest.first().and_then(|pick| not_safe(run, &pick.axes));
    (rest, reason)
}

/// Why a way is not safe.
fn not_safe(run: &Run, axes: &Axes) -> Option<&'static str> {
    if let Some(reason) = is_unfit(axes) {
        return Some(reason);
    }
    let name = value_of(axes, BACKEND);
    let place = run.environment.places.iter().find(|place| Some(place.name.as_str()) == name);
    let kind = place.map_or(name, |place| place.file_system.as_deref());
    if kind.is_some_and(|kind| kind == "tmpfs" || kind == "ramfs") {
        return Some("a disk in memory is lost in a power failure");
    }
    None
}

/// Draws the conclusion from a run.
pub fn verdict(run: &Run) -> Verdict {
    let matrix = Matrix::new(run);
    let missing = missing::missing(run, matrix.as_ref());
    let nothing = |sentence: &str| Verdict {
        missing: missing.clone(),
        sentence: sentence.to_owned(),
        cautions: cautions(run),
        ..Verdict::default()
    };
    let Some(matrix) = matrix else {
        return nothing("This version does not know the plan's metric, so nothing is advised.");
    };
    let picks = matrix.picks();
    let (eligible, unsafe_because) = eligible(&matrix, &picks);
    if eligible.is_empty() {
        let mut verdict = nothing(match picks.is_empty() {
            true => "No configuration was measured under all loads, so nothing is advised.",
            false => "Every configuration failed under some load, so nothing is advised.",
        });
        verdict.answers = answers::answers(&matrix, &[], None);
        return verdict;
    }
    let found = Found::of(&matrix, &eligible, missing.iter().any(|missing| missing.blocks));
    let found = Found { set_aside: picks.len() - eligible.len(), ..found };
    let (best, choices) = (found.way, found.choices(&matrix));
    let covered = |pick: &&Pick| choices.iter().all(|entry| pick.axes.contains(entry));
    let mut cautions = cautions(run);
    if let Some(reason) = unsafe_because {
        let only =
            "This is only the best of what was measured, none of which is advised in general";
        cautions.insert(0, format!("{only}: {reason}."));
    }
    let stays = found.advice == Advice::Stay;
    let advised = stays || found.advice == Advice::Use;
    let told = |wanted: bool, axes: &Axes| wanted.then(|| matrix.short(axes));
    // The commands are vdkit's, and another program's server may have been measured.
    let has_setup = advised && program(&best.axes).1.is_none_or(|name| name == OWN_TOOL);
    let sentence = sentence::sentence(&matrix, &found, &missing);
    let mut answers =
        vec![Answer { question: run.plan.question.clone(), sentence: sentence.clone() }];
    answers.extend(answers::answers(&matrix, &eligible, advised.then_some(best)));
    Verdict {
        advice: found.advice,
        sentence,
        best: told(advised, &choices),
        leading: told(true, if found.survival { &choices } else { &eligible[0].axes }),
        cells: match advised {
            true => eligible.iter().filter(covered).flat_map(|pick| pick.cells.clone()).collect(),
            false => Vec::new(),
        },
        baseline: found.other().map(|base| matrix.short(&base.axes)),
        gain: found.gain,
        hidden: sentence::most_hidden(&matrix, &found).map(|(most, _)| most).filter(|_| stays),
        confidence: Confidence::of(&matrix, best, found.other(), !cautions.is_empty()),
        ties: match advised {
            true => ties(&matrix, best, eligible.iter().filter(|pick| !covered(pick))),
            false => Vec::new(),
        },
        compared: eligible.len(),
        survival: found.survival,
        set_aside: set_aside(&matrix, best, &picks),
        exceptions: if advised { exceptions(&matrix, best) } else { Vec::new() },
        left_out: left_out(&matrix, &picks),
        answers,
        peers: answers::peers(&matrix),
        setup: has_setup.then(|| setup::setup(run, &best.axes)),
        missing,
        cautions,
    }
}

/// Whether more rounds would not change a run's verdict. The runner asks after each round: see
/// [`crate::run`].
pub fn is_settled(run: &Run) -> bool {
    let Some(matrix) = Matrix::new(run).filter(|matrix| !matrix.is_survival()) else {
        return true;
    };
    let picks = matrix.picks();
    let (eligible, _) = eligible(&matrix, &picks);
    let Some(first) = eligible.first() else { return true };
    let best = Found::of(&matrix, &eligible, false).way;
    let open = |pick: &&Pick, other: &Pick| {
        pick.axes != other.axes
            && matrix.against(pick, other).is_some_and(|gain| !gain.is_settled())
    };
    !eligible.iter().any(|pick| open(&pick, best) || open(&pick, first))
}

/// The result of comparing the ways that may be advised.
pub(crate) struct Found<'p> {
    pub(crate) advice: Advice,
    /// The advised or leading way.
    pub(crate) way: &'p Pick,
    /// The default, if it was measured.
    pub(crate) base: Option<&'p Pick>,
    /// Comparison of the way with the default, if they differ.
    pub(crate) gain: Option<Gain>,
    /// All ways, best first.
    pub(crate) picks: &'p [Pick],
    /// Whether the ways are compared by survival.
    pub(crate) survival: bool,
    /// Number of other ways that were measured, but may not be advised.
    pub(crate) set_aside: usize,
}

impl<'p> Found<'p> {
    /// Compares `picks`, which are not empty and are sorted best first. `blocked` says that something
    /// is missing without which there is no advice.
    fn of(matrix: &Matrix<'_>, picks: &'p [Pick], blocked: bool) -> Self {
        if matrix.is_survival() {
            return Self::survivor(matrix, picks, blocked);
        }
        let first = &picks[0];
        let base = matrix.base(first, picks);
        let rounds = picks.iter().map(|pick| pick.summary.count).min().unwrap_or(0);
        let enough = rounds >= ROUNDS_MIN;
        let surely = |pick: &&Pick, other: &Pick| {
            matrix.against(pick, other).is_some_and(|gain| gain.decision == Decision::Better)
        };
        let better = base.and_then(|base| picks.iter().find(|pick| surely(pick, base)));
        let (way, advice) = match (better, base) {
            _ if blocked => (first, Advice::None),
            _ if !enough => (first, Advice::Untold),
            // A single way needs no decision.
            _ if picks.len() == 1 => (first, Advice::Stay),
            (Some(better), _) => (better, Advice::Use),
            (None, Some(base)) if base_leads(matrix, first, base) => {
                (best_default(matrix, picks, base), Advice::Stay)
            }
            (None, Some(_)) => (first, Advice::Untold),
            (None, None) if picks.iter().any(|other| surely(&first, other)) => (first, Advice::Use),
            (None, None) => (first, Advice::Untold),
        };
        let base = if advice == Advice::Stay { Some(way) } else { base };
        let gain = base.filter(|base| base.axes != way.axes);
        let gain = gain.and_then(|base| matrix.against(way, base));
        Self { advice, way, base, gain, picks, survival: false, set_aside: 0 }
    }

    /// Chooses among survivors, which are equals: the default stays if it survived. Otherwise the
    /// way has no server besides QEMU if possible, and as many of the default's values as possible.
    fn survivor(matrix: &Matrix<'_>, picks: &'p [Pick], blocked: bool) -> Self {
        let through = |pick: &&Pick| survived(matrix, pick);
        let order = |pick: &&Pick| (needs_server(&pick.axes), Reverse(matrix.defaults(&pick.axes)));
        let found = picks.iter().filter(through).min_by_key(order);
        let way = found.unwrap_or(&picks[0]);
        let base = matrix.base(way, picks);
        let (way, advice) = match (found, base.filter(through)) {
            _ if blocked => (way, Advice::None),
            (None, _) => (way, Advice::Untold),
            (_, Some(base)) => (base, Advice::Stay),
            _ if picks.len() == 1 => (way, Advice::Stay),
            _ => (way, Advice::Use),
        };
        Self { advice, way, base, gain: None, picks, survival: true, set_aside: 0 }
    }

    /// The choices that are advised. Of survivors, these are the values that all ways have which
    /// survived in the same manner, if no other way has them: the other values make no difference.
    fn choices(&self, matrix: &Matrix<'_>) -> Axes {
        let way = self.way;
        if !self.survival || self.advice != Advice::Use {
            return way.axes.clone();
        }
        let server = needs_server(&way.axes);
        let equal = |pick: &&Pick| survived(matrix, pick) && needs_server(&pick.axes) == server;
        let shared = |entry: &&(String, String)| {
            self.picks.iter().filter(equal).all(|pick| pick.axes.contains(entry))
        };
        let common: Axes = way.axes.iter().filter(shared).cloned().collect();
        let has = |pick: &&Pick| common.iter().all(|entry| pick.axes.contains(entry));
        let chosen = common.iter().any(|(axis, _)| matrix.varying.contains(&axis.as_str()));
        let alone = self.picks.iter().filter(has).all(|pick| equal(&pick));
        if chosen && alone { common } else { way.axes.clone() }
    }

    /// The default, if it is another way.
    pub(crate) fn other(&self) -> Option<&'p Pick> {
        self.base.filter(|base| base.axes != self.way.axes)
    }
}

/// The best of the ways that have all of the plan's baseline values: one for each value of the other
/// choices. `base` if something is certainly better than that one.
fn best_default<'p>(matrix: &Matrix<'_>, picks: &'p [Pick], base: &'p Pick) -> &'p Pick {
    let is_default =
        |pick: &&Pick| matrix.base(pick, picks).is_some_and(|own| own.axes == pick.axes);
    let best = picks.iter().find(is_default).unwrap_or(base);
    let better = |pick: &Pick| {
        matrix.against(pick, best).is_some_and(|gain| gain.decision == Decision::Better)
    };
    if picks.iter().any(better) { base } else { best }
}

/// Whether the default stays: no way is certainly better, and no value is 0.
fn base_leads(matrix: &Matrix<'_>, first: &Pick, base: &Pick) -> bool {
    first.axes == base.axes || matrix.against(first, base).is_some()
}

/// Whether a way survived in every round, under all conditions.
pub(crate) fn survived(matrix: &Matrix<'_>, pick: &Pick) -> bool {
    pick.cells.iter().all(|i| asked::survived(&matrix.run.cells[*i]) == Some(true))
}

/// Whether a program besides QEMU serves the disk.
pub(crate) fn needs_server(axes: &Axes) -> bool {
    let front = value_of(axes, "front");
    front.is_some_and(|name| front::find(name).is_none_or(|front| front.daemons() > 0))
}

fn ties<'p>(matrix: &Matrix<'_>, best: &Pick, others: impl Iterator<Item = &'p Pick>) -> Vec<Axes> {
    let tied = others.filter(|pick| match matrix.against(pick, best) {
        Some(gain) => gain.decision == Decision::Tie,
        None if matrix.is_survival() => survived(matrix, pick),
        None => pick.summary.median == best.summary.median,
    });
    tied.map(|pick| matrix.short(&pick.axes)).collect()
}

fn set_aside(matrix: &Matrix<'_>, best: &Pick, picks: &[Pick]) -> Vec<SetAside> {
    let others = picks.iter().filter(|pick| pick.axes != best.axes);
    others
        .filter_map(|pick| {
            let unsafe_because = not_safe(matrix.run, &pick.axes).map(str::to_owned);
            let reason = unsafe_because.or_else(|| failure(matrix, pick))?;
            let gain = matrix.against(pick, best);
            let faster = match gain {
                Some(gain) => gain.decision == Decision::Better,
                // Survival has no ratio, only an order.
                None => matrix.metric.best_first(pick.summary.median, best.summary.median).is_lt(),
            };
            faster.then(|| SetAside { axes: matrix.short(&pick.axes), gain, reason })
        })
        .collect()
}

/// Loads under which the best way overall is not the best.
fn exceptions(matrix: &Matrix<'_>, best: &Pick) -> Vec<Exception> {
    let loads = distinct(best.cells.iter().map(|i| matrix.load(&matrix.run.cells[*i])));
    if loads.len() < 2 {
        return Vec::new();
    }
    let under = |load: Axes| {
        let all = matrix.picks_where(|cell| matrix.load(cell) == load);
        let (picks, _) = eligible(matrix, &all);
        let first = picks.first()?;
        let own = picks.iter().find(|pick| pick.axes == best.axes)?;
        let gain = matrix.against(first, own)?;
        let better = gain.decision == Decision::Better;
        better.then(|| Exception { load, axes: matrix.short(&first.axes), gain })
    };
    loads.into_iter().filter_map(under).collect()
}

/// Ways that have results and are not among the picks.
fn left_out(matrix: &Matrix<'_>, picks: &[Pick]) -> Vec<Axes> {
    let cells = matrix.run.cells.iter().filter(|cell| matrix.counts(cell));
    let measured = cells.filter(|cell| matrix.summary(cell).is_some());
    let ways = measured.map(|cell| matrix.part(&cell.axes, Role::Choice));
    let others = ways.filter(|way| picks.iter().all(|pick| pick.axes != *way));
    // Guests are compared with guests, so other ways are no gap.
    let same = |way: &Axes| picks.iter().any(|pick| in_guest(&pick.axes) == in_guest(way));
    let gaps = others.filter(|way| !matrix.apart || same(way));
    distinct(gaps.map(|way| matrix.short(&way)))
}

/// The note of cells whose guest ran without KVM.
const EMULATED: &str = "emulated (TCG)";

/// Problems of the run as a whole.
fn cautions(run: &Run) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    if run.ended.is_none() {
        said.push("The run is not complete: it was interrupted, or is still running.".to_owned());
    }
    if run.quick {
        said.push(
            "This was a quick run: small disks and short loads, which caches may have served in part."
                .to_owned(),
        );
    }
    if let Some(host) = &run.environment.virtualization {
        said.push(format!(
            "This machine is itself a virtual machine ({host}): other guests of its host, and the \
             host's caches, may have affected the numbers."
        ));
    }
    if run.cells.iter().flat_map(|cell| &cell.notes).any(|note| note.contains(EMULATED)) {
        said.push(
            "Guests ran on an emulated processor (TCG), because none booted with KVM: compare them \
             only with each other."
                .to_owned(),
        );
    }
    said.extend(run.warnings.iter().map(|warning| words::sentence(&warning.text)));
    said
}

#[cfg(test)]
mod calibration;
#[cfg(test)]
mod tests;
