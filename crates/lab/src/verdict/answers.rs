//! The questions that a run's axes ask, each answered in a sentence.

use crate::matrix::{Matrix, OWN_TOOL, Pick, Role, program};
use crate::model::{Axes, Better, Cell, metric};
use crate::stats::{Decision, Gain, Summary, gain, median, summary};
use crate::words::{self, label, listed, span, times, title};

/// A question and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The question.
    pub question: String,
    /// A sentence.
    pub sentence: String,
}

/// One thing, measured with each tool.
#[derive(Clone, Debug)]
pub struct PeerRow {
    /// All axes but the tool that are not the same everywhere.
    pub axes: Axes,
    /// Tool and what it measured, in the order of the axis; nothing where it did not.
    pub tools: Vec<(String, Option<Summary>)>,
    /// How many times as good ours is as each of the others.
    pub gains: Vec<(String, Gain)>,
}

/// All that can be answered. `best` is what is advised.
pub(super) fn answers(matrix: &Matrix<'_>, picks: &[Pick], best: Option<&Pick>) -> Vec<Answer> {
    let mut all = Vec::new();
    for axis in matrix.varying.iter().filter(|axis| matrix.role(axis) == Role::Choice) {
        all.extend(of_choice(matrix, axis, picks, best));
    }
    all.extend(of_conditions(matrix));
    all.extend(of_flushes(matrix));
    all.extend(of_survival(matrix));
    all.extend(of_published(matrix));
    all
}

/// A value of an axis with all ways that have it, in places where every value was measured.
struct Value {
    name: String,
    pick: Pick,
}

/// What an axis alone does, over all ways that are otherwise the same.
fn of_choice(
    matrix: &Matrix<'_>,
    axis: &str,
    picks: &[Pick],
    best: Option<&Pick>,
) -> Option<Answer> {
    let named = |pick: &Pick| {
        pick.axes.iter().find(|(name, _)| name == axis).map(|(_, value)| value.clone())
    };
    let rest = |pick: &Pick| -> Axes {
        pick.axes.iter().filter(|(name, _)| name != axis).cloned().collect()
    };
    let mut names: Vec<String> = Vec::new();
    for name in picks.iter().filter_map(named) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let has = |name: &String, others: &Axes| {
        picks.iter().any(|pick| named(pick).as_ref() == Some(name) && rest(pick) == *others)
    };
    let matched: Vec<&Pick> =
        picks.iter().filter(|pick| names.iter().all(|name| has(name, &rest(pick)))).collect();
    let mut values: Vec<Value> = names
        .iter()
        .filter_map(|name| {
            let own = matched.iter().filter(|pick| named(pick).as_ref() == Some(name));
            let cells: Vec<usize> = own.flat_map(|pick| pick.cells.iter().copied()).collect();
            let pick = matrix.pick(Vec::new(), cells)?;
            Some(Value { name: name.clone(), pick })
        })
        .collect();
    values.sort_by(|a, b| {
        let order = a.pick.summary.median.total_cmp(&b.pick.summary.median);
        if matrix.metric.better == Better::Higher { order.reverse() } else { order }
    });
    let question = format!("Which {}?", words::title(axis).to_lowercase());
    let [first, others @ ..] = values.as_slice() else { return None };
    if others.is_empty() {
        return None;
    }
    let default = matrix.run.plan.baseline.as_ref();
    let default = default.and_then(|axes| axes.iter().find(|(name, _)| name == axis));
    let base = default.and_then(|(_, name)| values.iter().find(|value| value.name == *name));
    let against = base.filter(|base| base.name != first.name).unwrap_or(&others[0]);
    let tied: Vec<String> = others
        .iter()
        .filter(|value| {
            let found = matrix.against(&value.pick, &first.pick);
            found.is_some_and(|gain| gain.decision == Decision::Tie)
        })
        .map(|value| value.name.clone())
        .collect();
    let mut sentence = if tied.len() == others.len() {
        format!(
            "It makes no difference that can be told from noise: {} tie",
            listed(&values.iter().map(|value| value.name.clone()).collect::<Vec<_>>(),)
        )
    } else {
        let found = matrix.against(&first.pick, &against.pick);
        let mut sentence = match found {
            Some(found) if found.decision != Decision::Tie => format!(
                "{}: {} times as good as {} ({}), all else the same",
                first.name,
                times(found.ratio),
                against.name,
                span(found.interval.low, found.interval.high)
            ),
            _ => format!("{}, though not surely better than {}", first.name, against.name),
        };
        let tied: Vec<String> = tied.into_iter().filter(|name| *name != against.name).collect();
        if !tied.is_empty() {
            sentence.push_str(&format!("; {} cannot be told from it", listed(&tied)));
        }
        sentence
    };
    // What is best together need not be what is best on average.
    if let Some(advised) = best.and_then(named).filter(|name| *name != first.name)
        && !sentence.contains("no difference")
    {
        sentence.push_str(&format!("; together with the rest of what is advised it is {advised}"));
    }
    sentence.push('.');
    Some(Answer { question, sentence })
}

/// The best way under each load.
fn of_conditions(matrix: &Matrix<'_>) -> Vec<Answer> {
    let varying = |axes: &Axes| -> Axes {
        let own = matrix.part(axes, Role::Condition);
        own.into_iter().filter(|(axis, _)| matrix.varying.contains(&axis.as_str())).collect()
    };
    let mut conditions: Vec<Axes> = Vec::new();
    for cell in &matrix.run.cells {
        let condition = varying(&cell.axes);
        if !condition.is_empty() && !conditions.contains(&condition) {
            conditions.push(condition);
        }
    }
    conditions
        .into_iter()
        .filter_map(|condition| of_condition(matrix, &condition, &varying))
        .collect()
}

fn of_condition(
    matrix: &Matrix<'_>,
    condition: &Axes,
    varying: &impl Fn(&Axes) -> Axes,
) -> Option<Answer> {
    let picks = matrix.picks_where(|cell| varying(&cell.axes) == *condition);
    let picks: Vec<Pick> = picks
        .into_iter()
        .filter(|pick| super::not_safe(matrix.run, &pick.axes).is_none())
        .collect();
    let first = picks.first()?;
    let question = format!("Under {}?", label(condition));
    let name = label(&matrix.short(&first.axes));
    let value = words::value(matrix.metric, first.summary.median);
    let ties = picks[1..].iter().filter(|pick| {
        matrix.against(pick, first).is_some_and(|gain| gain.decision == Decision::Tie)
    });
    let ties: Vec<String> = ties.map(|pick| label(&matrix.short(&pick.axes))).collect();
    let mut sentence = format!("{name} with {value}");
    match matrix.base(first, &picks).filter(|base| base.axes != first.axes) {
        Some(base) => {
            let base_value = words::value(matrix.metric, base.summary.median);
            sentence.push_str(&format!("; the default {base_value}"));
        }
        None if picks.len() > 1 && matrix.base(first, &picks).is_some() => {
            sentence.push_str(", which is the default");
        }
        None => {}
    }
    match ties.len() {
        0 => {}
        few @ 1..=3 => {
            let verb = if few == 1 { "ties" } else { "tie" };
            sentence.push_str(&format!("; {} {verb} with it", listed(&ties)));
        }
        many => sentence.push_str(&format!("; {many} others tie with it")),
    }
    sentence.push('.');
    Some(Answer { question, sentence })
}

/// The median of a cell's metric, if it has it.
fn median_of(cell: &Cell, key: &str) -> Option<f64> {
    median(&cell.values(key))
}

/// Whether flushes reached the storage, where they were counted.
fn of_flushes(matrix: &Matrix<'_>) -> Option<Answer> {
    let counted: Vec<(&Cell, f64)> = matrix
        .run
        .cells
        .iter()
        .filter_map(|cell| Some((cell, median_of(cell, "flushes")?)))
        .collect();
    if counted.is_empty() {
        return None;
    }
    let without: Vec<String> = counted
        .iter()
        .filter(|(_, flushes)| *flushes == 0.0)
        .map(|(cell, _)| label(&matrix.short(&cell.axes)))
        .collect();
    let longest = matrix
        .run
        .cells
        .iter()
        .filter_map(|cell| Some((cell, median_of(cell, "final_fsync_seconds")?)))
        .max_by(|a, b| a.1.total_cmp(&b.1));
    let mut sentence = match without.len() {
        0 => format!("Yes: flushes reached it in all {} cells that count them", counted.len()),
        few if few <= 4 => format!("Not with {}: none was recorded there", listed(&without)),
        many => format!("Not in {many} of {} cells: none was recorded there", counted.len()),
    };
    if let Some((cell, seconds)) = longest {
        sentence.push_str(&format!(
            "; the longest final fsync took {} ({})",
            words::time(seconds),
            label(&matrix.short(&cell.axes))
        ));
    }
    sentence.push('.');
    Some(Answer { question: "Did a flush truly reach the storage?".to_owned(), sentence })
}

/// Who came through, where that was the question.
fn of_survival(matrix: &Matrix<'_>) -> Option<Answer> {
    let mut came: Vec<String> = Vec::new();
    let mut broke: Vec<String> = Vec::new();
    for cell in &matrix.run.cells {
        let Some(survived) = median_of(cell, "survived") else { continue };
        let errors = median_of(cell, "io_errors").unwrap_or(0.0) > 0.0;
        let name = label(&matrix.short(&cell.axes));
        let side = if survived >= 1.0 && !errors { &mut came } else { &mut broke };
        side.push(name);
    }
    if came.is_empty() && broke.is_empty() {
        return None;
    }
    let said = |names: &[String], nothing: &str| match names.len() {
        0 => nothing.to_owned(),
        1..=6 => listed(names),
        many => format!("{many} cells"),
    };
    let sentence = format!(
        "Came through without an error: {}. Broke: {}.",
        said(&came, "none"),
        said(&broke, "none")
    );
    Some(Answer { question: "Who pauses, who breaks?".to_owned(), sentence })
}

/// A published number beside the cells that it speaks of.
pub(crate) fn measured_for(matrix: &Matrix<'_>, number: &crate::model::Published) -> Option<f64> {
    let fits = |cell: &&Cell| {
        number.axes.iter().all(|(axis, value)| cell.axis(axis) == Some(value.as_str()))
    };
    let cells = matrix.run.cells.iter().filter(fits);
    let medians: Vec<f64> = cells.filter_map(|cell| median_of(cell, &number.metric)).collect();
    median(&medians)
}

/// Whether the order of published numbers is the one of this host.
fn of_published(matrix: &Matrix<'_>) -> Option<Answer> {
    let both: Vec<(&crate::model::Published, f64)> = matrix
        .run
        .published
        .iter()
        .filter_map(|number| Some((number, measured_for(matrix, number)?)))
        .collect();
    let (mut pairs, mut agree) = (0, 0);
    for (i, (one, own)) in both.iter().enumerate() {
        for (two, other) in &both[i + 1..] {
            // Numbers under different loads have no order.
            let loads = [one, two].map(|number| matrix.part(&number.axes, Role::Condition));
            if one.metric != two.metric || loads[0] != loads[1] || one.value == two.value {
                continue;
            }
            pairs += 1;
            agree += u32::from((one.value > two.value) == (own > other));
        }
    }
    if pairs == 0 {
        return None;
    }
    let part = f64::from(agree) / f64::from(pairs);
    let verdict = match part {
        part if part >= 0.9 => "The order is the same here",
        part if part >= 0.6 => "The order is much the same here",
        part if part > 0.4 => "Here the order has little to do with it",
        _ => "Here it is rather the other way round",
    };
    let sentence =
        format!("{verdict}: {agree} of {pairs} pairs of published numbers rank as they did.");
    Some(Answer { question: "Do the published numbers hold here?".to_owned(), sentence })
}

/// The programs side by side, where several did the same.
pub(super) fn peers(matrix: &Matrix<'_>) -> Vec<PeerRow> {
    let mut tools: Vec<String> = Vec::new();
    let mut things: Vec<(Axes, Vec<(String, &Cell)>)> = Vec::new();
    for cell in &matrix.run.cells {
        let (thing, Some(tool)) = program(&cell.axes) else { continue };
        if !tools.contains(&tool) {
            tools.push(tool.clone());
        }
        match things.iter_mut().find(|(known, _)| *known == thing) {
            Some((_, cells)) => cells.push((tool, cell)),
            None => things.push((thing, vec![(tool, cell)])),
        }
    }
    // Ours first, the others in the order of the run.
    tools.sort_by_key(|tool| tool != OWN_TOOL);
    things.iter().filter_map(|(thing, cells)| peer_row(matrix, thing, cells, &tools)).collect()
}

fn peer_row(
    matrix: &Matrix<'_>,
    thing: &Axes,
    cells: &[(String, &Cell)],
    tools: &[String],
) -> Option<PeerRow> {
    let values = |tool: &String| {
        let cell = cells.iter().find(|(name, _)| name == tool)?.1;
        Some(cell.values(matrix.metric.key))
    };
    let measured: Vec<(String, Option<Summary>)> = tools
        .iter()
        .map(|tool| (tool.clone(), values(tool).and_then(|values| summary(&values))))
        .collect();
    if measured.iter().filter(|(_, summary)| summary.is_some()).count() < 2 {
        return None;
    }
    let own = values(&OWN_TOOL.to_owned()).unwrap_or_default();
    let gains = tools
        .iter()
        .filter(|tool| *tool != OWN_TOOL)
        .filter_map(|tool| Some((tool.clone(), gain(&own, &values(tool)?, matrix.metric.better)?)))
        .collect();
    let told = |axis: &str| matrix.varying.contains(&axis);
    let axes = thing.iter().filter(|(axis, _)| told(axis)).cloned().collect();
    Some(PeerRow { axes, tools: measured, gains })
}

/// What a metric is called at the head of a column.
pub(crate) fn heading(key: &str) -> String {
    metric(key).map_or_else(|| title(key), |metric| title(metric.title))
}
