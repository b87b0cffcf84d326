//! `vdkit lab list` and `vdkit lab show`: print plans.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit_lab::axes;
use vdkit_lab::plan::{self, Axis, Effort, Plan};
use vdkit_lab::words::plural;

use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::output::{Table, bytes_short};
use crate::session::Session;

#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Listed {
    name: String,
    title: String,
    question: String,
}

impl ListArgs {
    pub(super) fn run(self, session: &mut Session) -> Outcome {
        let plans = plan::built_in()?;
        if self.json.json {
            let list = plans.into_iter().map(|plan| Listed {
                name: plan.name,
                title: plan.title,
                question: plan.question,
            });
            session.out.json(&list.collect::<Vec<_>>());
            return Ok(Exit::Done);
        }
        let mut table = Table::new(&["plan", "question"]);
        for plan in plans {
            table.row([plan.name, plan.question]);
        }
        table.print(&mut session.out, 0);
        Ok(Exit::Done)
    }
}

/// Options that select a built-in plan or a plan file.
#[derive(Args, Clone, Debug)]
pub struct PlanChoice {
    /// A built-in plan
    #[arg(value_name = "PLAN", conflicts_with = "file")]
    name: Option<String>,
    /// A plan of your own, in TOML
    #[arg(long = "plan", value_name = "FILE", id = "file", value_hint = ValueHint::FilePath)]
    file: Option<PathBuf>,
}

impl PlanChoice {
    /// Whether the user selected a plan.
    pub fn is_named(&self) -> bool {
        self.name.is_some() || self.file.is_some()
    }

    /// Reads the plan, and returns it with the name of its source.
    ///
    /// # Errors
    /// No built-in plan has this name, or the text is not a valid plan.
    pub fn read(&self) -> Result<(Plan, String), Failure> {
        let usage = |error: vdkit_lab::Error| Failure::usage(format!("{error:#}"));
        match (&self.file, &self.name) {
            (Some(path), _) => Ok((Plan::read(path).map_err(usage)?, path.display().to_string())),
            (None, Some(name)) => Ok((Plan::named(name).map_err(usage)?, format!("{name}.toml"))),
            (None, None) => Err(Failure::usage("name a plan; 'vdkit lab list' lists them")),
        }
    }
}

#[derive(Args, Debug)]
pub struct ShowArgs {
    #[command(flatten)]
    plan: PlanChoice,
    #[command(flatten)]
    json: Json,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Shown<'a> {
    name: &'a str,
    title: &'a str,
    question: &'a str,
    metric: &'a str,
    axes: &'a [Axis],
    full: Effort,
    quick: Effort,
    published: usize,
    text: &'a str,
}

impl ShowArgs {
    pub(super) fn run(self, session: &mut Session) -> Outcome {
        let (plan, _) = self.plan.read()?;
        if self.json.json {
            session.out.json(&Shown {
                name: &plan.name,
                title: &plan.title,
                question: &plan.question,
                metric: &plan.metric,
                axes: &plan.axes,
                full: plan.full,
                quick: plan.quick,
                published: plan.published.len(),
                text: &plan.text,
            });
            return Ok(Exit::Done);
        }
        session.out.line(format!("{}: {}", plan.name, plan.title));
        session.out.line(&plan.question);
        session.out.line("");
        let mut table = Table::new(&["axis", "value", "", "meaning"]);
        for axis in &plan.axes {
            for (i, value) in axis.values.iter().enumerate() {
                let quick = if axis.quick.contains(value) { "quick" } else { "" };
                let about = axes::about_value(&axis.name, value).unwrap_or_default();
                let name = if i == 0 { axis.name.as_str() } else { "" };
                table.row([name.to_owned(), value.clone(), quick.to_owned(), about.to_owned()]);
            }
        }
        table.print(&mut session.out, 0);
        session.out.line("");
        for (name, effort) in [("full", plan.full), ("quick", plan.quick)] {
            session.out.line(format!(
                "{name} run: {}, loads of {} s, disk of {}, {} per job or tree of files",
                plural(effort.rounds as usize, "round"),
                effort.seconds,
                bytes_short(effort.disk),
                bytes_short(effort.bytes)
            ));
        }
        Ok(Exit::Done)
    }
}
