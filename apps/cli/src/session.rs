//! The state of one call of the command.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use vdkit::CancelToken;

use crate::failure::{Exit, Failure, Tone, print_line};
use crate::output::Output;

/// The state of one call; by default nothing is set up yet.
#[derive(Debug, Default)]
pub struct Session {
    /// The buffered results.
    pub out: Output,
    cancel: Option<CancelToken>,
}

impl Session {
    /// Prints the warnings of opening a disk.
    pub fn warn(&self, disk: &vdkit::Disk) {
        disk.warnings().for_each(|warning| print_line(Tone::Warning, warning));
    }

    /// After this call, the first SIGINT or SIGTERM asks the job to stop and clean up, and a SIGINT
    /// after that ends the process at once. A further SIGTERM does not: timeout(1) sends each signal
    /// twice, to the process and to its group. Without this call a signal ends the process as usual, which
    /// suits a command that has nothing to clean up.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn cancel_on_signal(&mut self) -> Result<CancelToken, Failure> {
        if let Some(token) = &self.cancel {
            return Ok(token.clone());
        }
        let stop = Arc::new(AtomicBool::new(false));
        // The order matters: the conditional shutdown must read the flag before this signal sets it.
        flag::register_conditional_shutdown(SIGINT, Exit::Interrupted as i32, Arc::clone(&stop))
            .and_then(|_| flag::register(SIGINT, Arc::clone(&stop)))
            .and_then(|_| flag::register(SIGTERM, Arc::clone(&stop)))
            // Exceeding the file size limit (`ulimit -f`) is then an error that the command cleans up
            // after, instead of a fatal signal.
            .and_then(|_| flag::register(SIGXFSZ, Arc::default()))
            .map_err(|error| Failure::failed(format!("cannot handle signals: {error}")))?;
        let token = CancelToken::from_flag(stop);
        self.cancel = Some(token.clone());
        Ok(token)
    }
}
