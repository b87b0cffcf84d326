//! `vdkit top`: shows a service's activity live.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use vdkit::CancelToken;
use vdkit::serve::{Command, ask};

use super::{Run, Subcommand, runs};
use crate::arguments::Json;
use crate::failure::{Exit, Failure, Outcome, not_answered, say};
use crate::session::Session;

mod rates;
mod screen;
mod view;

use rates::{Rates, Sample};
use screen::{Input, Screen};

pub const COMMAND: Subcommand = Subcommand {
    name: "top",
    about: "Watch a running 'vdkit serve': requests, bytes, latencies, cache",
    details: "\
SOCKET is the socket of 'vdkit serve --control SOCKET'. On a terminal the view fills the screen \
until you press q, Esc or Ctrl-C. Otherwise the intervals are printed one after the other, with \
--json one line each. An interval counts the requests that ended in it. The view ends when the \
service ends.",
    examples: "
vdkit top /run/disk.ctl
vdkit top --once /run/disk.ctl                    one interval of a second, as plain text
vdkit top --json --interval 10 --count 6 /run/disk.ctl   a minute for a script
",
    ..runs::<TopArgs>()
};

#[derive(Args, Debug)]
pub struct TopArgs {
    /// The service's control socket
    #[arg(value_name = "SOCKET", value_hint = ValueHint::FilePath)]
    socket: PathBuf,
    /// Length of an interval, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Show this many intervals as plain text, then end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Show one interval, as --count 1
    #[arg(long, conflicts_with = "count")]
    once: bool,
    #[command(flatten)]
    json: Json,
}

/// Parses the value of `--interval`.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("is not a number of seconds from 0.05 to 86400".to_owned()),
    }
}

/// Interval between two checks for keys and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Queries a service's state and counters.
fn sample(socket: &Path) -> io::Result<Sample> {
    let status = serde_json::from_value(ask(socket, &Command::Status)?)?;
    let stats = serde_json::from_value(ask(socket, &Command::Stats)?)?;
    Ok(Sample { at: Instant::now(), status, stats })
}

/// Queries a service repeatedly on a separate thread, so that a service that does not answer cannot
/// keep the user from quitting. The thread ends after an error.
fn samples(socket: PathBuf, interval: Duration) -> Result<Receiver<io::Result<Sample>>, Failure> {
    let (sender, receiver) = channel();
    let ask_on = move || {
        let mut next = Instant::now();
        loop {
            let sample = sample(&socket);
            let last = sample.is_err();
            if sender.send(sample).is_err() || last {
                return;
            }
            // Skip intervals that have already passed.
            next = (next + interval).max(Instant::now());
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    };
    std::thread::Builder::new()
        .name("samples".to_owned())
        .spawn(ask_on)
        .map_err(Failure::no_thread)?;
    Ok(receiver)
}

/// The received samples: the latest and the one before.
struct Watch {
    samples: Receiver<io::Result<Sample>>,
    before: Option<Sample>,
    socket: PathBuf,
}

/// What arrived within a time.
enum Update {
    Interval(Box<Rates>),
    Nothing,
    /// The service has ended.
    End,
}

impl Watch {
    fn next(&mut self, time: Duration) -> Result<Update, Failure> {
        let sample = match self.samples.recv_timeout(time) {
            Ok(Ok(sample)) => sample,
            Ok(Err(_)) if self.before.is_some() => return Ok(Update::End),
            Ok(Err(error)) => {
                return Err(not_answered(&self.socket, &error));
            }
            Err(RecvTimeoutError::Timeout) => return Ok(Update::Nothing),
            Err(RecvTimeoutError::Disconnected) => return Ok(Update::End),
        };
        let rates = self.before.as_ref().map(|before| Rates::between(before, &sample));
        self.before = Some(sample);
        Ok(rates.map_or(Update::Nothing, |rates| Update::Interval(Box::new(rates))))
    }
}

impl TopArgs {
    /// Prints one interval after the other.
    fn print(&self, watch: &mut Watch, stop: &CancelToken, session: &mut Session) -> Outcome {
        let mut left = if self.once { 1 } else { self.count.unwrap_or(u64::MAX) };
        while left > 0 && !stop.is_cancelled() && !session.out.unread() {
            let rates = match watch.next(POLL_INTERVAL)? {
                Update::Interval(rates) => rates,
                Update::Nothing => continue,
                Update::End => return Ok(ended()),
            };
            left -= 1;
            if self.json.json {
                session.out.json_line(&rates);
            } else {
                for line in view::lines(&rates) {
                    session.out.line(line);
                }
                if left > 0 {
                    session.out.line("");
                }
            }
            session.out.flush();
        }
        let counted = self.once || self.count.is_some();
        Ok(if counted && left > 0 && stop.is_cancelled() { Exit::Interrupted } else { Exit::Done })
    }

    /// Shows the latest interval on the terminal.
    fn show(&self, watch: &mut Watch, stop: &CancelToken) -> Outcome {
        // Query before switching the screen, so that an unreachable service gives a plain error
        // message.
        let mut shown =
            vec![format!("{}: waiting for the first interval …", self.socket.display())];
        while watch.before.is_none() && !stop.is_cancelled() {
            watch.next(POLL_INTERVAL)?;
        }
        let screen = Screen::take()?;
        screen.show(&shown)?;
        let mut last = Instant::now();
        let late = self.interval * 2 + Duration::from_secs(1);
        while !stop.is_cancelled() {
            match screen.wait(POLL_INTERVAL)? {
                Input::Quit => return Ok(Exit::Done),
                Input::Resized => screen.show(&shown)?,
                Input::Nothing => {}
            }
            match watch.next(Duration::ZERO)? {
                Update::Interval(rates) => {
                    shown = view::lines(&rates);
                    shown.extend([String::new(), "q: quit".to_owned()]);
                    last = Instant::now();
                }
                Update::Nothing if last.elapsed() > late => {
                    let line = format!("no answer for {} s", last.elapsed().as_secs());
                    shown.pop();
                    shown.push(format!("q: quit    {line}"));
                }
                Update::Nothing => continue,
                Update::End => {
                    drop(screen);
                    return Ok(ended());
                }
            }
            screen.show(&shown)?;
        }
        Ok(Exit::Done)
    }
}

fn ended() -> Exit {
    say("the service has ended");
    Exit::Done
}

impl Run for TopArgs {
    fn run(self, session: &mut Session) -> Outcome {
        let stop = session.cancel_on_signal()?;
        let samples = samples(self.socket.clone(), self.interval)?;
        let mut watch = Watch { samples, before: None, socket: self.socket.clone() };
        let live = io::stdout().is_terminal() && io::stdin().is_terminal();
        if live && !self.json.json && !self.once && self.count.is_none() {
            self.show(&mut watch, &stop)
        } else {
            self.print(&mut watch, &stop, session)
        }
    }
}
