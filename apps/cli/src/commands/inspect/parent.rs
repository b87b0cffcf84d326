//! The parent process: limits the child's time, and validates its answer before use.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdkit::CancelToken;
use vdkit::jobs::inspect::{Code, InspectFinding, InspectOptions, InspectReport};

use super::child::{Answer, CHILD};

/// Longest accepted answer. A hundred findings take a small part of it.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Bytes kept of the child's stderr.
const WORDS_BYTES_MAX: usize = 16 << 10;
/// The child limits its own time. The parent kills the child this much later.
pub(super) const GRACE: Duration = Duration::from_secs(3);
/// Interval between two checks for an interrupt.
const POLL: Duration = Duration::from_millis(100);

/// How the child ended.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The child succeeded and printed these bytes.
    Answered(Vec<u8>),
    /// The child failed; the finding says why.
    Failed(Box<InspectFinding>),
    /// The user interrupted the parent.
    Interrupted,
}

/// Builds the child's command line.
pub(super) fn command(
    image: std::os::fd::OwnedFd,
    options: &InspectOptions,
) -> std::io::Result<Command> {
    let options = serde_json::to_string(options)?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("vdkit").arg(CHILD).arg(options).env_clear().current_dir("/");
    command.stdin(Stdio::from(image));
    Ok(command)
}

/// Runs a command for at most `time` plus the grace period.
///
/// # Errors
/// The command cannot be started.
pub(super) fn supervise(
    mut command: Command,
    time: Duration,
    grace: Duration,
    cancel: &CancelToken,
) -> std::io::Result<Outcome> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let deadline = Instant::now().checked_add(time.saturating_add(grace));
    let received = receive(&mut child, deadline, cancel);
    // Kill the child if it has not ended or is no longer wanted. A process that has ended is not
    // affected.
    let ended_by_us = !matches!(received, Ok(Received::All(..)));
    if ended_by_us {
        let _ = child.kill();
    }
    let status = child.wait()?;
    Ok(match received? {
        Received::Interrupted => Outcome::Interrupted,
        Received::TooLate => failed(
            Code::LimitTime,
            "no answer".to_owned(),
            format!("one within {} s", time.as_secs_f64()),
        ),
        Received::TooMuch => failed(
            Code::InspectorAnswer,
            format!("more than {ANSWER_BYTES_MAX} bytes"),
            "a report".to_owned(),
        ),
        Received::All(answer, _) if status.success() => Outcome::Answered(answer),
        Received::All(_, words) => death(status, &words),
    })
}

fn failed(code: Code, found: String, expected: String) -> Outcome {
    let finding = InspectFinding::new(code).found(found).expected(expected);
    Outcome::Failed(Box::new(finding))
}

/// Derives the finding from a child's exit status.
fn death(status: ExitStatus, words: &[u8]) -> Outcome {
    let words = String::from_utf8_lossy(words);
    let last = words.trim().lines().last().unwrap_or_default();
    let code = match status.signal() {
        Some(libc::SIGSYS) => Code::InspectorForbidden,
        Some(libc::SIGXCPU) => Code::LimitTime,
        // No limit of ours does this: somebody else, or the kernel where memory is short.
        Some(libc::SIGKILL) => Code::NotJudged,
        // The allocator prints this and then aborts.
        Some(libc::SIGABRT) if words.contains("memory allocation of") => Code::LimitMemory,
        _ => Code::InspectorDied,
    };
    failed(code, format!("{status}: {last}"), "an inspector that ends by itself".to_owned())
}

enum Received {
    /// Both streams were read to their ends.
    All(Vec<u8>, Vec<u8>),
    TooMuch,
    TooLate,
    Interrupted,
}

fn receive(
    child: &mut Child,
    deadline: Option<Instant>,
    cancel: &CancelToken,
) -> std::io::Result<Received> {
    let (mut answer, mut words) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let mut buffer = [0; 16 << 10];
    while stdout.is_some() || stderr.is_some() {
        if cancel.is_cancelled() {
            return Ok(Received::Interrupted);
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(Received::TooLate);
        }
        let wait = left.unwrap_or(POLL).min(POLL);
        let (answers, speaks) = ready(stdout.as_ref(), stderr.as_ref(), wait)?;
        if answers && let Some(stream) = &mut stdout {
            match stream.read(&mut buffer)? {
                0 => stdout = None,
                n => answer.extend_from_slice(&buffer[..n]),
            }
            if answer.len() > ANSWER_BYTES_MAX {
                return Ok(Received::TooMuch);
            }
        }
        if speaks && let Some(stream) = &mut stderr {
            match stream.read(&mut buffer)? {
                0 => stderr = None,
                n => words.extend_from_slice(&buffer[..n]),
            }
            words.truncate(WORDS_BYTES_MAX);
        }
    }
    Ok(Received::All(answer, words))
}

/// Waits for a short time, and returns which of the streams are readable.
fn ready(
    stdout: Option<&std::process::ChildStdout>,
    stderr: Option<&std::process::ChildStderr>,
    wait: Duration,
) -> std::io::Result<(bool, bool)> {
    let mut fds = Vec::with_capacity(2);
    fds.extend(stdout.map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)));
    fds.extend(stderr.map(|stream| PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)));
    let timeout =
        Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut events = fds.iter().map(|fd| !fd.revents().is_empty());
    let first = stdout.is_some() && events.next().unwrap_or(false);
    let second = stderr.is_some() && events.next().unwrap_or(false);
    Ok((first, second))
}

/// Parses an answer, and checks that it is consistent for a file of `len` bytes.
///
/// # Errors
/// What is inconsistent.
pub(super) fn parse_answer(
    text: &[u8],
    options: &InspectOptions,
    len: u64,
) -> Result<Answer, String> {
    let answer: Answer = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    match (&answer.report, &answer.error) {
        (Some(report), None) => check_report(report, options, len)?,
        (None, Some(error)) if error.len() <= WORDS_BYTES_MAX => {}
        _ => return Err("neither a report nor an error".to_owned()),
    }
    Ok(answer)
}

fn check_report(report: &InspectReport, options: &InspectOptions, len: u64) -> Result<(), String> {
    let plain = |name: &String| {
        (1..=16).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    let short = |text: &String| text.chars().count() <= 500;
    let fine = [
        (report.file_length == len, "the file's length"),
        (plain(&report.format), "the format's name"),
        (report.formats.len() <= 64 && report.formats.iter().all(plain), "the formats"),
        (report.findings.len() <= 100, "the number of findings"),
        (
            report.findings.iter().all(|f| {
                [&f.what, &f.found, &f.expected, &f.mend].into_iter().all(short)
                    && f.severity <= f.code.weight()
            }),
            "a finding",
        ),
        (
            report.verdict == InspectReport::verdict_of(&report.findings, options.strict),
            "the verdict",
        ),
    ];
    match fine.iter().find(|(fine, _)| !fine) {
        Some((_, what)) => Err((*what).to_owned()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit::jobs::inspect::Verdict;

    fn outcome_of(script: &str, time: Duration) -> Outcome {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        supervise(command, time, Duration::ZERO, &CancelToken::default()).unwrap()
    }

    fn code_of(script: &str) -> Code {
        match outcome_of(script, Duration::from_secs(60)) {
            Outcome::Failed(finding) => finding.code,
            other => panic!("{script}: {other:?}"),
        }
    }

    #[test]
    fn each_death_is_a_refusal_with_its_reason() {
        assert_eq!(code_of("kill -SEGV $$"), Code::InspectorDied);
        assert_eq!(code_of("kill -SYS $$"), Code::InspectorForbidden);
        assert_eq!(code_of("kill -XCPU $$"), Code::LimitTime);
        assert_eq!(code_of("kill -KILL $$"), Code::NotJudged);
        assert_eq!(code_of("kill -ABRT $$"), Code::InspectorDied);
        let memory = "echo memory allocation of 5 bytes failed >&2; kill -ABRT $$";
        assert_eq!(code_of(memory), Code::LimitMemory);
        assert_eq!(code_of("exit 101"), Code::InspectorDied);
        assert_eq!(code_of("exec yes"), Code::InspectorAnswer);
        // Much output on stderr neither fills the memory nor blocks the child.
        assert_eq!(code_of("yes | head -c 1000000 >&2; exit 3"), Code::InspectorDied);
    }

    #[test]
    fn a_child_that_hangs_is_ended_at_the_limit() {
        let begun = Instant::now();
        match outcome_of("exec sleep 1000", Duration::from_millis(50)) {
            Outcome::Failed(finding) => assert_eq!(finding.code, Code::LimitTime),
            other => panic!("{other:?}"),
        }
        assert!(begun.elapsed() < Duration::from_secs(500));
    }

    #[test]
    fn an_interrupt_ends_it() {
        let cancel = CancelToken::default();
        cancel.cancel();
        let mut command = Command::new("sleep");
        command.arg("1000");
        let outcome = supervise(command, Duration::from_secs(500), Duration::ZERO, &cancel);
        assert!(matches!(outcome.unwrap(), Outcome::Interrupted));
    }

    #[test]
    fn answers_that_make_no_sense_are_refused() {
        let options = InspectOptions::default();
        let finding = InspectFinding::new(Code::BackingFile);
        let good = Answer {
            sandbox: Default::default(),
            report: Some(InspectReport::of_nothing(100, finding)),
            error: None,
        };
        let text = |answer: &Answer| serde_json::to_vec(answer).unwrap();
        parse_answer(&text(&good), &options, 100).unwrap();
        assert!(parse_answer(&text(&good), &options, 101).is_err());
        assert!(parse_answer(b"", &options, 100).is_err());
        assert!(parse_answer(b"{}", &options, 100).is_err());
        let changed = |change: &dyn Fn(&mut InspectReport)| {
            let mut answer: Answer = serde_json::from_slice(&text(&good)).unwrap();
            change(answer.report.as_mut().unwrap());
            parse_answer(&text(&answer), &options, 100)
        };
        changed(&|_| {}).unwrap();
        assert!(changed(&|report| report.verdict = Verdict::Accept).is_err());
        assert!(changed(&|report| report.format = "\x1b[2J".to_owned()).is_err());
        assert!(changed(&|report| report.findings[0].found = "x".repeat(9999)).is_err());
        let more = |report: &mut InspectReport| {
            report.findings = vec![report.findings[0].clone(); 1000];
        };
        assert!(changed(&more).is_err());
    }
}
