//! The state of one call of the command.

use std::path::Path;

use vdkit::{CancelToken, Disk, OpenOptions};
use vdkit_qemu::signals;

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
    /// Opens a disk, and prints the warnings of opening it.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open(&self, path: &Path, options: &OpenOptions) -> Result<Disk, Failure> {
        let disk = Disk::open(&vdkit::registry(), path, options)?;
        disk.warnings().for_each(|warning| print_line(Tone::Warning, warning));
        Ok(disk)
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
        let token = signals::cancel_on_signal(Exit::Interrupted as i32)
            .map_err(|error| Failure::failed(format!("cannot handle signals: {error}")))?;
        self.cancel = Some(token.clone());
        Ok(token)
    }
}
