//! Plans: what a run measures. A plan is a small TOML file; `docs/commands/lab.md` documents its
//! keys.

mod parse;

use std::path::Path;

use serde::Serialize;

use crate::error::{Context, Result, bail};

pub use crate::model::Effort;
use crate::model::{Axes, PlaceKind, PlanSummary, Published};

/// A validated plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The name on the command line.
    pub name: String,
    /// A heading.
    pub title: String,
    /// The question that the plan answers.
    pub question: String,
    /// Key of the metric that decides.
    pub metric: String,
    /// Kinds of places on which the plan can run.
    pub places: Vec<PlaceKind>,
    /// The axes except `backend`, in order.
    pub axes: Vec<Axis>,
    /// Additional cells of a full run; each has a value for every axis.
    pub include: Vec<Axes>,
    /// Additional cells of a quick run.
    pub quick_include: Vec<Axes>,
    /// Excluded cells: on every named axis, the cell's value is one of those listed.
    pub exclude: Vec<Vec<(String, Vec<String>)>>,
    /// The default that other ways are compared with.
    pub baseline: Option<Axes>,
    /// Amount of work in a full run.
    pub full: Effort,
    /// Amount of work in a quick run.
    pub quick: Effort,
    /// Published numbers.
    pub published: Vec<Published>,
    /// How the published experiment differs from this one; may be empty.
    pub differs: String,
    /// The plan's source text.
    pub text: String,
}

/// One axis of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Values in a full run.
    pub values: Vec<String>,
    /// Values in a quick run.
    pub quick: Vec<String>,
    /// Whether the axis is a condition in this plan, whatever its role is in others.
    #[serde(skip)]
    pub condition: bool,
    /// File systems on which the axis is varied; empty for all. Elsewhere the axis has its first
    /// value.
    #[serde(skip)]
    pub on: Vec<String>,
}

const BUILT_IN: &[(&str, &str)] = &[
    ("zvol-vs-qcow2", include_str!("../../plans/zvol-vs-qcow2.toml")),
    ("convert-table", include_str!("../../plans/convert-table.toml")),
    ("cache-modes", include_str!("../../plans/cache-modes.toml")),
    ("cold-open", include_str!("../../plans/cold-open.toml")),
    ("install", include_str!("../../plans/install.toml")),
    ("preallocation", include_str!("../../plans/preallocation.toml")),
    ("nospace", include_str!("../../plans/nospace.toml")),
];

/// Every built-in plan, in the order of the list.
///
/// # Errors
/// Never; a test parses every built-in plan.
pub fn built_in() -> Result<Vec<Plan>> {
    BUILT_IN.iter().map(|(name, text)| Plan::parse(text, &format!("{name}.toml"))).collect()
}

impl Plan {
    /// The built-in plan of this name.
    pub fn named(name: &str) -> Result<Self> {
        match BUILT_IN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Self::parse(text, &format!("{name}.toml")),
            None => {
                let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
                bail!("unknown plan '{name}'; known: {} (a file: --plan FILE)", known.join(", "))
            }
        }
    }

    /// Reads a plan from a file.
    ///
    /// # Errors
    /// The file cannot be read, or is no valid plan; the error gives file and line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Parses a plan. `name` is the source in error messages.
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        parse::parse(text, name)
    }

    /// The part of the plan that is stored with the results.
    pub fn summary(&self) -> PlanSummary {
        let axes = self.axes.iter().map(|axis| axis.name.clone());
        let conditions = self.axes.iter().filter(|axis| axis.condition);
        PlanSummary {
            conditions: conditions.map(|axis| axis.name.clone()).collect(),
            name: self.name.clone(),
            title: self.title.clone(),
            question: self.question.clone(),
            axes: std::iter::once(crate::axes::BACKEND.to_owned()).chain(axes).collect(),
            metric: self.metric.clone(),
            baseline: self.baseline.clone(),
            differs: self.differs.clone(),
            effort: None,
        }
    }

    /// The amount of work in a quick or a full run.
    pub fn effort(&self, quick: bool) -> Effort {
        if quick { self.quick } else { self.full }
    }
}

#[cfg(test)]
mod tests;
