//! The confirmation before a device is overwritten: the user types the device's name.

use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::Path;

use vdkit::CancelToken;
use vdkit::stream::Stdin;
use vdkit_lab as lab;

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
    let mut line = String::new();
    let read = BufReader::new(Stdin::open(cancel.clone())?).read_line(&mut line);
    cancel.check()?;
    read?;
    Ok(Path::new(line.trim()) == device)
}
