//! What is around a case: processes that hold an image, another user, a file system without space.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::cases::Around;

/// Bytes of the small file system.
const SMALL_BYTES: u64 = 2 << 20;

/// A process of the reference that holds an image open until it is dropped.
#[derive(Debug)]
pub(crate) struct Holder(Option<Child>);

impl Holder {
    /// The holder that `around` asks for, if any; it has its locks.
    pub(crate) fn of(reference: &Path, folder: &Path, around: Around) -> Self {
        let (name, how) = match around {
            Around::Writer(name) => (name, &[][..]),
            Around::Reader(name) => (name, &["-r"][..]),
            _ => return Self(None),
        };
        let mut child = Command::new(reference.with_file_name("qemu-io"))
            .args(how)
            .args(["-f", "qcow2", name])
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-io");
        let (input, output) = (child.stdin.as_mut(), child.stdout.as_mut());
        input.expect("a pipe").write_all(b"length\n").expect("qemu-io reads");
        // It answers when the image is open, and so locked.
        let mut line = String::new();
        BufReader::new(output.expect("a pipe")).read_line(&mut line).expect("qemu-io answers");
        assert!(line.contains("MiB"), "{name}: {line}");
        Self(Some(child))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The words that run a program as a user who owns nothing.
pub(crate) fn as_stranger() -> &'static [&'static str] {
    &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
}

/// Whether that user reaches a program.
pub(crate) fn stranger_runs(program: &Path) -> bool {
    let [first, rest @ ..] = as_stranger() else { return false };
    let done = Command::new(first).args(rest).args(["test", "-x"]).arg(program).status();
    done.is_ok_and(|status| status.success())
}

/// Whether this process may change users and mount.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|found| found.uid() == 0)
}

/// Mounts a small file system.
///
/// # Panics
/// That fails.
pub(crate) fn mount_small(folder: &Path) {
    let size = format!("size={SMALL_BYTES}");
    let done =
        Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(folder).status();
    assert!(done.is_ok_and(|status| status.success()), "mounting on {}", folder.display());
}

/// Unmounts it.
pub(crate) fn unmount(folder: &Path) {
    let _ = Command::new("umount").arg(folder).status();
}
