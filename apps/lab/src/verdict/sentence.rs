//! Writes a verdict as one sentence.

use super::missing::blocking;
use super::{Advice, Found, Missing, needs_server, survived};
use crate::matrix::{Matrix, Pick};
use crate::model::Axes;
use crate::stats::{Decision, Gain, NARROW, ROUNDS_MIN};
use crate::words::{label, listed, listed_most, plural, sentence as begun, span, times, value};

/// The advice and its gain, or why there is no advice.
pub(super) fn sentence(matrix: &Matrix<'_>, found: &Found<'_>, missing: &[Missing]) -> String {
    let name = label(&matrix.short(&found.way.axes));
    let blocked = blocking(missing);
    if !blocked.is_empty() {
        let was = if blocked.len() == 1 { "was" } else { "were" };
        return format!(
            "Nothing is advised, because {} {was} not measured. Of what was measured: {}.",
            listed(&blocked),
            so_far(matrix, found)
        );
    }
    if found.survival {
        return survival(matrix, found);
    }
    if found.picks.len() == 1 {
        let only = match found.set_aside {
            0 => format!("Only {name} was measured"),
            _ => format!("Of what was measured, only {name} can be advised"),
        };
        return format!("{only}, so there was nothing to compare it with.");
    }
    match found.advice {
        Advice::Use => begun(&format!("use {name}: {}", by_how_much(matrix, found))),
        Advice::Stay => stay(matrix, found, &name),
        Advice::Untold | Advice::None => {
            begun(&format!("nothing is advised: {}", so_far(matrix, found)))
        }
    }
}

/// A gain: `1.84 times as good (1.70 to 1.95)`.
pub(super) fn figure(gain: &Gain) -> String {
    match gain.is_hint() {
        true => format!("{} times as good, with too few rounds to decide", times(gain.ratio)),
        false => format!(
            "{} times as good ({})",
            times(gain.ratio),
            span(gain.interval.low, gain.interval.high)
        ),
    }
}

/// The answer to the plan's question, which begins with the figure.
pub(super) fn answer(matrix: &Matrix<'_>, found: &Found<'_>, missing: &[Missing]) -> String {
    let name = |pick: &Pick| label(&matrix.short(&pick.axes));
    match (found.advice, found.gain, found.other()) {
        _ if found.survival => sentence(matrix, found, missing),
        (Advice::Use, Some(gain), Some(base)) => format!(
            "{}: {} against {}, the default, in {}{}.",
            figure(&gain),
            name(found.way),
            name(base),
            matrix.metric.title,
            together(found.way)
        ),
        (Advice::Untold, Some(gain), Some(base)) if gain.is_hint() => {
            format!("{}: {} against {}, the default.", figure(&gain), name(found.way), name(base))
        }
        (Advice::Stay, ..) => match (measured(matrix, found.way), most_hidden(matrix, found)) {
            (Some(measured), Some((most, pick))) => format!(
                "{measured} with {}, the default; {} is significantly better, and noise hides a gain \
                 of at most {} times ({}).",
                name(found.way),
                nothing(found, "nothing"),
                times(most),
                name(pick)
            ),
            _ => sentence(matrix, found, missing),
        },
        _ => sentence(matrix, found, missing),
    }
}

/// The range of a way's values over its loads.
fn measured(matrix: &Matrix<'_>, way: &Pick) -> Option<String> {
    let cells = way.cells.iter().map(|i| &matrix.run.cells[*i]);
    let medians: Vec<f64> = cells.filter_map(|cell| Some(matrix.summary(cell)?.median)).collect();
    let (least, most) =
        (medians.iter().copied().reduce(f64::min)?, medians.iter().copied().reduce(f64::max)?);
    let said = |number| value(matrix.metric, number);
    Some(match medians.len() {
        1 => said(most),
        loads => format!("{} to {} under {loads} loads", said(least), said(most)),
    })
}

/// The number of loads of a way, if there are several.
fn together(way: &Pick) -> String {
    match way.cells.len() {
        0 | 1 => String::new(),
        loads => format!(" over all {} together", plural(loads, "load")),
    }
}

/// The gain: `1.84 times as good as qcow2, the default, in throughput (1.70 to 1.95)`.
fn by_how_much(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let measure = matrix.metric.title;
    match (found.other(), found.gain) {
        (Some(base), Some(gain)) => format!(
            "{} times as good as {}, the default, in {measure}{} ({})",
            times(gain.ratio),
            label(&matrix.short(&base.axes)),
            together(found.way),
            span(gain.interval.low, gain.interval.high)
        ),
        _ => {
            let others = found.picks.iter().filter(|pick| pick.axes != found.way.axes);
            let better = |pick: &&Pick| {
                let gain = matrix.against(found.way, pick);
                gain.is_some_and(|gain| gain.decision == Decision::Better)
            };
            let (all, worse) = (found.picks.len(), others.filter(better).count());
            let over = together(found.way);
            match worse + 1 == all {
                true => format!("the best of {all} in {measure}{over}"),
                false => format!(
                    "significantly better in {measure}{over} than {worse} of the {} others",
                    all - 1
                ),
            }
        }
    }
}

/// What is no better than the default: `what`, but ways that may not be advised can be better.
fn nothing(found: &Found<'_>, what: &str) -> String {
    let advisable = if found.set_aside == 0 { "" } else { " that can be advised" };
    format!("{what}{advisable}")
}

/// The largest gain over the default that the noise may hide, and the way that may have it.
pub(super) fn most_hidden<'p>(matrix: &Matrix<'_>, found: &Found<'p>) -> Option<(f64, &'p Pick)> {
    let others = found.picks.iter().filter(|pick| pick.axes != found.way.axes);
    let high = |pick: &'p Pick| {
        let gain = matrix.against(pick, found.way)?;
        Some((gain.interval.high, pick)).filter(|(high, _)| *high > 1.0)
    };
    others.filter_map(high).max_by(|a, b| a.0.total_cmp(&b.0))
}

/// Why the default stays, and how strong that reason is.
fn stay(matrix: &Matrix<'_>, found: &Found<'_>, name: &str) -> String {
    let measure = matrix.metric.title;
    let [nothing, here] = ["nothing", "nothing measured here"].map(|what| nothing(found, what));
    match most_hidden(matrix, found) {
        Some((most, pick)) if most > NARROW => format!(
            "Stay with {name}, the default: {nothing} is significantly better in {measure}, but noise \
             may hide a gain of up to {} times ({}).",
            times(most),
            label(&matrix.short(&pick.axes))
        ),
        Some((most, pick)) => format!(
            "Stay with {name}, the default: {here} is better in {measure} by more than \
             {} times ({}).",
            times(most),
            label(&matrix.short(&pick.axes))
        ),
        None => {
            format!("Stay with {name}, the default: {here} is better in {measure}.")
        }
    }
}

/// The result, if there is no advice.
fn so_far(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let name = label(&matrix.short(&found.way.axes));
    let rounds = found.picks.iter().map(|pick| pick.summary.count).min().unwrap_or(0);
    let most = found.picks.iter().map(|pick| pick.summary.count).max().unwrap_or(0);
    if found.survival {
        let all = survivors(matrix, found);
        let who = if all.is_empty() { "nothing".to_owned() } else { listed_most(&all, 3) };
        return format!("{who} survived without an error");
    }
    if found.picks.len() == 1 {
        return format!("only {name}");
    }
    let few = match rounds {
        1 | 2 if most >= ROUNDS_MIN => "not every configuration has three rounds; ",
        1 => "one round does not show how much results vary; ",
        2 => "two rounds do not show how much results vary; ",
        _ => "",
    };
    match (found.gain, found.other()) {
        (Some(gain), Some(base)) if rounds < ROUNDS_MIN => format!(
            "{few}{name} was {} times as good as {}, the default",
            times(gain.ratio),
            label(&matrix.short(&base.axes))
        ),
        (Some(gain), Some(base)) if gain.decision == Decision::Better => format!(
            "{name} is {} times as good as {}, the default ({})",
            times(gain.ratio),
            label(&matrix.short(&base.axes)),
            span(gain.interval.low, gain.interval.high)
        ),
        _ if rounds < ROUNDS_MIN => format!("{few}{name} had the best value"),
        _ => format!("{name} had the best value, but is not significantly better"),
    }
}

/// Names of the ways that survived.
fn survivors(matrix: &Matrix<'_>, found: &Found<'_>) -> Vec<String> {
    let through = found.picks.iter().filter(|pick| survived(matrix, pick));
    through.map(|pick| label(&matrix.short(&pick.axes))).collect()
}

/// The result for survival.
fn survival(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let way = found.way;
    let name = label(&matrix.short(&way.axes));
    let rounds = match way.summary.count {
        1 => "in the one round".to_owned(),
        rounds => format!("in all {rounds} rounds"),
    };
    let others = survivors(matrix, found).len().saturating_sub(1);
    let others = match others {
        0 => String::new(),
        1 => "; one other configuration did as well".to_owned(),
        others => format!("; {others} other configurations did as well"),
    };
    match found.advice {
        Advice::Untold | Advice::None => "Nothing survived here in every round.".to_owned(),
        Advice::Stay if found.picks.len() == 1 => {
            format!("Only {name} was measured: it survived {rounds}.")
        }
        Advice::Stay => format!("Stay with {name}, the default: it survived {rounds}{others}."),
        Advice::Use => format!(
            "Use {}: {}{}.{}",
            label(&matrix.short(&found.choices(matrix))),
            how_it_survived(matrix, way, &rounds),
            alike(matrix, found),
            found.other().map_or_else(String::new, |base| format!(
                " The default, {}, did not survive.",
                label(&matrix.short(&base.axes))
            ))
        ),
    }
}

/// What a client of the way notices while there is no space.
fn how_it_survived(matrix: &Matrix<'_>, way: &Pick, rounds: &str) -> String {
    const STOPS: &str = "stops the whole guest while there is no space, until it is resumed";
    let cells = way.cells.iter().map(|i| &matrix.run.cells[*i]);
    let stops = cells.flat_map(|cell| cell.values("machine_stops")).any(|stops| stops > 0.0);
    match (needs_server(&way.axes), stops) {
        (true, false) => {
            format!("the client waits while there is no space, and sees no error ({rounds})")
        }
        (true, true) => format!("it survived {rounds}, but QEMU {STOPS}"),
        (false, true) => {
            format!("it survived {rounds} without a server besides QEMU, which {STOPS}")
        }
        (false, false) => format!("it survived {rounds} without a server besides QEMU"),
    }
}

/// The values that make no difference to survival: `, with raw and qcow2 alike`.
fn alike(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let choices = found.choices(matrix);
    let covered = found.picks.iter().filter(|pick| choices.iter().all(|e| pick.axes.contains(e)));
    let rest = covered.map(|pick| -> Axes {
        pick.axes.iter().filter(|entry| !choices.contains(entry)).cloned().collect()
    });
    let rest: Vec<String> = rest.map(|axes| label(&axes)).filter(|name| !name.is_empty()).collect();
    match rest.len() {
        0 => String::new(),
        _ => format!(", with {} alike", listed_most(&rest, 4)),
    }
}
