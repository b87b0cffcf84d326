//! The confirmation before a device is overwritten: the user types the device's name.

use std::io::{self, IsTerminal, Write};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdkit::CancelToken;
use vdkit_lab as lab;

/// Longest delay before an interrupt is noticed.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// Whether stdin and stderr are a terminal, so that a user can answer.
pub(super) fn possible() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Prints what will happen. Returns whether the user typed the device's name.
///
/// # Errors
/// [`vdkit::Error::Interrupted`], or an I/O error of the terminal.
pub(super) fn for_name(
    told: &str,
    device: &Path,
    cancel: &CancelToken,
) -> Result<bool, lab::Error> {
    let mut stderr = io::stderr().lock();
    write!(stderr, "{told}.\nType the device's name to go on: ")?;
    stderr.flush()?;
    let stdin = io::stdin();
    // A terminal becomes readable when a whole line is there. A blocking read would not notice an
    // interrupt.
    while poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&TICK)).unwrap_or(0) == 0 {
        cancel.check()?;
    }
    let mut line = String::new();
    stdin.read_line(&mut line)?;
    Ok(Path::new(line.trim()) == device)
}
