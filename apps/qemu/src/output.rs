//! Results on stdout, progress, and the end of a job by a signal.

use std::fmt::Display;
use std::io::{self, BufWriter, Stdout, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use signal_hook::consts::SIGUSR1;
use signal_hook::flag;
use vdkit::{CancelToken, Error, Monitor, Progress as Sink};

use crate::failure::{Failure, words};
use crate::getopt::Parsed;

/// Prints a line on stderr. Ignores errors: there is nowhere else to report one, and a message must not
/// end a job.
pub fn say(text: impl Display) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Buffered results. A command goes on when they cannot be printed, since it may do more than print. A
/// reader that went away is no failure, as with QEMU's programs; [`Output::finish`] reports any other.
#[derive(Debug)]
pub struct Output {
    out: BufWriter<Stdout>,
    quiet: bool,
    /// Why nothing more is printed.
    failed: Option<io::Error>,
}

impl Default for Output {
    fn default() -> Self {
        Self { out: BufWriter::new(io::stdout()), quiet: false, failed: None }
    }
}

impl Output {
    /// With `quiet`, [`Output::said`] prints nothing.
    pub fn quiet(&mut self, quiet: bool) {
        self.quiet = quiet;
    }

    /// Prints text that was asked for.
    pub fn text(&mut self, text: impl AsRef<str>) {
        if self.failed.is_none() {
            self.failed = self.out.write_all(text.as_ref().as_bytes()).err();
        }
    }

    /// Prints a line that was asked for.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.text(text);
        self.text("\n");
    }

    /// Prints a line that `-q` suppresses.
    pub fn said(&mut self, text: impl AsRef<str>) {
        if !self.quiet {
            self.line(text);
        }
    }

    /// Writes out what is buffered.
    pub fn flush(&mut self) {
        if self.failed.is_none() {
            self.failed = self.out.flush().err();
        }
    }

    /// Writes out the rest.
    ///
    /// # Errors
    /// Results could not be printed, though their reader is there.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.flush();
        match self.failed {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::from(error).within("stdout"))
            }
            _ => Ok(()),
        }
    }
}

/// As [`signals::cancel_on_signal`](crate::signals::cancel_on_signal), with the code of QEMU's
/// program that a signal ended.
pub fn cancel_on_signal() -> Result<CancelToken, Failure> {
    Ok(crate::signals::cancel_on_signal(1)?)
}

/// As [`signals::end_on_signal`](crate::signals::end_on_signal), with that code.
pub fn end_on_signal() -> Result<CancelToken, Failure> {
    Ok(crate::signals::end_on_signal(1)?)
}

/// Progress as `qemu-img -p` prints it: `    (12.34/100%)`, over itself. Without `-p`, SIGUSR1 asks
/// for one line on stderr: stdout holds results that another program may read.
#[derive(Debug)]
pub struct Progress {
    shown: bool,
    asked: Arc<AtomicBool>,
    /// The percentage last printed, in hundredths; `u64::MAX` before the first.
    last: AtomicU64,
}

impl Progress {
    /// Shows progress with `-p` and without `-q`, or else when SIGUSR1 arrives.
    pub fn of(parsed: &Parsed) -> Result<Self, Failure> {
        let shown = parsed.has("progress") && !parsed.has("quiet");
        let asked = Arc::new(AtomicBool::new(false));
        // With `-p` too, where the signal adds nothing: it must not end the job.
        flag::register(SIGUSR1, Arc::clone(&asked))?;
        let progress = Self { shown, asked, last: AtomicU64::new(u64::MAX) };
        progress.show(0);
        Ok(progress)
    }

    fn show(&self, hundredths: u64) {
        let percent = hundredths as f64 / 100.0;
        if !self.shown {
            if self.asked.swap(false, Ordering::Relaxed) {
                say(format_args!("    ({percent:.2}/100%)"));
            }
            return;
        }
        // A step is shown when it is at least one percent, as QEMU does.
        let last = self.last.load(Ordering::Relaxed);
        let far = last == u64::MAX || hundredths >= last + 100 || hundredths == 10_000;
        if !far || last == hundredths {
            return;
        }
        self.last.store(hundredths, Ordering::Relaxed);
        let mut out = io::stdout().lock();
        // Nothing can be done about a terminal that went away.
        let _ = write!(out, "    ({percent:.2}/100%)\r");
        let _ = out.flush();
    }

    /// Prints the end of the line.
    pub fn finish(&self, complete: bool) {
        if complete && self.shown {
            // Also if the last step was complete already, as QEMU does.
            self.last.store(u64::MAX, Ordering::Relaxed);
            self.show(10_000);
        }
        if self.shown {
            // As in `show`: a reader that went away must not abort a job that is done.
            let _ = writeln!(io::stdout());
        }
    }
}

impl Sink for Progress {
    fn update(&self, done: u64, total: u64) {
        if total > 0 {
            self.show((u128::from(done.min(total)) * 10_000 / u128::from(total)) as u64);
        }
    }

    fn message(&self, text: &str) {
        say(format_args!("qemu-img: warning: {text}"));
    }
}

/// Runs a job that copies, and shows its progress.
///
/// # Errors
/// The system refuses the signal handlers. The job's own result is within.
pub fn copying<T>(
    parsed: &Parsed,
    job: impl FnOnce(&Monitor<'_>) -> vdkit::Result<T>,
) -> Result<vdkit::Result<T>, Failure> {
    let progress = Progress::of(parsed)?;
    let copying = Copying { progress: &progress, quiet: parsed.has("quiet") };
    let done = job(&Monitor::new(&copying).cancelled_by(cancel_on_signal()?));
    progress.finish(done.is_ok());
    Ok(done)
}

/// Shows progress and, of messages, only what could not be read.
#[derive(Clone, Copy, Debug)]
struct Copying<'a> {
    progress: &'a Progress,
    quiet: bool,
}

impl Sink for Copying<'_> {
    fn update(&self, done: u64, total: u64) {
        self.progress.update(done, total);
    }

    fn message(&self, _text: &str) {}

    fn unreadable(&self, offset: u64, error: &Error) {
        if !self.quiet {
            let why = words(error);
            say(format_args!("qemu-img: warning: error while reading offset {offset}: {why}"));
        }
    }
}
