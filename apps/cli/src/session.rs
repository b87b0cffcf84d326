//! What one call of the command carries along.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use vdkit::CancelToken;

use crate::failure::{Exit, Failure};
use crate::output::Output;

/// The state of one call.
#[derive(Debug, Default)]
pub struct Session {
    /// Results go here.
    pub out: Output,
    cancel: Option<CancelToken>,
}

impl Session {
    /// Nothing is set up yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Says what opening a disk did or found that the user should know.
    pub fn warn(&self, disk: &vdkit::Disk) {
        for warning in disk.warnings() {
            eprintln!("warning: {}", crate::failure::printable(warning));
        }
    }

    /// From now on the first SIGINT or SIGTERM asks the job to stop and clean up, and a second one
    /// ends the process at once. Without this call a signal ends the process as usual, which is
    /// right for a command that has nothing to clean up.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn cancel_on_signal(&mut self) -> Result<CancelToken, Failure> {
        if let Some(token) = &self.cancel {
            return Ok(token.clone());
        }
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the shutdown looks at the flag before this signal sets it.
            flag::register_conditional_shutdown(
                signal,
                Exit::Interrupted as i32,
                Arc::clone(&stop),
            )
            .and_then(|_| flag::register(signal, Arc::clone(&stop)))
            .map_err(|error| Failure::failed(format!("cannot handle signals: {error}")))?;
        }
        // A file beyond what the user may make (`ulimit -f`) is an error, and is cleaned up after.
        flag::register(SIGXFSZ, Arc::default())
            .map_err(|error| Failure::failed(format!("cannot handle signals: {error}")))?;
        let token = CancelToken::from_flag(stop);
        self.cancel = Some(token.clone());
        Ok(token)
    }
}
