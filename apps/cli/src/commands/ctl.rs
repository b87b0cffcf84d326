//! `vdkit ctl`: sends one request to a running service.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum, ValueHint};
use serde_json::{Value, json};
use vdkit::Progress;
use vdkit::serve::{Command, ask};
use vdkit_qemu::dates;

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, ProgressOption, print_notes, size};
use crate::failure::{Exit, Failure, Outcome, not_answered};
use crate::output::bytes_long;
use crate::session::Session;

/// Interval between two checks whether a commit has finished.
const TICK: Duration = Duration::from_millis(20);
/// Progress is queried once in so many checks.
const TICKS_PER_QUERY: u32 = 10;

pub const COMMAND: Subcommand = Subcommand {
    name: "ctl",
    about: "Query or control a running 'vdkit serve'",
    details: "\
SOCKET is the socket of 'vdkit serve --control SOCKET'.

  status                  the served image, and whether anything waits
  stats                   requests, bytes, errors and latencies
  metrics                 the same as text for Prometheus
  flush                   make completed writes durable
  pause                   hold all requests
  resume                  continue them; retry writes that wait for space at once
  snapshot NAME           take a snapshot inside the image, between two requests
  snapshot-delete NAME    delete a snapshot
  bitmap-list             list the image's dirty bitmaps
  bitmap-add NAME         record writes from now on; NBD clients that connect later can query it
  bitmap-remove NAME      remove a bitmap
  bitmap-clear NAME       clear its marks
  bitmap-enable NAME      start recording
  bitmap-disable NAME     stop recording
  bitmap-merge SRC --into NAME
                          add the marks of SRC to NAME
  snapshot-external FILE  continue with a new overlay FILE; the image is only read from then on
  commit                  move the image's content into its backing image while clients write, and
                          continue with the backing image; waits for the end
  commit-cancel           stop a commit; nothing is lost, and it can be started again
  resize SIZE             enlarge the disk
  quit                    end the service, as SIGTERM does",
    examples: "
vdkit ctl /run/disk.ctl status
vdkit ctl /run/disk.ctl snapshot before-update
vdkit ctl /run/disk.ctl snapshot-external /images/disk-2.qcow2
vdkit ctl /run/disk.ctl commit
vdkit ctl /run/disk.ctl bitmap-add since-monday
vdkit ctl /run/disk.ctl resume                     after freeing space
",
    ..runs::<CtlArgs>()
};

#[derive(Args, Debug)]
pub struct CtlArgs {
    /// The service's control socket
    #[arg(value_name = "SOCKET", value_hint = ValueHint::FilePath)]
    socket: PathBuf,
    /// Action: status, stats, flush, snapshot ...; see above
    #[arg(value_name = "ACTION", hide_possible_values = true)]
    action: Action,
    /// Values of the action: a name, a file, a size
    #[arg(value_name = "VALUE", num_args = 0..=2)]
    values: Vec<String>,
    /// For bitmap-add: bytes per mark, a power of two from 512 to 2G
    ///
    /// The default is the cluster size, between 4K and 64K.
    #[arg(short = 'g', long, value_name = "SIZE", value_parser = size)]
    granularity: Option<u64>,
    /// For bitmap-add: create the bitmap disabled
    #[arg(long)]
    disabled: bool,
    /// For bitmap-merge: the bitmap that gets the marks
    #[arg(long, value_name = "NAME")]
    into: Option<String>,
    /// For commit: proceed even if other images or snapshots would be damaged
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    progress: ProgressOption,
    #[command(flatten)]
    json: Json,
}

/// An action, with the names of its values in messages and in the [`Command`].
#[derive(Clone, Copy, Debug)]
struct Action {
    name: &'static str,
    values: &'static [(&'static str, &'static str)],
}

const fn of(name: &'static str, values: &'static [(&'static str, &'static str)]) -> Action {
    Action { name, values }
}

const NAME: &[(&str, &str)] = &[("NAME", "name")];
const ACTIONS: &[Action] = &[
    of("status", &[]),
    of("stats", &[]),
    of("metrics", &[]),
    of("flush", &[]),
    of("pause", &[]),
    of("resume", &[]),
    of("snapshot", NAME),
    of("snapshot-delete", NAME),
    of("snapshot-external", &[("FILE", "overlay")]),
    of("commit", &[]),
    of("commit-cancel", &[]),
    of("bitmap-list", &[]),
    of("bitmap-add", NAME),
    of("bitmap-remove", NAME),
    of("bitmap-clear", NAME),
    of("bitmap-enable", NAME),
    of("bitmap-disable", NAME),
    of("bitmap-merge", &[("SRC", "source"), ("INTO", "into")]),
    of("resize", &[("SIZE", "size")]),
    of("quit", &[]),
];

impl ValueEnum for Action {
    fn value_variants<'a>() -> &'a [Self] {
        ACTIONS
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name))
    }
}

impl CtlArgs {
    /// Checks that the action's required arguments are there and no others.
    fn check(&self) -> Result<(), Failure> {
        let usage = |what: String| Err(Failure::usage(format!("{what}; see: vdkit help ctl")));
        let Action { name, values } = self.action;
        if name != "bitmap-merge" && self.into.is_some() {
            return usage("--into is for bitmap-merge".to_owned());
        }
        let wanted = if self.into.is_some() { &values[..1] } else { values };
        if let Some((missing, _)) = wanted.get(self.values.len()) {
            return usage(format!("'{name}' needs a {missing}"));
        }
        if self.values.len() > wanted.len() {
            let wanted: Vec<&str> = wanted.iter().map(|(shown, _)| *shown).collect();
            return usage(if wanted.is_empty() {
                format!("'{name}' takes no VALUE")
            } else {
                format!("'{name}' takes {} alone", wanted.join(" "))
            });
        }
        if name != "bitmap-add" && (self.granularity.is_some() || self.disabled) {
            return usage("--granularity and --disabled are for bitmap-add".to_owned());
        }
        if name != "commit" && self.force {
            return usage("--force is for commit".to_owned());
        }
        Ok(())
    }

    fn command(&self) -> Result<Command, Failure> {
        self.check()?;
        let Action { name, values } = self.action;
        let mut command = json!({ "command": name });
        for ((shown, key), text) in values.iter().zip(self.values.iter().chain(&self.into)) {
            command[*key] = match *shown {
                "SIZE" => size(text).map_err(Failure::usage)?.into(),
                _ => text.as_str().into(),
            };
        }
        match name {
            "bitmap-add" => {
                command["granularity"] = self.granularity.into();
                command["disabled"] = self.disabled.into();
            }
            "commit" => command["force"] = self.force.into(),
            "resize" => print_notes(),
            _ => {}
        }
        let mut command: Command = serde_json::from_value(command)
            .map_err(|error| Failure::failed(format!("not a command: {error}")))?;
        if let Command::SnapshotExternal { overlay } = &mut command {
            // Absolute, because the service may have another working directory.
            *overlay = std::path::absolute(&*overlay).map_err(|error| {
                Failure::failed(format!("the current folder is not there: {error}"))
            })?;
        }
        Ok(command)
    }
}

impl CtlArgs {
    fn ask(&self, command: &Command) -> Result<Value, Failure> {
        ask(&self.socket, command).map_err(|error| match error.kind() {
            io::ErrorKind::Other => Failure::failed(error.to_string()),
            _ => not_answered(&self.socket, &error),
        })
    }

    /// Waits for a commit to finish and shows its progress. A signal cancels the commit.
    fn commit(&self, command: &Command, session: &mut Session) -> Result<Value, Failure> {
        let stop = session.cancel_on_signal()?;
        let progress = self.progress.reporter("commit");
        let done = std::thread::scope(|scope| {
            // Without a second thread, no signal could cancel the commit.
            let commit = std::thread::Builder::new()
                .spawn_scoped(scope, || self.ask(command))
                .map_err(Failure::no_thread)?;
            let (mut cancelled, mut ticks) = (false, 0_u32);
            while !commit.is_finished() {
                std::thread::sleep(TICK);
                ticks += 1;
                if stop.is_cancelled() && !cancelled {
                    cancelled = self.ask(&Command::CommitCancel).is_ok();
                }
                if ticks.is_multiple_of(TICKS_PER_QUERY) {
                    self.query_progress(&progress);
                }
            }
            commit.join().unwrap_or_else(|_| {
                let text = "the command that waited for the commit failed; 'status' shows whether it is running";
                Err(Failure::failed(text))
            })
        });
        progress.finish();
        let hint = "unless it says otherwise, the disk is as before, and it can be run again";
        done.map_err(|failure| match failure.hint(hint) {
            interrupted if stop.is_cancelled() => interrupted.exiting(Exit::Interrupted, ""),
            failure => failure,
        })
    }

    /// Queries a commit's progress.
    fn query_progress(&self, progress: &dyn Progress) {
        let Ok(status) = self.ask(&Command::Status) else { return };
        let job = &status["job"];
        if let (Some(done), Some(left)) = (job["bytes-done"].as_u64(), job["bytes-left"].as_u64()) {
            progress.update(done, done + left);
        }
    }
}

/// A value in the form in which people read it, with its key. Returns nothing for values that are
/// left out.
fn readable(key: &str, value: &Value) -> Option<(String, String)> {
    let number = value.as_u64();
    match (key, number) {
        ("date-nanoseconds", _) => None,
        ("date-seconds", Some(seconds)) => {
            let taken = u32::try_from(seconds).map_or_else(|_| seconds.to_string(), dates::utc);
            Some(("taken (UTC)".to_owned(), taken))
        }
        ("vm-clock-nanoseconds", Some(clock)) => {
            Some(("VM clock".to_owned(), dates::clock(clock, 1)))
        }
        ("vm-state-bytes", Some(bytes)) => Some(("VM state".to_owned(), bytes_long(bytes))),
        ("disk-bytes", Some(bytes)) => Some(("disk".to_owned(), bytes_long(bytes))),
        _ => {
            let name = key.replace('-', " ");
            match (name.strip_suffix(" nanoseconds"), number) {
                (Some(name), Some(time)) => {
                    Some((format!("{name} seconds"), format!("{:.6}", time as f64 / 1e9)))
                }
                _ if value == "" => None,
                _ => Some((name, value.as_str().map_or_else(|| value.to_string(), str::to_owned))),
            }
        }
    }
}

/// Renders a JSON answer as lines of `key: value`.
fn lines(prefix: &str, value: &Value, out: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            // Leave out the histogram: only programs use it.
            for (key, value) in entries.iter().filter(|(key, _)| *key != "latency") {
                let before = if prefix.is_empty() { String::new() } else { format!("{prefix} ") };
                if value.is_object() || value.is_array() {
                    lines(&format!("{before}{}", key.replace('-', " ")), value, out);
                } else if let Some((key, value)) = readable(key, value) {
                    out.push(format!("{before}{key}: {value}"));
                }
            }
        }
        Value::Array(entries) if entries.iter().all(Value::is_string) => {
            let names: Vec<_> = entries.iter().filter_map(Value::as_str).collect();
            out.push(format!("{prefix}: {}", names.join(" <- ")));
        }
        Value::Array(entries) => {
            for entry in entries {
                let key = if entry["kind"].is_string() { "kind" } else { "name" };
                let mut rest = entry.clone();
                let title = rest.as_object_mut().and_then(|rest| rest.remove(key));
                lines(title.as_ref().and_then(Value::as_str).unwrap_or_default(), &rest, out);
            }
        }
        other => out.push(format!("{prefix}: {other}")),
    }
}

impl Run for CtlArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let command = self.command()?;
        let answer = match &command {
            Command::Commit { .. } => self.commit(&command, session)?,
            _ => self.ask(&command)?,
        };
        if let Value::String(text) = &answer {
            session.out.bytes(text.as_bytes());
        } else if self.json.json {
            session.out.json(&answer);
        } else {
            let mut text = Vec::new();
            lines("", &answer, &mut text);
            for line in text {
                session.out.line(line);
            }
        }
        Ok(Exit::Done)
    }
}
