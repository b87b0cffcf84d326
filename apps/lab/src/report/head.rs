//! The head of the page: the run, the advice and its confidence.

use maud::{Markup, html};

use crate::axes::about_value;
use crate::lists::grouped;
use crate::model::{Axes, Cell, Outcome, Run};
use crate::stats::{Gain, NARROW};
use crate::verdict::{
    Advice, Answer, Exception, Level, SURVIVED_TOO, SetAside, Setup, Verdict, blocking, interval,
};
use crate::words::{alone, date, first_of, label, listed, plural, sentence, time, times, title};

/// The title, the machine in one line, and the theme switch.
pub(super) fn top(run: &Run) -> Markup {
    let environment = &run.environment;
    // A cell that failed in a later round is listed as not measured.
    let failed = |cell: &Cell| matches!(cell.outcome, Outcome::Failed(_));
    let measured = run.cells.iter().filter(|cell| !cell.samples.is_empty() && !failed(cell));
    let measured = measured.count();
    let rounds = run.cells.iter().map(|cell| cell.samples.len()).max().unwrap_or(0);
    let cores = plural(environment.cores as usize, "thread");
    html! {
        div class="bar-top" {
            p class="brand" { "vdkit lab" span { (run.plan.name) } }
            fieldset class="theme js" {
                legend class="sr" { "Colors" }
                @for (value, name) in [("auto", "Auto"), ("light", "Light"), ("dark", "Dark")] {
                    label {
                        input type="radio" name="theme" value=(value) checked[value == "auto"];
                        span { (name) }
                    }
                }
            }
        }
        h1 { (run.plan.title) }
        p class="lead" { (run.plan.question) }
        p class="facts" {
            span { (environment.cpu) ", " (cores) }
            span { "Linux " (environment.kernel.trim_start_matches("Linux ")) }
            span { (measured) " of " (plural(run.cells.len(), "cell")) " measured, " (plural(rounds, "round")) }
            span { (date(run.started)) @if let Some(ended) = run.ended {
                ", took " (time(ended.saturating_sub(run.started) as f64))
            } }
        }
    }
}

/// The advice. What was not measured comes before it.
pub(super) fn verdict(run: &Run, verdict: &Verdict) -> Markup {
    html! {
        section id="verdict" class="verdict" aria-labelledby="verdict-h" {
            @if !verdict.missing.is_empty() { (missing(verdict)) }
            @let (words, loud) = kicker(verdict);
            p class=(if loud { "kicker loud" } else { "kicker" }) { (words) }
            h2 id="verdict-h" class=(if verdict.best.is_some() { "" } else { "plain" }) {
                @match &verdict.best {
                    Some(axes) => {
                        @for (i, (axis, value)) in axes.iter().enumerate() {
                            @if i > 0 {
                                span class="dotsep" aria-hidden="true" { " · " }
                                span class="sr" { ", " }
                            }
                            (alone(axis, value))
                        }
                    }
                    None => { (no_advice(verdict)) }
                }
            }
            p class="sentence" { (verdict.sentence) }
            @if let Some(axes) = &verdict.best { (meanings(axes)) }
            div class="tiles" {
                @if let Some(gain) = &verdict.gain { (gain_tile(gain, verdict)) }
                div class="tile" {
                    p class="tile-name" { "Confidence" }
                    p class="tile-value" { (verdict.confidence.level.word()) }
                    p class="tile-note" { (sentence(&verdict.confidence.words)) }
                }
                @if verdict.best.is_some() {
                    div class="tile" {
                        p class="tile-name" { @if verdict.survival { (title(SURVIVED_TOO)) } @else { "Not significantly different" } }
                        p class="tile-value" { @match verdict.ties.len() { 0 => "none", n => (n) } }
                        p class="tile-note" { (ties(verdict)) }
                        @if let Some(text) = verdict.not_compared() {
                            p class="tile-note" { (sentence(&text)) }
                        }
                    }
                }
            }
            @if !verdict.exceptions.is_empty() { (exceptions(&verdict.exceptions)) }
            @if !verdict.set_aside.is_empty() { (set_aside(&verdict.set_aside)) }
            @if !verdict.cautions.is_empty() {
                aside class="cautions" aria-label="What limits these results" {
                    p class="aside-name" { "What limits these results" }
                    ul { @for caution in &verdict.cautions { li { (caution) } } }
                }
            }
            @if let Some(setup) = &verdict.setup { (how(run, setup)) }
        }
    }
}

/// The line above the heading, as strong as the evidence, and whether it is loud.
fn kicker(verdict: &Verdict) -> (&'static str, bool) {
    let words = match verdict.advice {
        // One round shows what survives, but not how reliably.
        Advice::Use | Advice::Stay if verdict.confidence.level == Level::Hint => "A first hint",
        Advice::Use => return ("Use here", true),
        Advice::Stay if verdict.hidden.is_some_and(|most| most > NARROW) => {
            "Undecided: keep the default"
        }
        Advice::Stay => "No reason to change",
        Advice::Untold if verdict.survival => "No advice",
        Advice::Untold => "Undecided",
        Advice::None => "No advice",
    };
    (words, false)
}

/// The heading if there is no advice.
fn no_advice(verdict: &Verdict) -> String {
    let blocking = blocking(&verdict.missing);
    match (verdict.advice, blocking.is_empty()) {
        (Advice::None, false) => format!("Not measured: {}", listed(&blocking)),
        (Advice::None, true) => "Nothing to compare".to_owned(),
        _ if verdict.survival => "Nothing survived".to_owned(),
        _ => "Too little evidence".to_owned(),
    }
}

/// Parts of the plan that were not measured.
fn missing(verdict: &Verdict) -> Markup {
    html! {
        aside class="cautions first" aria-label="Not measured" {
            p class="aside-name" { "Not measured" }
            ul { @for part in verdict.not_measured() { li { (part) "." } } }
        }
    }
}

/// The meanings of the values whose names do not explain themselves.
fn meanings(axes: &Axes) -> Markup {
    let told: Vec<(&str, &str)> =
        axes.iter().filter_map(|(axis, name)| Some((&**name, about_value(axis, name)?))).collect();
    html! {
        @if !told.is_empty() {
            p class="hint" {
                @for (i, (name, about)) in told.iter().enumerate() {
                    @if i > 0 { "; " }
                    b { (name) } ": " (about)
                }
                "."
            }
        }
    }
}

/// Loads under which another way is better.
fn exceptions(all: &[Exception]) -> Markup {
    const NAMED: usize = 4;
    html! {
        aside class="aside" aria-label="Not the best under every load" {
            p class="aside-name" { "Not the best under every load" }
            ul {
                @for found in all.iter().take(NAMED) {
                    li {
                        (label(&found.load)) ": " (label(&found.axes)) " is "
                        (times(found.gain.ratio)) " times as good as the advised configuration."
                    }
                }
                @if all.len() > NAMED { li { (plural(all.len() - NAMED, "more load")) ": see Question by question." } }
            }
        }
    }
}

fn gain_tile(gain: &Gain, verdict: &Verdict) -> Markup {
    let base = verdict.baseline.as_ref().map(label).unwrap_or_default();
    let way = verdict.best.as_ref().or(verdict.leading.as_ref()).map(label).unwrap_or_default();
    html! {
        div class="tile" {
            p class="tile-name" { (way) " against " (base) ", the default" }
            p class="tile-value" { (times(gain.ratio)) "×" }
            p class="tile-note" {
                @if gain.is_hint() { "too few rounds to tell how much of it is noise" }
                @else { (interval(gain)) }
                "."
            }
        }
    }
}

fn ties(verdict: &Verdict) -> String {
    match verdict.ties.len() {
        0 if verdict.compared < 2 => "Nothing else was compared.".to_owned(),
        0 if verdict.survival => "All others failed.".to_owned(),
        0 => "Over all loads together, all others that were compared differ significantly."
            .to_owned(),
        _ => format!("{}.", first_of(&verdict.ties)),
    }
}

/// Ways that were better but are not advised, grouped by reason.
fn set_aside(ways: &[SetAside]) -> Markup {
    const NAMED: usize = 4;
    let name = |way: &SetAside| match &way.gain {
        Some(gain) => format!("{} ({} times as good)", label(&way.axes), times(gain.ratio)),
        None => label(&way.axes),
    };
    let reasons = grouped(ways.iter().map(|way| (way.reason.as_str(), name(way))));
    html! {
        aside class="aside" aria-label="Better, but not advised" {
            p class="aside-name" { "Better, but not advised" }
            @for (reason, names) in &reasons {
                p { (listed(&names[..names.len().min(NAMED)]))
                    @if names.len() > NAMED { ", and " (names.len() - NAMED) " more" } ": " (reason) "." }
            }
        }
    }
}

fn how(run: &Run, setup: &Setup) -> Markup {
    html! {
        div class="how" {
            @if !setup.commands.is_empty() {
                div class="code" {
                    p class="code-name" { "Create the disk" }
                    (code(&setup.commands.join("\n"), "Commands that create the disk"))
                }
            }
            div class="code" {
                p class="code-name" { "Attach it to a guest (libvirt)" }
                (code(&setup.xml, "libvirt's disk element"))
            }
        }
        @if run.environment.places.is_empty() || setup.commands.iter().any(|line| line.contains("SIZE") || line.contains("BASE")) {
            p class="hint" { "Replace the words in capitals." }
        }
        @if let Some(why) = &setup.cache { p class="hint" { (why) } }
    }
}

/// Text to copy: with a button if scripts run, else as plain text.
pub(super) fn code(text: &str, name: &str) -> Markup {
    html! {
        div class="copyable" {
            pre tabindex="0" role="region" aria-label=(name) { code { (text) } }
            button type="button" class="copy js" { "Copy" span class="sr" { " " (name) } }
        }
    }
}

/// The questions that the run answers, without the plan's: its answer is the verdict.
pub(super) fn answers(verdict: &Verdict) -> Option<Markup> {
    let all = verdict.answers.iter().filter(|answer| answer.sentence != verdict.sentence);
    let all: Vec<&Answer> = all.collect();
    (!all.is_empty()).then(|| {
        html! {
            dl class="answers" {
                @for answer in all { div { dt { (answer.question) } dd { (answer.sentence) } } }
            }
        }
    })
}
