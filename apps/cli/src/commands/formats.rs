//! `vdkit formats`: lists the formats and each format's options.

use clap::Args;
use serde::Serialize;
use vdkit::{FormatDriver, OptionKind, OptionSpec};

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Outcome};
use crate::output::{Output, Table};
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "formats",
    about: "List the formats, or the options of a format",
    examples: "
vdkit formats               which formats can be read and written
vdkit formats qcow2         the options of 'create' and 'convert' with -O qcow2
vdkit formats qcow2 --json  the same as JSON
",
    ..runs::<FormatsArgs>()
};

#[derive(Args, Debug)]
pub struct FormatsArgs {
    /// Show this format's options
    #[arg(value_name = "FORMAT")]
    format: Option<String>,
    #[command(flatten)]
    json: Json,
}

/// A format in the JSON answer.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct FormatAnswer {
    name: &'static str,
    description: &'static str,
    reads: bool,
    writes: bool,
    options: Vec<OptionAnswer>,
}

/// An option in the JSON answer.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct OptionAnswer {
    key: &'static str,
    kind: &'static str,
    words: Vec<&'static str>,
    default: &'static str,
    help: &'static str,
}

impl From<&OptionSpec> for OptionAnswer {
    fn from(spec: &OptionSpec) -> Self {
        let (kind, words) = match spec.kind {
            OptionKind::Size => ("size", Vec::new()),
            OptionKind::Switch => ("switch", vec!["on", "off"]),
            OptionKind::Number => ("number", Vec::new()),
            OptionKind::Word(words) => ("word", words.to_vec()),
            OptionKind::Text => ("text", Vec::new()),
        };
        Self { key: spec.key, kind, words, default: spec.default, help: spec.help }
    }
}

impl From<&dyn FormatDriver> for FormatAnswer {
    fn from(driver: &dyn FormatDriver) -> Self {
        Self {
            name: driver.name(),
            description: driver.info().description,
            reads: true,
            writes: driver.creation().is_some(),
            options: driver.options().iter().map(OptionAnswer::from).collect(),
        }
    }
}

impl Run for FormatsArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let out = &mut session.out;
        match self.format {
            Some(name) => {
                let answer = FormatAnswer::from(vdkit::format(&name)?);
                if self.json.json { out.json(&answer) } else { print_one(&answer, out) }
            }
            None => {
                let answers: Vec<_> =
                    vdkit::FORMATS.iter().map(|&driver| FormatAnswer::from(driver)).collect();
                if self.json.json { out.json(&answers) } else { print_all(&answers, out) }
            }
        }
        Ok(Exit::Done)
    }
}

fn print_all(answers: &[FormatAnswer], out: &mut Output) {
    let mut table = Table::new(&["format", "reads", "writes", "description"]);
    let yes = |truth: bool| if truth { "yes" } else { "no" }.to_owned();
    for answer in answers {
        table.row([
            answer.name.to_owned(),
            yes(answer.reads),
            yes(answer.writes),
            answer.description.to_owned(),
        ]);
    }
    table.print(out, 0);
    out.line("\n'vdkit formats FORMAT' lists the options of one.")
}

fn print_one(answer: &FormatAnswer, out: &mut Output) {
    out.line(format!("{}: {}", answer.name, answer.description));
    if answer.options.is_empty() {
        return out.line("It has no options.");
    }
    out.line("\nOptions, for -o KEY=VALUE:\n");
    let mut table = Table::new(&["key", "value", "default", "meaning"]);
    for option in &answer.options {
        let value = match option.kind {
            "word" | "switch" => option.words.join("|"),
            "size" => "SIZE".to_owned(),
            "number" => "N".to_owned(),
            _ => "TEXT".to_owned(),
        };
        let default = if option.default.is_empty() { "-" } else { option.default };
        table.row([option.key.to_owned(), value, default.to_owned(), option.help.to_owned()]);
    }
    table.print(out, 2)
}
