//! Signals that end a command.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use vdkit::CancelToken;

/// A token that SIGINT and SIGTERM cancel, so that the job stops and cleans up. A second SIGINT ends
/// the process at once, with exit code `code`. A second SIGTERM does not: timeout(1) sends its signal
/// twice.
///
/// Exceeding the file size limit (`ulimit -f`) is an error from then on, which the job cleans up
/// after, instead of a fatal signal.
///
/// # Errors
/// The system refuses the handlers.
pub fn cancel_on_signal(code: i32) -> io::Result<CancelToken> {
    cancel_on(&[SIGINT, SIGTERM], code)
}

/// As [`cancel_on_signal`], for a server, which a hangup ends in the same way: metadata that is not
/// flushed, its socket and its temporary files would be left behind otherwise.
///
/// # Errors
/// The system refuses the handlers.
pub fn end_on_signal(code: i32) -> io::Result<CancelToken> {
    cancel_on(&[SIGINT, SIGTERM, SIGHUP], code)
}

fn cancel_on(signals: &[i32], code: i32) -> io::Result<CancelToken> {
    let stop = Arc::new(AtomicBool::new(false));
    // The order matters: the conditional shutdown must read the flag before this signal sets it.
    flag::register_conditional_shutdown(SIGINT, code, Arc::clone(&stop))?;
    for &signal in signals {
        flag::register(signal, Arc::clone(&stop))?;
    }
    flag::register(SIGXFSZ, Arc::default())?;
    Ok(CancelToken::from_flag(stop))
}
