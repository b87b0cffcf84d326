//! Writes a verdict for terminals and for other programs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Answer, Missing, SetAside, Verdict};
use crate::model::Axes;
use crate::stats::Gain;
use crate::words::{first_of, label, percent, sentence, span, times};

/// The JSON form of a verdict.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Told {
    not_measured: Vec<ToldMissing>,
    advice: &'static str,
    sentence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leading: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<ToldGain>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden: Option<f64>,
    confidence: ToldConfidence,
    ties: Vec<Names>,
    exceptions: Vec<ToldException>,
    set_aside: Vec<ToldSetAside>,
    left_out: Vec<Names>,
    answers: Vec<ToldAnswer>,
    cautions: Vec<String>,
    commands: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    libvirt_xml: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_mode: Option<String>,
}

/// Values by axis name.
type Names = BTreeMap<String, String>;

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct ToldMissing {
    what: Names,
    state: &'static str,
    cells: usize,
    reason: String,
    blocks_advice: bool,
}

impl From<&Missing> for ToldMissing {
    fn from(missing: &Missing) -> Self {
        Self {
            what: names(&missing.what),
            state: missing.state,
            cells: missing.cells,
            reason: missing.reason.clone(),
            blocks_advice: missing.blocks,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct ToldGain {
    ratio: f64,
    low: f64,
    high: f64,
    coverage: f64,
    rounds: usize,
    verdict: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct ToldConfidence {
    level: &'static str,
    reason: String,
}

#[derive(Clone, Debug, Serialize)]
struct ToldException {
    load: Names,
    best: Names,
    gain: ToldGain,
}

#[derive(Clone, Debug, Serialize)]
struct ToldSetAside {
    way: Names,
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<ToldGain>,
    reason: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct ToldAnswer {
    question: String,
    answer: String,
}

fn names(axes: &Axes) -> Names {
    axes.iter().cloned().collect()
}

fn all(ways: &[Axes]) -> Vec<Names> {
    ways.iter().map(names).collect()
}

impl From<&Gain> for ToldGain {
    fn from(gain: &Gain) -> Self {
        Self {
            ratio: gain.ratio,
            low: gain.interval.low,
            high: gain.interval.high,
            coverage: gain.interval.coverage,
            rounds: gain.rounds,
            verdict: gain.decision.word(),
        }
    }
}

impl Verdict {
    /// The verdict for other programs.
    pub fn told(&self) -> Told {
        Told {
            not_measured: self.missing.iter().map(ToldMissing::from).collect(),
            advice: self.advice.word(),
            sentence: self.sentence.clone(),
            leading: self.leading.as_ref().map(names),
            best: self.best.as_ref().map(names),
            baseline: self.baseline.as_ref().map(names),
            gain: self.gain.as_ref().map(ToldGain::from),
            hidden: self.hidden,
            confidence: ToldConfidence {
                level: self.confidence.level.word(),
                reason: self.confidence.words.clone(),
            },
            ties: all(&self.ties),
            exceptions: self
                .exceptions
                .iter()
                .map(|found| ToldException {
                    load: names(&found.load),
                    best: names(&found.axes),
                    gain: (&found.gain).into(),
                })
                .collect(),
            set_aside: self
                .set_aside
                .iter()
                .map(|way| ToldSetAside {
                    way: names(&way.axes),
                    gain: way.gain.as_ref().map(ToldGain::from),
                    reason: way.reason,
                })
                .collect(),
            left_out: all(&self.left_out),
            answers: self
                .answers
                .iter()
                .map(|Answer { question, sentence }| ToldAnswer {
                    question: question.clone(),
                    answer: sentence.clone(),
                })
                .collect(),
            cautions: self.cautions.clone(),
            commands: self.setup.iter().flat_map(|setup| setup.commands.clone()).collect(),
            libvirt_xml: self.setup.as_ref().map(|setup| setup.xml.clone()),
            cache_mode: self.setup.as_ref().and_then(|setup| setup.cache.clone()),
        }
    }

    /// The verdict for a terminal: what was not measured, the advice and its gain, problems, and
    /// the setup.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.not_measured();
        lines.push(self.sentence.clone());
        if let (Some(gain), Some(base)) = (&self.gain, &self.baseline) {
            let surely = match gain.is_hint() {
                true => "the range of what was measured".to_owned(),
                false => format!(
                    "{} interval, all comparisons together",
                    percent(gain.interval.coverage)
                ),
            };
            let span = span(gain.interval.low, gain.interval.high);
            let times = times(gain.ratio);
            lines
                .push(format!("against the default ({}): {times}x, {span}; {surely}", label(base)));
        }
        let confidence = &self.confidence;
        lines.push(format!("confidence: {}. {}", confidence.level.word(), confidence.words));
        if !self.ties.is_empty() {
            lines.push(format!("cannot be told from it: {}", first_of(&self.ties)));
        }
        for found in self.exceptions.iter().take(NAMED) {
            let (load, way) = (label(&found.load), label(&found.axes));
            lines.push(format!("better under {load}: {way}, {}x", times(found.gain.ratio)));
        }
        for SetAside { axes, gain, reason } in self.set_aside.iter().take(NAMED) {
            let gain = gain.as_ref().map(|gain| format!(" ({}x)", times(gain.ratio)));
            let gain = gain.unwrap_or_default();
            lines.push(format!("faster, and not advised: {}{gain}, as {reason}", label(axes)));
        }
        if !self.left_out.is_empty() {
            lines.push(format!("not measured under all loads: {}", first_of(&self.left_out)));
        }
        lines.extend(self.cautions.iter().map(|caution| format!("caution: {caution}")));
        let Some(setup) = &self.setup else { return lines };
        if !setup.commands.is_empty() {
            lines.extend([String::new(), "to make that disk:".to_owned()]);
            lines.extend(setup.commands.iter().map(|command| format!("  {command}")));
        }
        lines.extend([String::new(), "to give it to a guest (libvirt):".to_owned()]);
        lines.extend(setup.xml.lines().map(|line| format!("  {line}")));
        lines.extend(setup.cache.clone());
        lines
    }

    /// What was not measured, one sentence each.
    pub fn not_measured(&self) -> Vec<String> {
        let mut all: Vec<String> =
            self.missing.iter().map(|missing| sentence(&missing.sentence())).collect();
        if let Some(more @ 1..) = all.len().checked_sub(MISSING_NAMED) {
            all.truncate(MISSING_NAMED);
            all.push(format!("{more} more were not measured: the report names them."));
        }
        all
    }
}

/// Largest number of exceptions and similar items printed individually; the report has the rest.
const NAMED: usize = 3;
/// Larger for parts that were not measured, because nobody may miss them.
const MISSING_NAMED: usize = 6;
