//! Runs other programs: exactly with the recorded command lines, stopped when the user interrupts,
//! and never left running.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use vdkit_block::CancelToken;

use crate::peers;
use crate::words::quoted;

/// Interval between two checks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time for a program to end after it was asked to.
const GRACE: Duration = Duration::from_secs(30);
/// Largest number of bytes of a program's messages that are shown.
const MESSAGE_BYTES: usize = 2000;

#[derive(Clone, Debug)]
pub struct Line {
    program: PathBuf,
    arguments: Vec<OsString>,
    folder: Option<PathBuf>,
    guarded: bool,
    muted: bool,
}

impl Line {
    /// A command line without arguments.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let program = program.into();
        Self { program, arguments: Vec::new(), folder: None, guarded: true, muted: false }
    }

    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_owned()));
        self
    }

    /// Uses this folder as the working directory, and for files with the program's output.
    pub fn within(mut self, folder: &Path) -> Self {
        self.folder = Some(folder.to_owned());
        self
    }

    /// Leaves out the wrapper that kills the program together with the lab, because the wrapper
    /// adds about a millisecond to the start, which matters when the command's whole time is
    /// measured.
    pub fn timed(mut self) -> Self {
        self.guarded = false;
        self
    }

    /// Drops the program's standard output: to keep and to decode a disk's bytes takes longer than a
    /// short command does.
    pub fn muted(mut self) -> Self {
        self.muted = true;
        self
    }

    /// The command line, quoted for a shell.
    pub fn text(&self) -> String {
        let name = self.program.file_name().unwrap_or(self.program.as_os_str());
        let words = std::iter::once(name).chain(self.arguments.iter().map(OsString::as_os_str));
        words.map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
    }

    /// Builds the command. The program gets its own process group, so that the terminal's signals
    /// reach only the lab. If `setpriv` is available, the program ends when the lab is killed.
    fn command(&self) -> Command {
        let mut command = match peers::find("setpriv").filter(|_| self.guarded) {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "TERM"]).arg(&self.program);
                command
            }
            None => Command::new(&self.program),
        };
        command.args(&self.arguments).stdin(Stdio::null()).process_group(0);
        // The lab parses messages, so they must be in English.
        command.env("LC_ALL", "C");
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        command
    }

    fn spool(&self) -> Result<File> {
        let folder = self.folder.clone().unwrap_or_else(std::env::temp_dir);
        // The file never has a name, so it cannot be left behind.
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let opened = rustix::fs::open(&folder, flags, mode)
            .or_else(|_| rustix::fs::open(std::env::temp_dir(), flags, mode));
        Ok(File::from(opened.with_context(|| folder.display().to_string())?))
    }

    /// Runs the program to its end.
    ///
    /// # Errors
    /// The program cannot be started, or fails, or the user interrupts; an interrupt stops it.
    pub fn run(&self, cancel: &CancelToken) -> Result<Ended> {
        self.start()?.succeed(cancel)
    }

    /// As [`Line::run`], but a failing program is a result too.
    pub fn run_any(&self, cancel: &CancelToken) -> Result<Ended> {
        self.start()?.finish(cancel)
    }

    /// Starts the program and returns.
    pub fn start(&self) -> Result<Running> {
        let began = Instant::now();
        let (out, errors) = (self.spool()?, self.spool()?);
        let stdout = if self.muted { Stdio::null() } else { out.try_clone()?.into() };
        let spawned = self.command().stdout(stdout).stderr(errors.try_clone()?).spawn();
        let child = spawned.with_context(|| format!("cannot run {}", self.program.display()))?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .context("a handle of a process")?;
        Ok(Running { line: self.text(), child, pidfd, out, errors, began, ended: None })
    }
}

fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        _ => status.to_string(),
    }
}

#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Duration from start to end.
    pub elapsed: Duration,
    /// The kernel's I/O counters of the program and its children.
    pub io: IoCounts,
}

impl Ended {
    /// The end of its messages, on a separate line.
    pub fn complaint(&self) -> String {
        let text = self.stderr.trim();
        let from = text.len().saturating_sub(MESSAGE_BYTES);
        let from = (from..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        if text.is_empty() { String::new() } else { format!("\n{}", &text[from..]) }
    }
}

/// The kernel's I/O counters of a process (`/proc/PID/io`, proc(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Number of read system calls.
    pub read_calls: u64,
    /// Bytes returned by read system calls.
    pub read_call_bytes: u64,
}

impl IoCounts {
    /// Counters of a process, which may have ended but not been waited for.
    pub fn of(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(": "));
            lines.find(|(key, _)| *key == name)?.1.trim().parse().ok()
        };
        Some(Self { read_calls: value("syscr")?, read_call_bytes: value("rchar")? })
    }

    /// What was counted since an earlier moment.
    pub fn since(self, before: Self) -> Self {
        Self {
            read_calls: self.read_calls.saturating_sub(before.read_calls),
            read_call_bytes: self.read_call_bytes.saturating_sub(before.read_call_bytes),
        }
    }
}

/// Processor time of a process and its ended children, in seconds (`/proc/PID/stat`).
pub fn cpu_seconds(pid: u32) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain any character, including a parenthesis. The numbers come after the last
    // one.
    let numbers: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    // utime, stime, cutime, cstime are fields 14 to 17 of proc(5); state is field 3.
    let ticks: u64 = numbers.get(11..15)?.iter().filter_map(|n| n.parse::<u64>().ok()).sum();
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// A running program; dropping it ends the program.
#[derive(Debug)]
pub struct Running {
    line: String,
    child: Child,
    pidfd: std::os::fd::OwnedFd,
    out: File,
    errors: File,
    began: Instant,
    ended: Option<(ExitStatus, Duration, IoCounts)>,
}

/// What a program has written to a file so far.
fn read_all(file: &File) -> String {
    let mut bytes = vec![0; file.metadata().map_or(0, |found| found.len()) as usize];
    // Read by position: the program writes through the same file offset, which a seek would move.
    // Ignore errors: this only reads messages back for display.
    let read = file.read_at(&mut bytes, 0);
    bytes.truncate(read.unwrap_or(0));
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Running {
    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits at most `most` for the program's end. Returns whether it has ended.
    pub fn wait(&mut self, most: Duration) -> Result<bool> {
        if self.ended.is_some() {
            return Ok(true);
        }
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let timeout =
            Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
        match poll(&mut fds, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            other => other.context("waiting for a process")?,
        };
        let elapsed = self.began.elapsed();
        let io = IoCounts::of(self.child.id()).unwrap_or_default();
        let status = self.child.wait().context("waiting for a process")?;
        self.ended = Some((status, elapsed, io));
        Ok(true)
    }

    /// Waits for the program's end.
    ///
    /// # Errors
    /// The user interrupts; dropping this then ends the program.
    pub fn finish(&mut self, cancel: &CancelToken) -> Result<Ended> {
        while !self.wait(LOOK)? {
            cancel.check()?;
        }
        self.ended()
    }

    /// As [`Running::finish`], for a program that must not fail.
    ///
    /// # Errors
    /// As [`Running::finish`], or the program fails.
    pub fn succeed(&mut self, cancel: &CancelToken) -> Result<Ended> {
        let ended = self.finish(cancel)?;
        if ended.status.success() { Ok(ended) } else { self.failed(&ended) }
    }

    /// The error of a program that has failed, or ended too early.
    fn failed<T>(&self, ended: &Ended) -> Result<T> {
        bail!("{}: {}{}", self.line, described(ended.status), ended.complaint())
    }

    /// The result of a program that has ended.
    pub fn ended(&mut self) -> Result<Ended> {
        let Some((status, elapsed, io)) = self.ended else { bail!("{}: still runs", self.line) };
        let (stdout, stderr) = (read_all(&self.out), read_all(&self.errors));
        Ok(Ended { status, stdout, stderr, elapsed, io })
    }

    fn signal(&self, signal: Signal) {
        // The program may end at this moment. Its process group has the same number: see
        // `Line::command`.
        let _ = kill_process_group(Pid::from_child(&self.child), signal);
    }

    /// Asks the program to end, waits, and kills it after too long a time. Returns how long that
    /// took.
    pub fn end(&mut self) -> Duration {
        let began = Instant::now();
        if self.ended.is_none() {
            self.signal(Signal::TERM);
            // An interrupt does not shorten this.
            let cancel = CancelToken::default();
            if !matches!(self.wait_long(GRACE, &cancel), Ok(true)) {
                self.signal(Signal::KILL);
                let _ = self.wait_long(GRACE, &cancel);
            }
        }
        began.elapsed()
    }

    /// As [`Running::wait`], but until the end of that time, also if signals arrive.
    ///
    /// # Errors
    /// The user interrupts.
    pub fn wait_long(&mut self, most: Duration, cancel: &CancelToken) -> Result<bool> {
        let until = Instant::now() + most;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.wait(left.min(LOOK))? {
                return Ok(true);
            }
            cancel.check()?;
            if left.is_zero() {
                return Ok(false);
            }
        }
    }

    /// Waits until `ready` returns true.
    ///
    /// # Errors
    /// The program ends first, the wait takes longer than `most`, or the user interrupts.
    pub fn wait_until(
        &mut self,
        most: Duration,
        cancel: &CancelToken,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        let until = Instant::now() + most;
        while !ready() {
            cancel.check()?;
            if self.wait(Duration::from_millis(5))? {
                return self.ended().and_then(|ended| self.failed(&ended));
            }
            if Instant::now() > until {
                bail!(
                    "{}: is not ready after {} s\n{}",
                    self.line,
                    most.as_secs(),
                    read_all(&self.errors)
                );
            }
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Line {
        Line::new("sh").arg("-c").arg(script)
    }

    #[test]
    fn a_program_is_run_and_counted() {
        let ended = shell("echo out; echo err >&2; cat /proc/self/status > /dev/null; sleep 0.1")
            .run(&CancelToken::default())
            .unwrap();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("out\n", "err\n"));
        assert!(ended.elapsed >= Duration::from_millis(100));
        // The kernel's counters include children that were waited for.
        assert!(ended.io.read_calls > 0, "{:?}", ended.io);
        let muted = shell("echo out; echo err >&2").muted().run(&CancelToken::default()).unwrap();
        assert_eq!((muted.stdout.as_str(), muted.stderr.as_str()), ("", "err\n"));
    }

    #[test]
    fn a_failure_says_what_was_run_and_what_it_said() {
        let error = shell("echo 'no such disk' >&2; exit 3").run(&CancelToken::default());
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains("exit code 3") && text.contains("no such disk"), "{text}");
        assert!(text.contains("sh -c 'echo '"), "{text}");
        let error = Line::new("/nonexistent/program").run(&CancelToken::default()).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/program"), "{error:#}");
    }

    #[test]
    fn a_cancelled_program_is_stopped_with_its_children() {
        let cancel = CancelToken::default();
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                cancel.cancel();
            });
            let error = shell("sleep 600 & sleep 600; wait").run(&cancel).unwrap_err();
            assert!(error.engine().is_some(), "{error}");
        });
        assert!(began.elapsed() < Duration::from_secs(300));
    }

    #[test]
    fn a_dropped_program_is_gone() {
        let running = shell("sleep 600").start().unwrap();
        let pid = running.pid();
        assert!(cpu_seconds(pid).is_some());
        drop(running);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        let line = Line::new("/usr/bin/fio").arg("--name=a b").arg("it's").arg("--bs=4K");
        assert_eq!(line.text(), r"fio '--name=a b' 'it'\''s' --bs=4K");
    }

    #[test]
    fn the_kernels_counts_are_read() {
        let text = "rchar: 10\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 0\n";
        let counts = IoCounts::parse(text).unwrap();
        assert_eq!(counts, IoCounts { read_calls: 3, read_call_bytes: 10 });
        assert_eq!(IoCounts::parse("rchar: x"), None);
    }
}
