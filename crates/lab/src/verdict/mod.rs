//! What a run comes to: what to use here, how much that gains, and how sure it is.
//!
//! ```text
//!   Run ─► matrix ─► picks, the best first ─► set aside what is not safe
//!                                          ─► the default, where nothing is surely better
//!                                          ─► gain, confidence, ties, answers, set-up
//! ```
//!
//! A choice is judged over all loads together: by the geometric mean of its values, round by round, so that
//! a load counts by ratios and not by how large its numbers are. What cannot be told apart is called a
//! tie, and of those that tie the default is advised, since changing it would gain nothing. What
//! loses data in a power cut (`unsafe`, memory) is never advised, however fast it is.
//!
//! Comparisons are made one by one, and not corrected for how many there are: of a hundred pairs of
//! equals a few will look different.

mod answers;
mod asked;
mod confidence;
mod published;
mod setup;
mod told;

use crate::matrix::{Matrix, Pick, Role, in_guest};
use crate::model::{Axes, Run, SURVIVED};
use crate::stats::{Decision, Gain};
use crate::words::{self, label, span, times};

pub(crate) use answers::heading;
pub use answers::{Answer, PeerRow};
pub use confidence::{Confidence, Level, steadiness};
pub(crate) use published::{all_measured_for, measured_for, others_for};
pub use setup::Setup;
pub use told::Told;

/// A way that was faster and is not advised.
#[derive(Clone, Debug, PartialEq)]
pub struct SetAside {
    /// Its axes.
    pub axes: Axes,
    /// Against what is advised, where that can be said.
    pub gain: Option<Gain>,
    /// Why not.
    pub reason: &'static str,
}

/// A load under which another way is better than what is advised.
#[derive(Clone, Debug, PartialEq)]
pub struct Exception {
    /// The load.
    pub load: Axes,
    /// The best way under it.
    pub axes: Axes,
    /// Against what is advised, under this load.
    pub gain: Gain,
}

/// What a run comes to.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// What to use, in one sentence.
    pub sentence: String,
    /// The axes of what is advised that were a choice at all; none where nothing was measured.
    pub best: Option<Axes>,
    /// Cells of what is advised, as indices.
    pub cells: Vec<usize>,
    /// The default that it is held against.
    pub baseline: Option<Axes>,
    /// Against the default; none where the default is advised, or there is none.
    pub gain: Option<Gain>,
    /// How sure all this is.
    pub confidence: Confidence,
    /// Ways that cannot be told from what is advised.
    pub ties: Vec<Axes>,
    /// Ways that were faster and are not safe.
    pub set_aside: Vec<SetAside>,
    /// Loads under which another way is better.
    pub exceptions: Vec<Exception>,
    /// Ways that were not measured under all loads, so that they had no part in this.
    pub left_out: Vec<Axes>,
    /// The plan's question and those that follow from its axes, each with a sentence.
    pub answers: Vec<Answer>,
    /// The tools side by side.
    pub peers: Vec<PeerRow>,
    /// How to have it.
    pub setup: Option<Setup>,
    /// What the reader must know before believing this.
    pub cautions: Vec<String>,
}

/// Why a way is not advised, wherever the image lies.
fn is_unfit(axes: &Axes) -> Option<&'static str> {
    let has = |name: &str, wanted: &str| axes.iter().any(|(axis, v)| axis == name && v == wanted);
    if has("cache", "unsafe") {
        return Some(
            "they ignore the guest's flushes, so a power cut may damage the guest's files",
        );
    }
    if has("layout", "qcow2-aged") || has("layout", "qcow2-fragmented") {
        return Some("they are what images become with use, and nothing to choose");
    }
    has("layout", "vmdk")
        .then_some("QEMU has them to exchange disks with others, and not to run guests on")
}

/// Of all ways those that may be advised. Where nothing is safe (a run on tmpfs alone) that is what
/// there is, and the reason for a caution.
fn eligible(run: &Run, picks: &[Pick]) -> (Vec<Pick>, Option<&'static str>) {
    let of = |fits: &dyn Fn(&Pick) -> bool| -> Vec<Pick> {
        picks.iter().filter(|pick| fits(pick)).cloned().collect()
    };
    let safe = of(&|pick| not_safe(run, &pick.axes).is_none());
    if !safe.is_empty() {
        return (safe, None);
    }
    let fit = of(&|pick| is_unfit(&pick.axes).is_none());
    let rest = if fit.is_empty() { picks.to_vec() } else { fit };
    let reason = rest.first().and_then(|pick| not_safe(run, &pick.axes));
    (rest, reason)
}

/// Why a way is not advised.
fn not_safe(run: &Run, axes: &Axes) -> Option<&'static str> {
    let value = |name: &str| axes.iter().find(|(axis, _)| axis == name).map(|(_, v)| v.as_str());
    if let Some(reason) = is_unfit(axes) {
        return Some(reason);
    }
    let place =
        value("backend").and_then(|name| run.environment.places.iter().find(|p| p.name == name));
    let kind = place.and_then(|place| place.file_system.as_deref());
    let memory = |kind: &str| kind == "tmpfs" || kind == "ramfs";
    if kind.is_some_and(memory) || (place.is_none() && value("backend").is_some_and(memory)) {
        return Some("they are in memory, so the disk is gone with the power");
    }
    None
}

/// Judges a run.
pub fn verdict(run: &Run) -> Verdict {
    let nothing = |sentence: &str| Verdict {
        sentence: sentence.to_owned(),
        best: None,
        cells: Vec::new(),
        baseline: None,
        gain: None,
        confidence: Confidence::none(),
        ties: Vec::new(),
        set_aside: Vec::new(),
        exceptions: Vec::new(),
        left_out: Vec::new(),
        answers: Vec::new(),
        peers: Vec::new(),
        setup: None,
        cautions: cautions(run),
    };
    let Some(matrix) = Matrix::new(run) else {
        return nothing("The plan's metric is not known to this version, so nothing is advised.");
    };
    let picks = matrix.picks();
    let (eligible, unsafe_because) = eligible(run, &picks);
    let eligible = eligible.as_slice();
    let Some(first) = eligible.first() else {
        let mut verdict = nothing("Nothing was measured under all loads, so nothing is advised.");
        verdict.answers = answers::answers(&matrix, &[], None);
        return verdict;
    };
    let best = advised(&matrix, first, eligible);
    let base = matrix.base(best, eligible).filter(|base| base.axes != best.axes);
    let gain = base.and_then(|base| matrix.against(best, base));
    let ties = ties(&matrix, best, eligible);
    let set_aside = set_aside(&matrix, best, &picks);
    let mut cautions = cautions(run);
    if let Some(reason) = unsafe_because {
        cautions.insert(0, format!("Nothing measured here is one to advise: {reason}."));
    }
    let confidence = Confidence::of(&matrix, best, base, !cautions.is_empty());
    let is_default = matrix.base(best, eligible).is_some_and(|base| base.axes == best.axes);
    let sentence = sentence(&matrix, best, base, gain, is_default, eligible);
    let mut answers =
        vec![Answer { question: run.plan.question.clone(), sentence: sentence.clone() }];
    answers.extend(answers::answers(&matrix, eligible, Some(best)));
    Verdict {
        sentence,
        best: Some(matrix.short(&best.axes)),
        cells: best.cells.clone(),
        baseline: base.map(|base| matrix.short(&base.axes)),
        gain,
        confidence,
        ties,
        set_aside,
        exceptions: exceptions(&matrix, best),
        left_out: left_out(&matrix, &picks),
        answers,
        peers: answers::peers(&matrix),
        setup: Some(setup::setup(run, &best.axes, &best.cells)),
        cautions,
    }
}

/// The best, or the default where the best cannot be told from it.
fn advised<'p>(matrix: &Matrix<'_>, first: &'p Pick, picks: &'p [Pick]) -> &'p Pick {
    match matrix.base(first, picks) {
        Some(base) => match matrix.against(first, base) {
            Some(gain) if gain.decision == Decision::Better => first,
            // (Values of 0, which have no ratio, are told by their order.)
            None if first.summary.median != base.summary.median => first,
            _ => base,
        },
        None => first,
    }
}

fn ties(matrix: &Matrix<'_>, best: &Pick, picks: &[Pick]) -> Vec<Axes> {
    let others = picks.iter().filter(|pick| pick.axes != best.axes);
    let tied = others.filter(|pick| match matrix.against(pick, best) {
        Some(gain) => gain.decision == Decision::Tie,
        None => pick.summary.median == best.summary.median,
    });
    tied.map(|pick| matrix.short(&pick.axes)).collect()
}

fn set_aside(matrix: &Matrix<'_>, best: &Pick, picks: &[Pick]) -> Vec<SetAside> {
    let others = picks.iter().filter(|pick| pick.axes != best.axes);
    others
        .filter_map(|pick| {
            let reason = not_safe(matrix.run, &pick.axes)?;
            let gain = matrix.against(pick, best);
            let faster = match gain {
                Some(gain) => gain.decision == Decision::Better,
                // (Values of 0, which have no ratio, are told by their order.)
                None => matrix.is_better(pick.summary.median, best.summary.median),
            };
            faster.then(|| SetAside { axes: matrix.short(&pick.axes), gain, reason })
        })
        .collect()
}

/// Where what is best together is not the best.
fn exceptions(matrix: &Matrix<'_>, best: &Pick) -> Vec<Exception> {
    let mut loads: Vec<Axes> = Vec::new();
    for load in best.cells.iter().map(|i| matrix.load(&matrix.run.cells[*i])) {
        if !loads.contains(&load) {
            loads.push(load);
        }
    }
    if matrix.metric.key == SURVIVED || loads.len() < 2 {
        return Vec::new();
    }
    let under = |load: Axes| {
        let all = matrix.picks_where(|cell| matrix.load(cell) == load);
        let (picks, _) = eligible(matrix.run, &all);
        let first = picks.first()?;
        let own = picks.iter().find(|pick| pick.axes == best.axes)?;
        let gain = matrix.against(first, own)?;
        let better = gain.decision == Decision::Better;
        better.then(|| Exception { load, axes: matrix.short(&first.axes), gain })
    };
    loads.into_iter().filter_map(under).collect()
}

/// Ways with results that are none of the picks.
fn left_out(matrix: &Matrix<'_>, picks: &[Pick]) -> Vec<Axes> {
    let mut found: Vec<Axes> = Vec::new();
    for cell in matrix.run.cells.iter().filter(|cell| matrix.counts(cell)) {
        let way = matrix.part(&cell.axes, Role::Choice);
        if matrix.summary(cell).is_none() || picks.iter().any(|pick| pick.axes == way) {
            continue;
        }
        // (Guests compare with guests: those that are not are no gap.)
        let same = picks.iter().any(|pick| in_guest(&pick.axes) == in_guest(&way));
        let way = matrix.short(&way);
        if (same || !matrix.guests_apart()) && !found.contains(&way) {
            found.push(way);
        }
    }
    found
}

fn sentence(
    matrix: &Matrix<'_>,
    best: &Pick,
    base: Option<&Pick>,
    gain: Option<Gain>,
    is_default: bool,
    picks: &[Pick],
) -> String {
    let name = label(&matrix.short(&best.axes));
    let measure = matrix.metric.title;
    if picks.len() == 1 {
        return format!("{name} is all that was measured, so there was no choice to make.");
    }
    if matrix.metric.key == SURVIVED {
        return match best.summary.median >= 1.0 {
            true => format!(
                "Use {name}: whoever writes to it waits while there is no space, and sees no error."
            ),
            false => format!("Nothing came through here; {name} is as good as any other."),
        };
    }
    match (base, gain) {
        (Some(base), Some(gain)) if gain.is_guessed() => format!(
            "Use {name}: about {} times as good as {} in {measure}, as far as so few rounds tell.",
            times(gain.ratio),
            label(&matrix.short(&base.axes)),
        ),
        (Some(base), Some(gain)) => format!(
            "Use {name}: {} times as good as {} in {measure} ({}).",
            times(gain.ratio),
            label(&matrix.short(&base.axes)),
            span(gain.interval.low, gain.interval.high)
        ),
        (Some(base), None) => {
            format!("Use {name}: better than {} in {measure}.", label(&matrix.short(&base.axes)))
        }
        (None, _) if is_default => {
            format!(
                "Stay with {name}, the default: nothing measured here is surely better in {measure}."
            )
        }
        (None, _) => format!("Use {name}: the best of {} in {measure}.", picks.len()),
    }
}

/// What notes of cells say of a guest without KVM.
const EMULATED: &str = "emulated (TCG)";

/// What speaks against a run as a whole.
fn cautions(run: &Run) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    if run.ended.is_none() {
        said.push("The run is not complete: it was interrupted, or still goes on.".to_owned());
    }
    if run.quick {
        said.push(
            "A quick run: few rounds of short loads, which a cache may have answered in part."
                .to_owned(),
        );
    }
    if let Some(host) = &run.environment.virtualization {
        said.push(format!(
            "This machine is itself a guest ({host}): its neighbours and its host's caches are in \
             the numbers."
        ));
    }
    if run.cells.iter().flat_map(|cell| &cell.notes).any(|note| note.contains(EMULATED)) {
        said.push(
            "Guests had an emulated processor, as KVM does not work here: they compare with each \
             other only."
                .to_owned(),
        );
    }
    said.extend(run.warnings.iter().map(|warning| words::sentence(&warning.text)));
    said
}

#[cfg(test)]
mod tests;
