//! Progress of a job on stderr: a bar for people, JSON lines for programs.

use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use vdkit::Progress;

use crate::failure::{Tone, print_line, say};

/// How progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ProgressMode {
    /// A bar if stderr is a terminal and the job takes a while
    #[default]
    Auto,
    /// A bar from the start, if stderr is a terminal
    Bar,
    /// One JSON object per line
    Json,
    /// Nothing
    None,
}

/// A job that ends within this time shows no bar, because the bar would only flicker.
const PATIENCE: Duration = Duration::from_millis(300);
/// Time between two lines or redraws.
const INTERVAL: Duration = Duration::from_millis(100);

/// Shows a job's progress. Costs two clock reads while there is nothing to show.
#[derive(Debug)]
pub struct Reporter {
    mode: ProgressMode,
    shape: Shape,
    counting: bool,
    job: &'static str,
    started: Instant,
    next_us: AtomicU64,
    last: [AtomicU64; 2],
    begun: AtomicBool,
    bar: OnceLock<ProgressBar>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Bar,
    Json,
    Silent,
}

/// One line of `--progress json`.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Event<'a> {
    Progress { job: &'a str, done: u64, total: u64 },
    Message { job: &'a str, text: &'a str },
}

impl Reporter {
    /// Creates a reporter for the job called `job`.
    pub fn new(mode: ProgressMode, job: &'static str) -> Self {
        let shape = match mode {
            ProgressMode::Json => Shape::Json,
            ProgressMode::Auto | ProgressMode::Bar if io::stderr().is_terminal() => Shape::Bar,
            _ => Shape::Silent,
        };
        let wait = match mode {
            ProgressMode::Auto => PATIENCE,
            _ => Duration::ZERO,
        };
        Self {
            mode,
            shape,
            counting: false,
            job,
            started: Instant::now(),
            next_us: AtomicU64::new(wait.as_micros() as u64),
            last: Default::default(),
            begun: AtomicBool::new(false),
            bar: OnceLock::new(),
        }
    }

    /// Makes the unit of work a count instead of bytes.
    pub fn counting(mut self) -> Self {
        self.counting = true;
        self
    }

    /// Ends the job: prints a last line with the amount done and removes the bar.
    pub fn finish(&self) {
        match self.shape {
            Shape::Json => {
                let [done, total] = [0, 1].map(|i| self.last[i].load(Ordering::Relaxed));
                self.event(&Event::Progress { job: self.job, done, total });
            }
            Shape::Bar => {
                if let Some(bar) = self.bar.get() {
                    bar.finish_and_clear();
                }
            }
            Shape::Silent => {}
        }
    }

    /// Whether the job has reported progress, and so may have changed its target.
    pub fn begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// Prints information that is no warning, on the same channel as progress; nothing with `none`.
    pub fn say(&self, text: &str) {
        match self.mode {
            ProgressMode::Json => self.event(&Event::Message { job: self.job, text }),
            ProgressMode::None => {}
            ProgressMode::Auto | ProgressMode::Bar => say(text),
        }
    }

    /// Whether this caller draws now. Returns true for one caller per interval.
    fn due(&self) -> bool {
        let now = self.started.elapsed().as_micros() as u64;
        let next = self.next_us.load(Ordering::Relaxed);
        now >= next
            && self
                .next_us
                .compare_exchange(
                    next,
                    now + INTERVAL.as_micros() as u64,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                )
                .is_ok()
    }

    fn event(&self, event: &Event<'_>) {
        if let Ok(mut line) = serde_json::to_vec(event) {
            line.push(b'\n');
            // Ignore errors: there is nowhere else to report one.
            let _ = io::stderr().lock().write_all(&line);
        }
    }

    fn draw(&self, done: u64, total: u64) {
        let bar = self.bar.get_or_init(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let template = match self.counting {
                true => "{msg} {wide_bar} {pos} of {len}, {eta} left",
                false => "{msg} {wide_bar} {percent:>3}% of {binary_total_bytes}, {eta} left",
            };
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.set_message(self.job);
            // What was done before the first drawing, as in a resumed run, says nothing about the
            // rate of what follows.
            bar.set_position(done);
            bar.set_length(total);
            bar.reset_eta();
            bar
        });
        bar.set_length(total);
        bar.set_position(done);
    }
}

impl Progress for Reporter {
    fn update(&self, done: u64, total: u64) {
        self.begun.store(true, Ordering::Relaxed);
        if self.shape == Shape::Silent {
            return;
        }
        // Workers may report out of order; the bar must not go backwards.
        let done = self.last[0].fetch_max(done, Ordering::Relaxed).max(done);
        self.last[1].store(total, Ordering::Relaxed);
        if !self.due() {
            return;
        }
        match self.shape {
            Shape::Json => self.event(&Event::Progress { job: self.job, done, total }),
            Shape::Bar => self.draw(done, total),
            Shape::Silent => {}
        }
    }

    fn message(&self, text: &str) {
        match (self.shape, self.bar.get()) {
            (Shape::Json, _) => self.event(&Event::Message { job: self.job, text }),
            (_, Some(bar)) => bar.suspend(|| print_line(Tone::Warning, text)),
            (_, None) => print_line(Tone::Warning, text),
        }
    }
}
