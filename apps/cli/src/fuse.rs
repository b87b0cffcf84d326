//! FUSE mounts, shared by `vdkit mount` and `vdkit serve --fuse`.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
pub use vdkit::fuse::Server;
use vdkit::fuse::{Ending, MountError, ServerOptions};
use vdkit::serve::Export;

use crate::failure::{Failure, Tone, not_made, print_line};

/// Options of the mounted file.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct FuseOptions {
    /// Let other users open the file too, subject to its permissions
    ///
    /// Without this option only the user who mounts can open the file; not even root can. Users
    /// other than root need the line user_allow_other in /etc/fuse.conf.
    #[arg(long)]
    pub allow_other: bool,
    /// Let writes past the end, and truncate, grow the disk
    ///
    /// Without this option the disk keeps its size, like a block device. The disk never shrinks.
    #[arg(long)]
    pub growable: bool,
}

/// Mounts an export over a file.
///
/// # Errors
/// The mount's error, with a hint on how to enable FUSE.
pub fn mount(export: &Arc<Export>, file: &Path, options: FuseOptions) -> Result<Server, Failure> {
    let mut server = ServerOptions::default();
    (server.allow_other, server.growable) = (options.allow_other, options.growable);
    Server::start(Arc::clone(export), file, &server).map_err(|error: MountError| {
        if let MountError::Point { file, action, source } = &error
            && source.kind() == std::io::ErrorKind::NotFound
        {
            let place = format!("{}: cannot {action} the mount point", file.display());
            return not_made(&place, file, source);
        }
        let failure = Failure::failed(error.to_string());
        match error.hint() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    })
}

/// Unmounts the file, and waits up to `patience` for its users to close it.
///
/// # Errors
/// The system refuses.
pub fn unmount(server: Server, patience: Duration) -> Result<(), Failure> {
    let file = server.file().display().to_string();
    match server.stop(patience) {
        Ok(Ending::Clean) => Ok(()),
        Ok(Ending::InUse) => {
            let text = format!("{file}: was still in use; what its users do from now on fails");
            print_line(Tone::Warning, &text);
            Ok(())
        }
        Err(error) => Err(Failure::failed(format!(
            "{file}: could not be served to its end and unmounted: {error}"
        ))),
    }
}
