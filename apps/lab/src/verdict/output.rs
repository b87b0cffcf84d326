//! Writes a verdict for terminals and for other programs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Answer, Missing, SetAside, Verdict};
use crate::model::Axes;
use crate::stats::Gain;
use crate::words::{first_of, label, percent, plural, span, times};

/// The JSON form of a verdict.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct VerdictJson {
    not_measured: Vec<MissingJson>,
    advice: &'static str,
    sentence: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leading: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<Names>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<GainJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden: Option<f64>,
    confidence: ConfidenceJson,
    ties: Vec<Names>,
    exceptions: Vec<ExceptionJson>,
    set_aside: Vec<SetAsideJson>,
    left_out: Vec<Names>,
    answers: Vec<AnswerJson>,
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
struct MissingJson {
    what: Names,
    state: &'static str,
    cells: usize,
    reason: String,
    blocks_advice: bool,
}

impl From<&Missing> for MissingJson {
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
struct GainJson {
    ratio: f64,
    low: f64,
    high: f64,
    coverage: f64,
    rounds: usize,
    verdict: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct ConfidenceJson {
    level: &'static str,
    reason: String,
}

#[derive(Clone, Debug, Serialize)]
struct ExceptionJson {
    load: Names,
    best: Names,
    gain: GainJson,
}

#[derive(Clone, Debug, Serialize)]
struct SetAsideJson {
    way: Names,
    #[serde(skip_serializing_if = "Option::is_none")]
    gain: Option<GainJson>,
    reason: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct AnswerJson {
    question: String,
    answer: String,
}

fn names(axes: &Axes) -> Names {
    axes.iter().cloned().collect()
}

fn all(ways: &[Axes]) -> Vec<Names> {
    ways.iter().map(names).collect()
}

impl From<&Gain> for GainJson {
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
    pub fn json(&self) -> VerdictJson {
        VerdictJson {
            not_measured: self.missing.iter().map(MissingJson::from).collect(),
            advice: self.advice.word(),
            sentence: self.sentence.clone(),
            leading: self.leading.as_ref().map(names),
            best: self.best.as_ref().map(names),
            baseline: self.baseline.as_ref().map(names),
            gain: self.gain.as_ref().map(GainJson::from),
            hidden: self.hidden,
            confidence: ConfidenceJson {
                level: self.confidence.level.word(),
                reason: self.confidence.words.clone(),
            },
            ties: all(&self.ties),
            exceptions: self
                .exceptions
                .iter()
                .map(|found| ExceptionJson {
                    load: names(&found.load),
                    best: names(&found.axes),
                    gain: (&found.gain).into(),
                })
                .collect(),
            set_aside: self
                .set_aside
                .iter()
                .map(|way| SetAsideJson {
                    way: names(&way.axes),
                    gain: way.gain.as_ref().map(GainJson::from),
                    reason: way.reason,
                })
                .collect(),
            left_out: all(&self.left_out),
            answers: self
                .answers
                .iter()
                .map(|Answer { question, sentence }| AnswerJson {
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
        let not_measured = self.not_measured().into_iter();
        let mut lines: Vec<String> =
            not_measured.map(|part| format!("not measured: {part}")).collect();
        lines.push(self.sentence.clone());
        if let (Some(gain), Some(base)) = (&self.gain, &self.baseline) {
            let which = match gain.is_hint() {
                true => "range of the rounds".to_owned(),
                false => format!(
                    "{} interval for all comparisons together",
                    percent(gain.interval.coverage)
                ),
            };
            let span = span(gain.interval.low, gain.interval.high);
            let times = times(gain.ratio);
            lines.push(format!("against the default ({}): {times}x; {which}: {span}", label(base)));
        }
        let confidence = &self.confidence;
        lines.push(format!("confidence: {}; {}", confidence.level.word(), confidence.words));
        if !self.ties.is_empty() {
            lines.push(format!("not significantly different: {}", first_of(&self.ties)));
        }
        for found in self.exceptions.iter().take(NAMED) {
            let (load, way) = (label(&found.load), label(&found.axes));
            lines.push(format!("better under {load}: {way}, {}x", times(found.gain.ratio)));
        }
        for SetAside { axes, gain, reason } in self.set_aside.iter().take(NAMED) {
            let gain = gain.as_ref().map(|gain| format!(" ({}x)", times(gain.ratio)));
            let gain = gain.unwrap_or_default();
            lines.push(format!("faster, but not advised: {}{gain}: {reason}", label(axes)));
        }
        if !self.left_out.is_empty() {
            lines.push(format!(
                "not compared, because not measured under all loads: {}",
                first_of(&self.left_out)
            ));
        }
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

/// Largest number of exceptions and similar items printed individually; the report has the rest.
const NAMED: usize = 3;
/// Larger for parts that were not measured, because nobody may miss them.
const MISSING_NAMED: usize = 6;
