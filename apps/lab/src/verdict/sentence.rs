//! Writes a verdict as one sentence.

use super::missing::blocking;
use super::{Advice, Found, Missing, needs_server, survived};
use crate::matrix::{Matrix, Pick};
use crate::model::Axes;
use crate::stats::{Decision, Gain, NARROW, ROUNDS_MIN};
use crate::words::{label, listed, listed_most, plural, sentence as begun, span, times};

/// The advice and its gain, or why there is no advice.
pub(super) fn sentence(matrix: &Matrix<'_>, found: &Found<'_>, missing: &[Missing]) -> String {
    let name = matrix.name(&found.way.axes);
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
    let interval = span(gain.interval.low, gain.interval.high);
    match gain.decision {
        _ if gain.is_hint() => {
            format!("{} times as good, with too few rounds to decide", times(gain.ratio))
        }
        Decision::Tie => format!("{interval} times as good, no significant difference"),
        _ => format!("{} times as good ({interval})", times(gain.ratio)),
    }
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
            matrix.name(&base.axes),
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
    // Ways that may not be advised can be better.
    let what = if found.set_aside == 0 { "" } else { " that can be advised" };
    let reason = match most_hidden(matrix, found) {
        Some((most, pick)) if most > NARROW => format!(
            "nothing{what} is significantly better in {measure}, but noise may hide a gain of up to \
             {} times ({})",
            times(most),
            matrix.name(&pick.axes)
        ),
        Some((most, pick)) => format!(
            "nothing measured here{what} is better in {measure} by more than {} times ({})",
            times(most),
            matrix.name(&pick.axes)
        ),
        None => format!("nothing measured here{what} is better in {measure}"),
    };
    format!("Stay with {name}, the default: {reason}.")
}

/// The result, if there is no advice.
fn so_far(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let name = matrix.name(&found.way.axes);
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
            matrix.name(&base.axes)
        ),
        (Some(gain), Some(base)) if gain.decision == Decision::Better => format!(
            "{name} is {} times as good as {}, the default ({})",
            times(gain.ratio),
            matrix.name(&base.axes),
            span(gain.interval.low, gain.interval.high)
        ),
        _ if rounds < ROUNDS_MIN => format!("{few}{name} had the best value"),
        _ => format!("{name} had the best value, but is not significantly better"),
    }
}

/// Names of the ways that survived.
fn survivors(matrix: &Matrix<'_>, found: &Found<'_>) -> Vec<String> {
    let through = found.picks.iter().filter(|pick| survived(matrix, pick));
    through.map(|pick| matrix.name(&pick.axes)).collect()
}

fn survival(matrix: &Matrix<'_>, found: &Found<'_>) -> String {
    let way = found.way;
    let name = matrix.name(&way.axes);
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
            matrix.name(&found.choices(matrix)),
            how_it_survived(matrix, way, &rounds),
            alike(matrix, found),
            found.other().map_or_else(String::new, |base| format!(
                " The default, {}, did not survive.",
                matrix.name(&base.axes)
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
