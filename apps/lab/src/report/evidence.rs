//! The evidence: commands, samples, the machine, the method.

use maud::{Markup, html};

use super::charts::shortened;
use super::head::code;
use crate::axes::about_value;
use crate::lists::distinct;
use crate::matrix::values;
use crate::model::{Cell, Effort, Outcome, PlaceInfo, PlaceKind, Run, Section};
use crate::stats::outliers;
use crate::words::{bytes, heading, label, plural, time, title, value_of};

/// Longest reason. A guest's console may be longer; the run's file has all of it.
const REASON_LETTERS: usize = 600;

/// Cells without results, with the reasons.
pub(super) fn missing(run: &Run) -> Option<Markup> {
    let missed = |cell: &&Cell| match &cell.outcome {
        Outcome::Skipped(_) | Outcome::Failed(_) => true,
        Outcome::Pending => cell.samples.is_empty(),
        Outcome::Measured => false,
    };
    let rows: Vec<&Cell> = run.cells.iter().filter(missed).collect();
    (!rows.is_empty()).then(|| {
        html! {
            div class="scroll" tabindex="0" role="region" aria-label="Cells that were not measured" {
                table class="plain" {
                    thead { tr { th scope="col" { "Cell" } th scope="col" { "State" } th scope="col" { "Why" } } }
                    tbody { @for cell in rows {
                        @let (state, why) = cell.outcome.state();
                        tr {
                            th scope="row" { (label(&cell.axes)) }
                            td { (state) }
                            td class="why" { (shortened(why.unwrap_or("not reached yet"), REASON_LETTERS)) }
                        }
                    } }
                }
            }
        }
    })
}

/// The commands of every cell, collapsed.
pub(super) fn commands(run: &Run) -> Option<Markup> {
    let cells: Vec<&Cell> = run.cells.iter().filter(|cell| !cell.commands.is_empty()).collect();
    (!cells.is_empty()).then(|| {
        html! {
            p class="note" { "The commands of the last round, in their order." }
            @if cells.len() > COMMANDS_OPEN {
                details class="more" {
                    summary { "Commands of " (cells.len()) " cells" }
                    @for cell in &cells { (cell_commands(cell)) }
                }
            } @else {
                @for cell in &cells { (cell_commands(cell)) }
            }
        }
    })
}

/// Largest number of cells whose commands are shown individually. More are collapsed together.
const COMMANDS_OPEN: usize = 8;

fn cell_commands(cell: &Cell) -> Markup {
    html! {
        details class="more" {
            summary { (label(&cell.axes)) }
            @for note in &cell.notes { p class="note" { (note) } }
            (code(&cell.commands.join("\n"), "Commands of this cell"))
        }
    }
}

/// Every value by cell and round.
pub(super) fn samples(run: &Run) -> Option<Markup> {
    let samples = run.cells.iter().flat_map(|cell| &cell.samples);
    let mut keys = distinct(samples.flat_map(|sample| sample.values.keys()).map(String::as_str));
    if keys.is_empty() {
        return None;
    }
    // In the order of the table of metrics.
    let place = |key: &str| crate::model::METRICS.iter().position(|metric| metric.key == key);
    keys.sort_by_key(|key| place(key).unwrap_or(usize::MAX));
    let count: usize = run.cells.iter().map(|cell| cell.samples.len()).sum();
    let far = |cell: &Cell| outliers(&cell.values(&run.plan.metric));
    Some(html! {
        details class="more" {
            summary { (plural(count, "sample")) ", " (plural(keys.len(), "metric")) }
            p class="note" {
                "Outliers are marked. " code { "vdkit lab export RUN --json" } " prints the whole run, with fio's own output."
            }
            div class="scroll tall" tabindex="0" role="region" aria-label="All samples" {
                table class="plain small" {
                    thead { tr {
                        th scope="col" { "Cell" } th scope="col" class="num" { "Round" }
                        @for key in &keys { th scope="col" class="num" { (heading(key)) } }
                        th scope="col" class="num" { "Duration" }
                    } }
                    tbody { @for cell in &run.cells {
                        @let far = far(cell);
                        @for (i, sample) in cell.samples.iter().enumerate() { tr class=(if far.contains(&i) { "far" } else { "" }) {
                            th scope="row" { (label(&cell.axes)) }
                            td class="num" { (sample.round + 1) @if far.contains(&i) { span class="sr" { " (outlier)" } } }
                            @for key in &keys { td class="num" {
                                @match sample.values.get(*key) { Some(number) => (value_of(key, *number)), None => "" }
                            } }
                            td class="num" { (time(sample.seconds)) }
                        } }
                    } }
                }
            }
        }
    })
}

/// The machine and the places of images.
pub(super) fn machine(run: &Run) -> Option<Markup> {
    let environment = &run.environment;
    // Older versions stored what is known of a place twice.
    let told = |section: &Section| {
        environment.places.iter().any(|place| section.title == format!("Place {}", place.name))
    };
    Some(html! {
        div class="sheets" {
            @for place in &environment.places { (sheet(&place.name, &place_entries(place))) }
            @for section in environment.sections.iter().filter(|section| !told(section)) {
                (sheet(&section.title, &section.entries))
            }
        }
    })
}

/// The meanings of the names of the run's axes and values.
pub(super) fn words(run: &Run) -> Option<Markup> {
    let mut sheets: Vec<(String, Vec<(String, String)>)> = run
        .plan
        .axes
        .iter()
        .filter_map(|axis| {
            let values = values(run, axis).into_iter();
            let about: Vec<(String, String)> = values
                .filter_map(|value| Some((value.to_owned(), about_value(axis, value)?.to_owned())))
                .collect();
            let name = match crate::axes::about(axis) {
                Some(meaning) => format!("{}: {meaning}", title(axis)),
                None => title(axis),
            };
            (!about.is_empty()).then_some((name, about))
        })
        .collect();
    sheets.extend(run.plan.effort.as_ref().map(|effort| ("Amounts".to_owned(), amounts(effort))));
    (!sheets.is_empty()).then(|| {
        html! {
            div class="sheets" { @for (name, entries) in &sheets { (sheet(name, entries)) } }
        }
    })
}

/// Sizes of disks and loads.
fn amounts(effort: &Effort) -> Vec<(String, String)> {
    [
        ("size of a disk", bytes(effort.disk), "unless an axis sets it"),
        (
            "bytes of a job",
            bytes(effort.bytes),
            "for loads with a fixed number of bytes; for install, of all files",
        ),
        ("duration of a load", time(effort.seconds), "for all other loads"),
    ]
    .map(|(name, amount, about)| (name.to_owned(), format!("{amount}: {about}")))
    .into()
}

fn sheet(title: &str, entries: &[(String, String)]) -> Markup {
    html! {
        div class="sheet" {
            h3 { (title) }
            dl { @for (name, value) in entries { div { dt { (name) } dd { (value) } } } }
        }
    }
}

fn place_entries(place: &PlaceInfo) -> Vec<(String, String)> {
    let kind = match place.kind {
        PlaceKind::Directory => "folder",
        PlaceKind::Device => "block device",
    };
    let mut entries =
        vec![("kind".to_owned(), kind.to_owned()), ("path".to_owned(), place.path.clone())];
    let mut add = |name: &str, value: Option<String>| {
        entries
            .extend(value.filter(|value| !value.is_empty()).map(|value| (name.to_owned(), value)));
    };
    add("file system", place.file_system.clone());
    add("mount options", place.mount_options.as_ref().map(|all| all.replace(',', ", ")));
    add("device", place.device.clone());
    add("stands on", (!place.beneath.is_empty()).then(|| place.beneath.join(", ")));
    add("rotational", place.rotational.map(|turns| if turns { "yes" } else { "no" }.to_owned()));
    add("scheduler", place.scheduler.clone());
    add("write cache", place.write_cache.clone());
    for (name, value) in &place.properties {
        add(name, Some(value.clone()));
    }
    add("space", Some(format!("{} free of {}", bytes(place.free_bytes), bytes(place.total_bytes))));
    entries
}

/// How the report derives its statements from numbers.
pub(super) fn method() -> Markup {
    html! {
        ul class="method" {
            li { b { "Cells and rounds. " } "A cell is one configuration under one load. Cells run in random order, once per round, so that a slow hour does not affect only one of them." }
            li { b { "Median and interval. " } "Order statistics around the median, which assume no distribution. With fewer than six rounds the interval is the whole range, and contains the true median in fewer than 95 of 100 runs (three rounds: 75)." }
            li { b { "Times as good. " } "The geometric mean of the ratios, round by round. 2 is twice the throughput, or half the time." }
            li { b { "Noise. " } "How much a round varies is estimated from all cells of the run together, as logarithms, without the part that all cells of a load share in a round." }
            li { b { "Significant. " } "A difference is significant if its interval does not contain 1 and it is at least 2 %. The intervals follow Student's distribution. All comparisons of a page share one error probability of 5 %, half of it those with the default: of twenty pages about equal configurations, on average at most one should call anything better or worse. " code { "vdkit lab calibrate" } " tests this on a host. Fewer than three rounds decide nothing." }
            li { b { "Advice. " } "Configurations that lose data in a power failure (cache=unsafe, a file system in memory) are never advised. The others are ranked by the geometric mean over all loads. The default stays unless another one is significantly better. If a value of a choice was not measured at all, nothing is advised." }
            li { b { "Number of rounds. " } "The run ends when each comparison that matters is decided or its interval is within 12 % either way, or at its limit of rounds or time. Each test of the results makes the next decision stricter." }
            li { b { "Confidence. " } "High: five rounds or more that vary by at most 5 %, all samples even, and nothing limits the results. Fair: three rounds or more that vary by at most 15 %." }
            li { b { "Percentiles. " } "Of the requests of all rounds together. A percentile is shown only if there are enough requests: 99.99 % needs ten thousand." }
        }
    }
}
