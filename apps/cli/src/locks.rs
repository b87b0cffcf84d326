//! Hints for an image that another process has locked.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use vdkit::LockHolder;

use crate::failure::quoted;

/// The request of `vdkit ctl` that replaces a subcommand while the image is served.
const INSTEAD: &[(&str, &str)] = &[
    ("resize", "resize SIZE"),
    ("snapshot", "snapshot NAME"),
    ("commit", "commit"),
    ("bitmap", "bitmap-list"),
    ("info", "status"),
];

/// A hint for a user who is blocked by `holder`. `shared` says that the command can read the image
/// in spite of the lock.
pub(crate) fn hint(holder: Option<&LockHolder>, shared: bool, command: &str) -> String {
    if holder.is_some_and(LockHolder::is_this_process) {
        return "give the new file another name; it can take the old one's place when it is finished ('mv')"
            .to_owned();
    }
    let mut hint = match holder.and_then(|holder| server(holder.pid)) {
        Some(Some(socket)) => {
            let socket = quoted(&socket.display().to_string());
            let action = INSTEAD.iter().find(|(name, _)| *name == command);
            let action = action.map_or("status", |(_, action)| action);
            format!(
                "that server takes commands: 'vdkit ctl {socket} {action}' ('vdkit help ctl' lists them)"
            )
        }
        Some(None) => {
            "that server could be commanded ('vdkit ctl') if it had been started with --control \
                       SOCKET; end it first"
                .to_owned()
        }
        None => "end that process first".to_owned(),
    };
    if shared {
        hint.push_str(
            "; to read the image all the same, perhaps between two of its changes: --force-share",
        );
    }
    hint
}

/// Whether a process is `vdkit serve`, and its control socket.
fn server(process: u32) -> Option<Option<PathBuf>> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let line = std::fs::read(folder.join("cmdline")).ok()?;
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let program = Path::new(OsStr::from_bytes(words.first()?)).file_name()?;
    if !program.to_string_lossy().starts_with("vdkit") || words.get(1) != Some(&&b"serve"[..]) {
        return None;
    }
    let given = words.iter().enumerate().find_map(|(index, word)| match *word {
        b"--control" => words.get(index + 1).copied(),
        word => word.strip_prefix(b"--control="),
    });
    let socket = given.map(|socket| {
        let socket = Path::new(OsStr::from_bytes(socket));
        // Resolve a relative name in the server's working directory.
        match std::fs::read_link(folder.join("cwd")) {
            Ok(started_in) if std::env::current_dir().is_ok_and(|here| here != started_in) => {
                started_in.join(socket)
            }
            _ => socket.to_owned(),
        }
    });
    Some(socket)
}
