//! Writes a verdict for terminals and for other programs.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use super::{Missing, SetAside, Setup, Verdict};
use crate::model::Axes;
use crate::stats::Gain;
use crate::words::{first_of, label, percent, plural, span, times};

fn by_name(axes: &Axes) -> BTreeMap<&str, &str> {
    axes.iter().map(|(axis, value)| (axis.as_str(), value.as_str())).collect()
}

/// Writes axes as an object: values by the names of axes.
pub(super) fn names<S: Serializer>(axes: &Axes, serializer: S) -> Result<S::Ok, S::Error> {
    by_name(axes).serialize(serializer)
}

/// As [`names`], for axes that may be none.
pub(super) fn optional_names<S: Serializer>(
    axes: &Option<Axes>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    axes.as_ref().map(by_name).serialize(serializer)
}

/// As [`names`], for several ways.
pub(super) fn all_names<S: Serializer>(ways: &[Axes], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(ways.iter().map(by_name))
}

/// Writes a setup. Without one, the list of commands is empty.
pub(super) fn optional_setup<S: Serializer>(
    setup: &Option<Setup>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    setup.clone().unwrap_or_default().serialize(serializer)
}

/// The interval of a gain, or with too few rounds the range.
pub(crate) fn interval(gain: &Gain) -> String {
    let span = span(gain.interval.low, gain.interval.high);
    match gain.is_hint() {
        true => format!("range of the rounds: {span}"),
        false => {
            let coverage = percent(gain.interval.coverage);
            format!("{coverage} interval for all comparisons together: {span}")
        }
    }
}

impl Verdict {
    /// The verdict for a terminal: what was not measured, the advice and its gain, problems, and
    /// the setup.
    pub fn lines(&self) -> Vec<String> {
        let not_measured = self.not_measured().into_iter();
        let mut lines: Vec<String> =
            not_measured.map(|part| format!("not measured: {part}")).collect();
        lines.push(self.sentence.clone());
        if let (Some(gain), Some(base)) = (&self.gain, &self.baseline) {
            let (base, times, interval) = (label(base), times(gain.ratio), interval(gain));
            lines.push(format!("against the default ({base}): {times}x; {interval}"));
        }
        let confidence = &self.confidence;
        lines.push(format!("confidence: {}; {}", confidence.level.word(), confidence.words));
        if !self.ties.is_empty() {
            let what = if self.survival { SURVIVED_TOO } else { "not significantly different" };
            lines.push(format!("{what}: {}", first_of(&self.ties)));
        }
        for found in self.exceptions.iter().take(NAMED) {
            let (load, way) = (label(&found.load), label(&found.axes));
            lines.push(format!("better under {load}: {way}, {}x", times(found.gain.ratio)));
        }
        for SetAside { axes, gain, reason } in self.set_aside.iter().take(NAMED) {
            let gain = gain.as_ref().map(|gain| format!(" ({}x)", times(gain.ratio)));
            let gain = gain.unwrap_or_default();
            lines.push(format!("better, but not advised: {}{gain}: {reason}", label(axes)));
        }
        lines.extend(self.not_compared());
        lines.extend(self.cautions.iter().map(|caution| format!("caution: {caution}")));
        let Some(setup) = &self.setup else { return lines };
        if !setup.commands.is_empty() {
            lines.extend([String::new(), "to create the disk:".to_owned()]);
            lines.extend(setup.commands.iter().map(|command| format!("  {command}")));
        }
        lines.extend([String::new(), "to attach it to a guest (libvirt):".to_owned()]);
        lines.extend(setup.xml.lines().map(|line| format!("  {line}")));
        lines.extend(setup.cache.clone());
        lines
    }

    /// The ways that were not compared, if there are any.
    pub fn not_compared(&self) -> Option<String> {
        let named = first_of(&self.left_out);
        (!named.is_empty())
            .then(|| format!("not compared, because not measured under all loads: {named}"))
    }

    /// The parts of the plan that were not measured.
    pub fn not_measured(&self) -> Vec<String> {
        let mut all: Vec<String> = self.missing.iter().map(Missing::described).collect();
        if let Some(more @ 1..) = all.len().checked_sub(MISSING_NAMED) {
            all.truncate(MISSING_NAMED);
            all.push(format!("{} of the plan, which the report lists", plural(more, "more part")));
        }
        all
    }
}

/// The name of the list of other survivors.
pub(crate) const SURVIVED_TOO: &str = "survived as well";

/// Largest number of exceptions and similar items printed individually; the report has the rest.
const NAMED: usize = 3;
/// Larger for parts that were not measured, because nobody may miss them.
const MISSING_NAMED: usize = 6;
