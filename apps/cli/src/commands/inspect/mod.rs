//! `vdkit inspect`: is this image safe to accept?
//!
//! ```text
//!   parent                                   child (this program once more)
//!     opens the image, read-only ── stdin ─► enters the sandbox, then reads
//!     waits, to a limit                      judges (jobs::inspect)
//!     checks the answer ◄──── stdout, JSON ─ answers and ends
//!     prints
//! ```

pub mod child;
mod parent;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueHint};
use serde::Serialize;
use vdkit::jobs::inspect::{
    Allow, Code, InspectFinding, InspectOptions, InspectReport, Verdict, Weight,
};
use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{CancelToken, Storage};

use super::{Run, Subcommand, runs};
use crate::arguments::{Json, size};
use crate::failure::{Exit, Failure, Outcome, Tone, print_line};
use crate::output::{Output, bytes_short};
use crate::sandbox::Sandbox;
use crate::session::Session;

pub const COMMAND: Subcommand = Subcommand {
    name: "inspect",
    about: "Judge whether an untrusted image is safe to accept",
    details: "\
Reads the image in a separate sandboxed process (seccomp, Landlock, limits on time, memory and \
reads), opens no other file, and gives each reason a code. Exit codes: 0 accepted, 5 refused, 1 \
not judged: do not accept the image.",
    examples: "
vdkit inspect upload.qcow2
vdkit inspect -f qcow2 --max-size 100G upload.qcow2   the required format and largest size
vdkit inspect --strict --json upload.qcow2 | jq '.findings[].code'
",
    ..runs::<InspectArgs>()
};

fn allow(text: &str) -> Result<Allow, &'static str> {
    serde_json::from_value(text.into())
        .map_err(|_| "known: backing, data-file, encryption, extended-l2, nested, snapshots")
}

fn seconds(text: &str) -> Result<Duration, String> {
    text.parse::<f64>()
        .ok()
        .filter(|seconds| *seconds <= 86_400.0)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "write seconds, such as 10 or 0.5, up to a day".to_owned())
}

#[derive(Args, Debug)]
pub struct InspectArgs {
    /// The image
    #[arg(value_name = "IMAGE", value_hint = ValueHint::FilePath)]
    image: PathBuf,
    /// Required format: raw, qcow2, vmdk, vdi, vhd, vhdx, luks, iso, gpt or mbr
    #[arg(short = 'f', long, value_name = "FORMAT")]
    format: Option<String>,
    /// Accept one of: backing, data-file, encryption, extended-l2, nested, snapshots (repeatable)
    ///
    /// A backing or data file with an absolute name, a name with `..`, a URL or a json: name is
    /// refused in any case.
    #[arg(long, value_name = "WHAT", value_parser = allow)]
    allow: Vec<Allow>,
    /// Largest disk to accept (default: 64T)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_size: Option<u64>,
    /// Largest ratio of guest data to the file's length (default: 100)
    #[arg(long, value_name = "N")]
    max_ratio: Option<u64>,
    /// Refuse images with warnings too
    #[arg(long)]
    strict: bool,
    /// Time limit in seconds (default: 10)
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Memory limit (default: 256M)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_memory: Option<u64>,
    /// Limit of bytes read (default: 512M)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_read: Option<u64>,
    /// Read the image even while another process writes it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    json: Json,
}

impl InspectArgs {
    fn options(&self) -> InspectOptions {
        let name = self.image.to_string_lossy();
        let named = || {
            let written = vdkit::format_of_name(&name).map(str::to_owned);
            written.or_else(|| vdkit::registry().format_in_name(&name))
        };
        let format = self.format.clone().or_else(named);
        let mut options = InspectOptions::default();
        options.allow = self.allow.clone();
        options.format = format.map(|name| if name == "vpc" { "vhd".to_owned() } else { name });
        options.size_max = self.max_size.unwrap_or(options.size_max);
        options.ratio_max = self.max_ratio.unwrap_or(options.ratio_max);
        options.strict = self.strict;
        options.time_max = self.timeout.unwrap_or(options.time_max);
        options.memory_max = self.max_memory.unwrap_or(options.memory_max);
        options.read_bytes_max = self.max_read.unwrap_or(options.read_bytes_max);
        options
    }
}

/// The limits that were in force, in JSON.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Limits {
    max_size: u64,
    max_ratio: u64,
    timeout_milliseconds: u64,
    max_memory: u64,
    max_read: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct InspectAnswer<'a> {
    filename: String,
    #[serde(flatten)]
    report: &'a InspectReport,
    limits: Limits,
    sandbox: Sandbox,
}

impl Run for InspectArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let options = self.options();
        if let (Some(format), Some(_)) = (&options.format, &self.format)
            && !vdkit::jobs::inspect::FORMAT_NAMES.contains(&format.as_str())
        {
            let known = vdkit::jobs::inspect::FORMAT_NAMES.join(", ");
            return Err(Failure::usage(format!("unknown format '{format}'; known: {known}")));
        }
        let lock = if self.force_share { LockMode::Off } else { LockMode::Auto };
        let storage = FileStorage::open(&self.image, &FileOptions::read_only().lock(lock))?;
        let cancel = session.cancel_on_signal()?;
        let (mut report, sandbox) = judge(&storage, &self.image, &options, &cancel)?;
        if sandbox.is_some_and(|sandbox| !sandbox.complete) {
            let finding =
                InspectFinding::new(Code::SandboxPartial).expected("Landlock and seccomp");
            print_line(Tone::Warning, &format!("{}: {}", self.image.display(), finding.what));
            report.findings.push(finding);
            report.verdict = InspectReport::verdict_of(&report.findings, options.strict);
        }
        if self.json.json {
            session.out.json(&InspectAnswer {
                filename: self.image.display().to_string(),
                report: &report,
                limits: Limits {
                    max_size: options.size_max,
                    max_ratio: options.ratio_max,
                    timeout_milliseconds: options.time_max.as_millis() as u64,
                    max_memory: options.memory_max,
                    max_read: options.read_bytes_max,
                },
                sandbox: sandbox.unwrap_or_default(),
            });
        } else {
            print(&self.image, &report, &mut session.out);
        }
        Ok(match report.verdict {
            Verdict::Accept => Exit::Done,
            Verdict::Refuse => Exit::Refused,
            Verdict::Unknown => Exit::Failed,
        })
    }
}

/// Judges the image in a child process. Also returns the child's sandbox, if the child answered.
fn judge(
    storage: &FileStorage,
    image: &Path,
    options: &InspectOptions,
    cancel: &CancelToken,
) -> Result<(InspectReport, Option<Sandbox>), Failure> {
    let len = storage.len()?;
    let unknown = |why: String| {
        let finding = InspectFinding::new(Code::NotJudged).found(why).expected("a verdict");
        (InspectReport::of_nothing(len, finding), None)
    };
    let fd = storage.as_fd().ok_or_else(|| {
        Failure::failed(format!("{}: cannot be handed to the inspector", image.display()))
    })?;
    let outcome = fd.as_fd().try_clone_to_owned().and_then(|fd| {
        let command = parent::command(fd, options)?;
        parent::supervise(command, options.time_max, parent::GRACE, cancel)
    });
    Ok(match outcome {
        Err(error) => unknown(format!("the inspector cannot be started: {error}")),
        Ok(parent::Outcome::Interrupted) => return Err(vdkit::Error::Interrupted.into()),
        Ok(parent::Outcome::Failed(finding)) => (InspectReport::of_nothing(len, *finding), None),
        Ok(parent::Outcome::Answered(text)) => match parent::parse_answer(&text, options, len) {
            Err(why) => {
                let finding =
                    InspectFinding::new(Code::InspectorAnswer).found(why).expected("a report");
                (InspectReport::of_nothing(len, finding), None)
            }
            Ok(child::Answer { sandbox, report: Some(report), .. }) => (report, Some(sandbox)),
            Ok(child::Answer { sandbox, error, .. }) => {
                (unknown(error.unwrap_or_default()).0, Some(sandbox))
            }
        },
    })
}

fn print(image: &Path, report: &InspectReport, out: &mut Output) {
    let verdict = match report.verdict {
        Verdict::Accept => "accepted",
        Verdict::Refuse => "refused",
        Verdict::Unknown => "not judged, which is no acceptance",
    };
    let disk = report
        .virtual_size
        .map(|bytes| format!(", a disk of {}", bytes_short(bytes)))
        .unwrap_or_default();
    out.line(format!("{}: {verdict} ({}{disk})", image.display(), report.format));
    for finding in &report.findings {
        let weight = match finding.severity {
            Weight::Refuse => "refuse",
            Weight::Warn => "warning",
            Weight::Note => "note",
        };
        let place = finding.offset.map(|at| format!(" at offset {at:#x}")).unwrap_or_default();
        let mut line = format!("{weight}: {}{place}: {}", finding.code.name(), finding.what);
        if !finding.found.is_empty() {
            line.push_str(&format!(" Found {}", finding.found));
            if !finding.expected.is_empty() {
                line.push_str(&format!(", expected {}", finding.expected));
            }
            line.push('.');
        }
        // A line feed in a name from the image must not start a new line of output.
        out.line(line.replace('\n', "\\n"));
        if finding.severity >= Weight::Warn && !finding.mend.is_empty() {
            out.line(format!("  {}", finding.mend));
        }
    }
    if report.findings_omitted > 0 {
        out.line(format!("… and {} more", report.findings_omitted));
    }
}
