//! `vdkit ctl`: a word to a running service.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use serde_json::Value;
use vdkit::export::{Command, ask};
use vdkit::parse_size;

use super::{Group, Run, Subcommand, augment, run};
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome};
use crate::session::Session;

/// The row of the table.
pub const COMMAND: Subcommand = Subcommand {
    name: "ctl",
    about: "Ask or command a running 'vdkit serve'",
    group: Group::Serve,
    details: "\
SOCKET is what 'vdkit serve --control SOCKET' listens at.

  status                  what is served, and whether anything waits
  stats                   requests, bytes, errors and latencies
  metrics                 the same as text for Prometheus
  flush                   make durable what clients were answered
  pause                   keep all requests waiting
  resume                  let them go on; try again at once what waits for space
  snapshot NAME           take a snapshot inside the image, between two requests
  snapshot-delete NAME    remove one
  resize SIZE             make the disk larger
  quit                    end the service, as SIGTERM does",
    examples: "
vdkit ctl /run/disk.ctl status
vdkit ctl /run/disk.ctl snapshot before-update
vdkit ctl /run/disk.ctl resume                     after space was made
",
    augment: augment::<CtlArgs>,
    run: run::<CtlArgs>,
};

/// Arguments of `vdkit ctl`.
#[derive(Args, Debug)]
pub struct CtlArgs {
    /// The service's control socket
    #[arg(value_name = "SOCKET", value_hint = ValueHint::FilePath)]
    socket: PathBuf,
    /// status, stats, metrics, flush, pause, resume, snapshot, snapshot-delete, resize or quit
    #[arg(value_name = "ACTION", hide_possible_values = true)]
    action: Action,
    /// The name of a snapshot, or a size
    #[arg(value_name = "VALUE")]
    value: Option<String>,
    #[command(flatten)]
    json: Json,
}

/// The value of ACTION.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Action {
    Status,
    Stats,
    Metrics,
    Flush,
    Pause,
    Resume,
    Snapshot,
    SnapshotDelete,
    Resize,
    Quit,
}

impl CtlArgs {
    fn command(&self) -> Result<Command, Failure> {
        let needs = |what| Failure::usage(format!("{what}; see: vdkit help ctl"));
        match (self.action, self.value.clone()) {
            (Action::Status, None) => Ok(Command::Status),
            (Action::Stats, None) => Ok(Command::Stats),
            (Action::Metrics, None) => Ok(Command::Metrics),
            (Action::Flush, None) => Ok(Command::Flush),
            (Action::Pause, None) => Ok(Command::Pause),
            (Action::Resume, None) => Ok(Command::Resume),
            (Action::Quit, None) => Ok(Command::Quit),
            (Action::Snapshot, Some(name)) => Ok(Command::Snapshot { name }),
            (Action::SnapshotDelete, Some(name)) => Ok(Command::SnapshotDelete { name }),
            (Action::Resize, Some(size)) => Ok(Command::Resize { size: parse_size(&size)? }),
            (Action::Snapshot | Action::SnapshotDelete, None) => Err(needs("it needs a NAME")),
            (Action::Resize, None) => Err(needs("it needs a SIZE")),
            (_, Some(_)) => Err(needs("this action takes no VALUE")),
        }
    }
}

/// An answer as lines of `key: value`.
fn lines(prefix: &str, value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix} {key}") };
                lines(&key.replace('-', " "), value, out);
            }
        }
        Value::Array(entries) => {
            for entry in entries {
                let kind = entry["kind"].as_str().unwrap_or_default();
                let mut rest = entry.clone();
                if let Some(rest) = rest.as_object_mut() {
                    rest.remove("kind");
                }
                lines(kind, &rest, out);
            }
        }
        Value::String(text) => out.push(format!("{prefix}: {text}")),
        other => out.push(format!("{prefix}: {other}")),
    }
}

impl Run for CtlArgs {
    const ROW: &'static Subcommand = &COMMAND;

    fn run(self, session: &mut Session) -> Outcome {
        let command = self.command()?;
        let answer = ask(&self.socket, &command).map_err(|error| match error.kind() {
            io::ErrorKind::Other => Failure::failed(error.to_string()),
            _ => Failure::failed(format!("{}: no service answers: {error}", self.socket.display())),
        })?;
        if let Value::String(text) = &answer {
            session.out.bytes(text.as_bytes())?;
        } else if self.json.json {
            session.out.json(&answer)?;
        } else {
            let mut text = Vec::new();
            lines("", &answer, &mut text);
            for line in text {
                session.out.line(line)?;
            }
        }
        Ok(Exit::Done)
    }
}
