//! Answers to questions of individual plans beyond the deciding metric: second pass, reads,
//! flushes, survival.

use super::answers::{Answer, median_of};
use crate::matrix::{Matrix, Pick};
use crate::model::{Cell, SURVIVED};
use crate::stats::median;
use crate::words::{listed, listed_most, plural, time, value_of};

/// Largest number of ways that are named individually.
const NAMED: usize = 6;

/// Duration of the second pass over the same image, compared with the first.
pub(super) fn of_second_pass(matrix: &Matrix<'_>, picks: &[Pick]) -> Option<Answer> {
    let of = |pick: &Pick, key: &str| -> Option<f64> {
        let cells = pick.cells.iter().map(|i| &matrix.run.cells[*i]);
        median(&cells.filter_map(|cell| median_of(cell, key)).collect::<Vec<f64>>())
    };
    let mut found: Vec<(f64, String)> = picks
        .iter()
        .filter_map(|pick| {
            let (first, second) = (of(pick, "elapsed_seconds")?, of(pick, "second_pass_seconds")?);
            let name = matrix.name(&pick.axes);
            Some((second, format!("{} with {name} (first pass: {})", time(second), time(first))))
        })
        .collect();
    if found.is_empty() {
        return None;
    }
    found.sort_by(|a, b| a.0.total_cmp(&b.0));
    let said: Vec<String> = found.into_iter().map(|(_, text)| text).collect();
    let question = "How long does the second pass take?".to_owned();
    let several = picks.iter().any(|pick| pick.cells.len() > 1);
    let of = if several { "; medians of all loads" } else { "" };
    Some(Answer { question, sentence: format!("{}{of}.", listed_most(&said, NAMED)) })
}

/// Number of reads to open one image, over all sizes: the program's read calls, and the reads that
/// reach the device, which differ.
pub(super) fn of_reads(matrix: &Matrix<'_>, picks: &[Pick]) -> Option<Answer> {
    let opened = |cell: &&Cell| {
        cell.axis("profile") == Some("open") && matches!(cell.axis("images"), None | Some("1"))
    };
    let range = |pick: &Pick, key: &str| -> Option<String> {
        let cells = pick.cells.iter().map(|i| &matrix.run.cells[*i]).filter(opened);
        let counts: Vec<f64> = cells.filter_map(|cell| median_of(cell, key)).collect();
        let fewest = counts.iter().copied().reduce(f64::min)?;
        let most = counts.iter().copied().reduce(f64::max)?;
        let most_said = value_of(key, most);
        Some(match fewest < most {
            true => format!("{} to {most_said}", value_of(key, fewest)),
            false => most_said,
        })
    };
    let said: Vec<String> = picks
        .iter()
        .filter_map(|pick| {
            let own = range(pick, "reads")?;
            let name = matrix.name(&pick.axes);
            Some(match range(pick, "device_reads") {
                Some(device) => format!("{own} ({device} at the device) with {name}"),
                None => format!("{own} with {name}"),
            })
        })
        .collect();
    if said.is_empty() {
        return None;
    }
    let sizes = match matrix.values("size").as_slice() {
        [first, .., last] => format!(" of {first} to {last}"),
        _ => String::new(),
    };
    let question = "How many reads does it take to open an image?".to_owned();
    let sentence = format!(
        "{}: to open one image{sizes} and read 4 KiB. The first number counts the reads of vdkit; \
         the reads at the device include the file system's metadata, read-ahead and the program's \
         own file.",
        listed_most(&said, NAMED)
    );
    Some(Answer { question, sentence })
}

/// Whether the device completed flushes, if they were counted.
pub(super) fn of_flushes(matrix: &Matrix<'_>) -> Option<Answer> {
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
        .map(|(cell, _)| matrix.name(&cell.axes))
        .collect();
    let longest = matrix
        .run
        .cells
        .iter()
        .filter_map(|cell| Some((cell, median_of(cell, "final_fsync_seconds")?)))
        .max_by(|a, b| a.1.total_cmp(&b.1));
    let all = counted.len();
    let mut sentence = match without.len() == all {
        // The kernel counts no flushes for some devices, and drops them for those without a cache.
        true => "Not counted here: no cell has a flush that the device counted".to_owned(),
        false => format!(
            "In {} of {} the device completed flushes during the load, of any program",
            all - without.len(),
            plural(all, "cell")
        ),
    };
    if without.len() < all && (1..=4).contains(&without.len()) {
        sentence.push_str(&format!("; it completed none with {}", listed(&without)));
    }
    if let Some((cell, seconds)) = longest {
        sentence.push_str(&format!(
            "; the longest final fsync took {} in the median of its rounds ({})",
            time(seconds),
            matrix.name(&cell.axes)
        ));
    }
    sentence.push('.');
    Some(Answer { question: "Did flushes reach the device?".to_owned(), sentence })
}

/// Whether a cell survived in every round, without an error that the client saw. None without a
/// result.
pub(super) fn survived(cell: &Cell) -> Option<bool> {
    let rounds = cell.values(SURVIVED);
    let errors = cell.values("io_errors");
    let sound = rounds.iter().all(|part| *part >= 1.0) && errors.iter().all(|count| *count == 0.0);
    (!rounds.is_empty()).then_some(sound)
}

/// The ways that survived, if the plan measures survival.
pub(super) fn of_survival(matrix: &Matrix<'_>) -> Option<Answer> {
    let mut came: Vec<String> = Vec::new();
    let mut broke: Vec<String> = Vec::new();
    for cell in &matrix.run.cells {
        let Some(through) = survived(cell) else { continue };
        let mut name = matrix.name(&cell.axes);
        let rounds = cell.values(SURVIVED);
        let some = rounds.iter().filter(|part| **part >= 1.0).count();
        if !through && some > 0 {
            name.push_str(&format!(" (completed {some} of {})", plural(rounds.len(), "round")));
        }
        if cell.values("machine_stops").iter().any(|stops| *stops > 0.0) {
            name.push_str(" (QEMU stopped the whole guest until it was resumed)");
        }
        if through { came.push(name) } else { broke.push(name) }
    }
    if came.is_empty() && broke.is_empty() {
        return None;
    }
    let said = |names: &[String], nothing: &str| match names.len() {
        0 => nothing.to_owned(),
        1..=NAMED => listed(names),
        many => plural(many, "cell"),
    };
    let sentence = format!(
        "{} of {} survived without an error: {}. Failed: {}.",
        came.len(),
        came.len() + broke.len(),
        said(&came, "none"),
        said(&broke, "none")
    );
    Some(Answer {
        question: "Which survive a full file system, and which fail?".to_owned(),
        sentence,
    })
}
