//! The child process: enters the sandbox, judges the image on stdin and answers on stdout.

use std::io::Write;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vdkit::Storage;
use vdkit::jobs::inspect::{InspectOptions, InspectReport, inspect};
use vdkit::storage::{FileOptions, FileStorage, LockMode};

use crate::failure::{Tone, print_line};
use crate::sandbox::{self, Sandbox};

/// First argument that makes this program act as the child. Internal.
pub const CHILD: &str = "__inspect";

/// The child's answer in JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Answer {
    /// The sandbox that was in force.
    pub(super) sandbox: Sandbox,
    /// The verdict; none if the child could not judge the image.
    pub(super) report: Option<InspectReport>,
    /// Why the child could not judge the image.
    pub(super) error: Option<String>,
}

/// Runs the child. Its one argument holds the options in JSON.
pub fn main(arguments: &[std::ffi::OsString]) -> ExitCode {
    let options = arguments.first().and_then(|text| text.to_str());
    let Some(options) = options.and_then(|text| serde_json::from_str(text).ok()) else {
        print_line(
            Tone::Error,
            &format!("'{CHILD}' is for vdkit itself; use 'vdkit inspect IMAGE'"),
        );
        return ExitCode::from(2);
    };
    let answer = answer(&options);
    let written = serde_json::to_vec(&answer)
        .map_err(std::io::Error::other)
        .and_then(|text| std::io::stdout().write_all(&text));
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn answer(options: &InspectOptions) -> Answer {
    // End with the parent: nobody else reads the answer. Only stdin, stdout and stderr are needed.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    close_inherited();
    let storage = match open() {
        Ok(storage) => storage,
        Err(error) => return failed(Sandbox::default(), error),
    };
    let seconds = options.time_max.as_secs().saturating_add(1);
    let sandbox = sandbox::enter(options.memory_max, seconds);
    match inspect(storage, options) {
        Ok(report) => Answer { sandbox, report: Some(report), error: None },
        Err(error) => failed(sandbox, error),
    }
}

fn failed(sandbox: Sandbox, error: impl std::fmt::Display) -> Answer {
    Answer { sandbox, report: None, error: Some(error.to_string()) }
}

fn open() -> vdkit::Result<Arc<dyn Storage>> {
    let file = std::io::stdin().as_fd().try_clone_to_owned().map_err(|source| {
        vdkit::Error::File { file: "the image".to_owned(), action: vdkit::IoAction::Open, source }
    })?;
    // The parent holds the lock.
    let options = FileOptions::read_only().lock(LockMode::Off);
    Ok(Arc::new(FileStorage::from_file(file.into(), "the image", &options)?))
}

/// Closes file descriptors that the caller of the command left open.
fn close_inherited() {
    // SAFETY: takes numbers only. Runs before this process has opened anything but the standard
    // streams, so no descriptor that this process uses is closed.
    unsafe {
        libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0u32);
    }
}
