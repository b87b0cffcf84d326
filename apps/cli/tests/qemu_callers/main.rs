//! Programs that call `qemu-img` and `qemu-nbd` run with vdkit under these names first on PATH.
//!
//! Every call goes through a wrapper that writes its command line into a log, so that a test can show
//! that vdkit was called and not QEMU's program. QEMU's own programs judge the images that result.
//!
//! The tests that boot libguestfs' appliance for more than one step are ignored by default (two
//! minutes):
//!
//! ```text
//! cargo test -p vdkit-cli --test qemu_callers -- --ignored
//! ```

#[path = "../common/mod.rs"]
mod common;

mod backup;
mod guestfs;
mod images;
mod libvirt;
mod openstack;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::Scratch;

/// Limit of one call, in seconds: libvirt's first look at an emulator can take more than half a minute.
const LIMIT: &str = "180";

/// A scratch folder with a `bin` that callers find first on their PATH.
pub struct Stage {
    pub(crate) scratch: Scratch,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        std::fs::create_dir(scratch.path("bin")).unwrap();
        let log = scratch.path("calls");
        for name in ["qemu-img", "qemu-nbd"] {
            let text = format!(
                "#!/bin/sh\nprintf '%s\\n' \"{name} $*\" >>'{}'\nexec '{}' {name} \"$@\"\n",
                log.display(),
                env!("CARGO_BIN_EXE_vdkit")
            );
            let program = scratch.write(&format!("bin/{name}"), text.as_bytes());
            std::fs::set_permissions(program, PermissionsExt::from_mode(0o755)).unwrap();
        }
        Self { scratch }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// PATH with the wrappers first.
    pub(crate) fn search_path(&self) -> OsString {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders = vec![self.path("bin")];
        folders.extend(std::env::split_paths(&path));
        folders.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
        std::env::join_paths(folders).unwrap()
    }

    /// A command that finds vdkit first and ends when its time is over.
    pub(crate) fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-k", "5", LIMIT, program]).args(arguments);
        command.current_dir(self.path("")).stdin(Stdio::null()).env("PATH", self.search_path());
        command
    }

    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        said(self.command(program, arguments))
    }

    /// QEMU's own program, which judges what vdkit has made.
    pub(crate) fn qemu(&self, program: &str, arguments: &[&str]) -> String {
        let done = common::peer(&self.path(""), program, arguments);
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// Asks QEMU whether an image without encryption is sound and has this format and size.
    pub(crate) fn sound(&self, image: &str, format: &str, bytes: u64) {
        self.has_size(image, format, bytes);
        if format == "qcow2" {
            self.qemu("qemu-img", &["check", "-q", image]);
        }
    }

    pub(crate) fn has_size(&self, image: &str, format: &str, bytes: u64) {
        let text = self.qemu("qemu-img", &["info", "--output=json", "-f", format, image]);
        let info: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(info["virtual-size"], bytes, "{image}: {text}");
    }

    /// The command lines with which vdkit was called.
    pub(crate) fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Whether there was a call with all these words in it.
    pub(crate) fn assert_called(&self, words: &[&str]) {
        let calls = self.calls();
        let found = calls.iter().any(|call| words.iter().all(|word| call.contains(word)));
        assert!(found, "no call with {words:?}:\n{}", calls.join("\n"));
    }
}

/// Runs a command that must succeed; gives all that it said.
pub fn said(mut command: Command) -> String {
    let done = command.output().unwrap();
    let text =
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {}\n{text}", done.status);
    text
}
