//! Plans: what a run measures. A plan is a small TOML file; `docs/commands/lab.md` has the keys.

mod parse;

use std::path::Path;

use crate::error::{Context, Result, bail};

pub use crate::model::Effort;
use crate::model::{Axes, PlaceKind, PlanSummary, Published};

/// A plan that was read and checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What users type.
    pub name: String,
    /// A heading.
    pub title: String,
    /// What the user learns from it.
    pub question: String,
    /// Key of the metric that decides.
    pub metric: String,
    /// Kinds of places that it can be run on.
    pub places: Vec<PlaceKind>,
    /// The axes but `backend`, in their order.
    pub axes: Vec<Axis>,
    /// Cells beside the product of the axes in a full run; each has a value for every axis.
    pub include: Vec<Axes>,
    /// The same in a quick run.
    pub quick_include: Vec<Axes>,
    /// Cells that are left out: those whose values are among these in all axes that are named.
    pub exclude: Vec<Vec<(String, Vec<String>)>>,
    /// What others are held against.
    pub baseline: Option<Axes>,
    /// A full run.
    pub full: Effort,
    /// A first answer.
    pub quick: Effort,
    /// What others have measured.
    pub published: Vec<Published>,
    /// In what their experiment differs from this one; may be empty.
    pub differs: String,
    /// Its text, as it was read.
    pub text: String,
}

/// One axis of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Its name.
    pub name: String,
    /// Its values in a full run.
    pub values: Vec<String>,
    /// Those in a quick run.
    pub quick: Vec<String>,
    /// A way to measure and no choice, whatever the axis is in other plans.
    pub condition: bool,
    /// File systems on which it is varied; on all where there is none. Elsewhere it has its first
    /// value.
    pub on: Vec<String>,
}

/// The plans that come with vdkit.
const BUILT_IN: &[(&str, &str)] = &[
    ("zvol-vs-qcow2", include_str!("../../plans/zvol-vs-qcow2.toml")),
    ("convert-table", include_str!("../../plans/convert-table.toml")),
    ("cache-modes", include_str!("../../plans/cache-modes.toml")),
    ("cold-open", include_str!("../../plans/cold-open.toml")),
    ("install", include_str!("../../plans/install.toml")),
    ("preallocation", include_str!("../../plans/preallocation.toml")),
    ("nospace", include_str!("../../plans/nospace.toml")),
];

/// All plans that come with vdkit, in the order of the list.
///
/// # Errors
/// Never, as a test sees to it.
pub fn built_in() -> Result<Vec<Plan>> {
    BUILT_IN.iter().map(|(name, text)| Plan::parse(text, &format!("{name}.toml"))).collect()
}

impl Plan {
    /// The plan of this name that comes with vdkit.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self> {
        match BUILT_IN.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => Self::parse(text, &format!("{name}.toml")),
            None => {
                let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
                bail!("unknown plan '{name}'; known: {} (a file: --plan FILE)", known.join(", "))
            }
        }
    }

    /// A plan from a file.
    ///
    /// # Errors
    /// The file cannot be read, or says something that no plan can; with file and line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text, &path.display().to_string())
    }

    /// A plan from a text. `name` says in errors where it comes from.
    ///
    /// # Errors
    /// As [`Plan::read`].
    pub fn parse(text: &str, name: &str) -> Result<Self> {
        parse::parse(text, name)
    }

    /// What goes into results.
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

    /// How much is done in a quick or a full run.
    pub fn effort(&self, quick: bool) -> Effort {
        if quick { self.quick } else { self.full }
    }
}

#[cfg(test)]
mod tests;
