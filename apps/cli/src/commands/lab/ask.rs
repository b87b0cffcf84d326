//! The question before a device is overwritten: its name is to be typed.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdkit::CancelToken;
use vdkit_lab as lab;

/// How long an interrupt may wait for us.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Whether somebody is there to answer.
pub(super) fn possible() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Says what will happen, and whether the device's name was typed.
///
/// # Errors
/// [`vdkit::Error::Interrupted`]; the terminal's.
pub(super) fn for_name(
    told: &str,
    device: &Path,
    cancel: &CancelToken,
) -> Result<bool, lab::Error> {
    let mut stderr = io::stderr().lock();
    write!(stderr, "{told}.\nType the device's name to go on: ")?;
    stderr.flush()?;
    let stdin = io::stdin();
    // A terminal is ready when a line is there; reading before would not see an interrupt.
    while poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&TICK)).unwrap_or(0) == 0 {
        cancel.check()?;
    }
    let mut line = String::new();
    stdin.read_line(&mut line)?;
    Ok(Path::new(line.trim()) == device)
}
