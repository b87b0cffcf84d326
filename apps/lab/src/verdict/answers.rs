//! Answers the questions that a run's axes raise, in one sentence each.

use serde::Serialize;

use super::sentence::figure;
use super::{asked, prepared, published, scores};
use crate::lists::{distinct, grouped};
use crate::matrix::{Matrix, OWN_TOOL, Pick, Role, SEEN, in_guest, program};
use crate::model::{Axes, Cell, SURVIVED, value_of};
use crate::stats::{Decision, Gain, ROUNDS_MIN, Summary, median, summary};
use crate::words::{self, label, listed_most, title};

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// The question.
    pub question: String,
    /// A sentence.
    #[serde(rename = "answer")]
    pub sentence: String,
}

/// One task, measured with each tool.
#[derive(Clone, Debug)]
pub struct PeerRow {
    /// The axes that vary, without the tool.
    pub axes: Axes,
    /// Each tool with its result, in the order of the axis; none if the tool has no result.
    pub tools: Vec<(String, Option<Summary>)>,
    /// How many times as good vdkit is as each of the others.
    pub gains: Vec<(String, Gain)>,
}

/// Every answer that the run supports. `best` is the advised way.
pub(super) fn answers(matrix: &Matrix<'_>, picks: &[Pick], best: Option<&Pick>) -> Vec<Answer> {
    let mut all = Vec::new();
    // For survival, only the list of survivors is of interest.
    if matrix.metric.key != SURVIVED {
        for axis in matrix.varying.iter().filter(|axis| matrix.role(axis) == Role::Choice) {
            all.extend(of_choice(matrix, axis, picks, best));
        }
        all.extend(of_other_fronts(matrix, best));
        all.extend(of_conditions(matrix));
    }
    all.extend(scores::of_scores(matrix));
    all.extend(prepared::of_allocation(matrix));
    all.extend(asked::of_second_pass(matrix, picks));
    all.extend(asked::of_reads(matrix, picks));
    all.extend(asked::of_flushes(matrix));
    all.extend(asked::of_survival(matrix));
    all.extend(published::of_published(matrix));
    all
}

/// A value of an axis with all ways that have it, restricted to conditions under which every value
/// was measured.
struct Value {
    name: String,
    pick: Pick,
}

/// A way's value of an axis.
fn named(pick: &Pick, axis: &str) -> Option<String> {
    value_of(&pick.axes, axis).map(str::to_owned)
}

/// The values of an axis, each over all ways that are otherwise equal, best first.
fn values_of(matrix: &Matrix<'_>, axis: &str, picks: &[Pick]) -> Vec<Value> {
    let rest = |pick: &Pick| -> Axes {
        pick.axes.iter().filter(|(name, _)| name != axis).cloned().collect()
    };
    let names = distinct(picks.iter().filter_map(|pick| named(pick, axis)));
    let has = |name: &String, others: &Axes| {
        let own = |pick: &&Pick| named(pick, axis).as_ref() == Some(name);
        picks.iter().filter(own).any(|pick| rest(pick) == *others)
    };
    let matched: Vec<&Pick> =
        picks.iter().filter(|pick| names.iter().all(|name| has(name, &rest(pick)))).collect();
    let mut values: Vec<Value> = names
        .iter()
        .filter_map(|name| {
            let own = matched.iter().filter(|pick| named(pick, axis).as_ref() == Some(name));
            let cells: Vec<usize> = own.flat_map(|pick| pick.cells.iter().copied()).collect();
            let pick = matrix.pick(Vec::new(), cells)?;
            Some(Value { name: name.clone(), pick })
        })
        .collect();
    let median = |value: &Value| value.pick.summary.median;
    values.sort_by(|a, b| matrix.metric.best_first(median(a), median(b)));
    values
}

/// The effect of one axis over all ways that are otherwise equal.
fn of_choice(
    matrix: &Matrix<'_>,
    axis: &str,
    picks: &[Pick],
    best: Option<&Pick>,
) -> Option<Answer> {
    let values = values_of(matrix, axis, picks);
    let question = format!("Which {} is best?", title(axis).to_lowercase());
    let [first, others @ ..] = values.as_slice() else { return None };
    if others.is_empty() {
        return None;
    }
    let default = matrix.run.plan.baseline.as_ref().and_then(|axes| value_of(axes, axis));
    let base = default.and_then(|name| values.iter().find(|value| value.name == name));
    let against = base.filter(|base| base.name != first.name).unwrap_or(&others[0]);
    let ties = |value: &&Value| {
        let gain = matrix.against(&value.pick, &first.pick);
        value.name != against.name && gain.is_some_and(|gain| gain.decision == Decision::Tie)
    };
    let found = matrix.against(&first.pick, &against.pick);
    let mut sentence = match found {
        Some(found) => {
            format!("{}: {} against {}, all else equal", figure(&found), first.name, against.name)
        }
        None => format!("{} has the best value", first.name),
    };
    if found.is_some_and(|found| !found.is_hint()) {
        let more = others.iter().filter(ties).map(|value| value.name.clone());
        sentence.push_str(&tying(&more.collect::<Vec<_>>(), &first.name));
    }
    // The best combination need not contain the value that is best on average.
    if let Some(advised) =
        best.and_then(|best| named(best, axis)).filter(|name| *name != first.name)
    {
        sentence.push_str(&format!("; the advised configuration has {advised}"));
    }
    sentence.push('.');
    Some(Answer { question, sentence })
}

/// The best front among ways measured in another position (host or guest) than the advised way.
fn of_other_fronts(matrix: &Matrix<'_>, best: Option<&Pick>) -> Option<Answer> {
    let here = in_guest(&best.filter(|_| matrix.apart)?.axes);
    let all = matrix.picks_where(|cell| in_guest(&cell.axes) != here);
    let (picks, _) = super::eligible(matrix, &all);
    let answer = of_choice(matrix, "front", &picks, None)?;
    let place = if here { "from the host" } else { "in a guest" };
    Some(Answer { question: format!("Which front is best {place}?"), ..answer })
}

/// The best way under each load.
fn of_conditions(matrix: &Matrix<'_>) -> Vec<Answer> {
    let loads = matrix.run.cells.iter().map(|cell| matrix.load(cell));
    let loads = distinct(loads.filter(|load| !load.is_empty()));
    loads.iter().filter_map(|load| of_condition(matrix, load)).collect()
}

fn of_condition(matrix: &Matrix<'_>, condition: &Axes) -> Option<Answer> {
    let all = matrix.picks_where(|cell| matrix.load(cell) == *condition);
    let (picks, _) = super::eligible(matrix, &all);
    let first = picks.first()?;
    let question = match condition.as_slice() {
        [(axis, place)] if axis == SEEN => format!("Which is best {place}?"),
        _ => format!("Which is best under {}?", label(condition)),
    };
    let said = |pick: &Pick| words::value(matrix.metric, pick.summary.median);
    let name = |pick: &Pick| matrix.name(&pick.axes);
    let tied = |pick: &Pick| {
        matrix.against(pick, first).is_some_and(|gain| gain.decision == Decision::Tie)
    };
    let mut sentence = format!("{}: {}", said(first), name(first));
    let base = matrix.base(first, &picks);
    let other = base.filter(|base| base.axes != first.axes);
    match other {
        Some(base) => {
            let verb =
                if tied(base) && base.summary.count >= ROUNDS_MIN { "ties at" } else { "has" };
            sentence.push_str(&format!("; the default, {}, {verb} {}", name(base), said(base)));
        }
        None if picks.len() > 1 && base.is_some() => sentence.push_str(", which is the default"),
        None => {}
    }
    let others = picks[1..].iter().filter(|pick| other.is_none_or(|base| base.axes != pick.axes));
    if picks.iter().any(|pick| pick.summary.count < ROUNDS_MIN) {
        sentence.push_str("; too few rounds to decide");
    } else {
        let ties: Vec<String> = others.filter(|pick| tied(pick)).map(name).collect();
        sentence.push_str(&tying(&ties, "it"));
    }
    sentence.push('.');
    Some(Answer { question, sentence })
}

/// The continuation of a sentence: `; raw and qcow2 tie with it`.
fn tying(names: &[String], with: &str) -> String {
    let verb = if names.len() == 1 { "ties" } else { "tie" };
    match names {
        [] => String::new(),
        names => format!("; {} {verb} with {with}", listed_most(names, 3)),
    }
}

/// The median of a cell's metric, if the cell has it.
pub(super) fn median_of(cell: &Cell, key: &str) -> Option<f64> {
    median(&cell.values(key))
}

/// Programs side by side, if several did the same.
pub(super) fn peers(matrix: &Matrix<'_>) -> Vec<PeerRow> {
    let cells = matrix.run.cells.iter();
    let mut tools = distinct(cells.clone().filter_map(|cell| program(&cell.axes).1));
    let things = grouped(cells.filter_map(|cell| {
        let (thing, tool) = program(&cell.axes);
        Some((thing, (tool?, cell)))
    }));
    // vdkit first, the others in the order of the run.
    tools.sort_by_key(|tool| tool != OWN_TOOL);
    things.iter().filter_map(|(thing, cells)| peer_row(matrix, thing, cells, &tools)).collect()
}

fn peer_row(
    matrix: &Matrix<'_>,
    thing: &Axes,
    cells: &[(String, &Cell)],
    tools: &[String],
) -> Option<PeerRow> {
    let cell_of = |tool: &str| Some(cells.iter().find(|(name, _)| name == tool)?.1);
    let values = |cell: &Cell| summary(&cell.values(matrix.metric.key));
    let measured: Vec<(String, Option<Summary>)> =
        tools.iter().map(|tool| (tool.clone(), cell_of(tool).and_then(values))).collect();
    if measured.iter().filter(|(_, summary)| summary.is_some()).count() < 2 {
        return None;
    }
    let against = |tool: &&String| {
        let gain = matrix.between(cell_of(OWN_TOOL)?, cell_of(tool)?)?;
        Some(((*tool).clone(), gain))
    };
    let gains = tools.iter().filter(|tool| *tool != OWN_TOOL).filter_map(|t| against(&t)).collect();
    let told = |axis: &str| matrix.varying.contains(&axis);
    let axes = thing.iter().filter(|(axis, _)| told(axis)).cloned().collect();
    Some(PeerRow { axes, tools: measured, gains })
}
